"""What a divisor was made of, noted while it is computed."""

import pytest
import torch

from oomfix.runtime.batches.bounds import Bound, Bounds
from oomfix.runtime.state.probe import Writes
from oomfix.runtime.verification.watching import Watch

MASK = torch.tensor([1.0, 1.0, 0.0])


def bounded(made):
    """What is noted of the divisor that `made` computes of the number of entries that a mask leaves."""
    with Bounds() as bounds:
        divisor = made(MASK.sum())
    return bounds.behind(divisor)


@pytest.mark.parametrize(
    ("made", "of_five", "of_nothing"),
    [
        (lambda count: count.clamp(min=1), 5, 1),
        (lambda count: count.clamp_(1), 5, 1),
        (lambda count: torch.clip(count, min=3), 5, 3),
        (lambda count: count + 1e-8, 5 + 1e-8, 1e-8),
        (lambda count: 2 + count, 7, 2),
        (lambda count: count.clamp_min(2).mul(3), 15, 6),
        (lambda count: (count + 1) * 4, 24, 4),
        (lambda count: torch.max(count, torch.tensor(1.0)), 5, 1),
        (lambda count: count.clamp(min=1).to(torch.float64), 5, 1),
        (lambda count: count.long().clamp(min=1).float(), 5, 1),
    ],
)
def test_the_steps_to_a_divisor_give_that_of_other_counts(made, of_five, of_nothing):
    found = bounded(made)
    assert found.count.item() == 2
    assert found.bound(5) == of_five
    assert found.bound(0) == of_nothing


@pytest.mark.parametrize(
    "made",
    [
        lambda count: count,
        lambda count: count * 2,
        lambda count: count.clamp(max=9),
        lambda count: count.clamp(1, 9),
        lambda count: count.clamp(min=torch.tensor(1.0)),
        lambda count: torch.max(count, torch.ones(2)),
        lambda count: torch.minimum(count, torch.tensor(1.0)),
        lambda count: count.clamp(min=0),
        lambda count: count + float("inf"),
        lambda count: count + True,
        lambda count: torch.add(count, 1, alpha=2),
        lambda count: count.clamp(min=1).sqrt(),
        lambda count: count.clamp(min=1).to(torch.long),
        lambda count: count.requires_grad_().clamp(min=1),
        lambda count: torch.stack([count, count]).clamp(min=1),
        lambda count: torch.complex(count, count) + 1,
    ],
)
def test_what_is_no_bounded_number_is_not_noted(made):
    assert bounded(made) is None


def test_a_divisor_that_was_used_for_something_else_too_is_forgotten():
    for use in (torch.sqrt, torch.Tensor.item, lambda divisor: torch.stack([divisor]), lambda divisor: 2 / divisor):
        with Bounds() as bounds:
            divisor = MASK.sum().clamp(min=1)
            assert bounds.behind(divisor) is not None
            use(divisor)
        assert bounds.behind(divisor) is None


def test_losses_are_divided_by_it_and_it_may_be_asked_what_it_is_like():
    loss = torch.ones((), requires_grad=True)
    with Bounds() as bounds:
        divisor = MASK.sum().clamp(min=1)
        loss / divisor + loss / divisor
        assert divisor.dtype == torch.float32 and divisor.requires_grad is False
    assert bounds.behind(divisor) is not None


@pytest.mark.parametrize(
    "divided",
    [lambda loss, count: loss.detach() / count, lambda loss, count: torch.ones(2, requires_grad=True) / count],
)
def test_other_numbers_that_are_divided_by_it_say_nothing_of_losses(divided):
    with Bounds() as bounds:
        divisor = MASK.sum().clamp(min=1)
        divided(torch.ones((), requires_grad=True), divisor)
    assert bounds.behind(divisor) is None


def test_a_divisor_divided_by_itself_is_forgotten():
    with Bounds() as bounds:
        divisor = MASK.sum().clamp(min=1)
        divisor / divisor
    assert bounds.behind(divisor) is None


def test_what_is_counted_is_kept_as_it_was():
    count = MASK.sum()
    with Bounds() as bounds:
        divisor = count.clamp(min=1)
    count.zero_()
    assert bounds.behind(divisor).count.item() == 2


def test_places_of_what_went_into_functions_that_bend_on_the_way_are_noted():
    watch = Watch(rows=3, held_out=None, writes=Writes())
    with watch, Bounds(watch.bent) as bounds:
        assert MASK.sum() < 7
        divisor = MASK.sum().clamp(min=1).clamp(min=2)
    assert [bent.value.item() for bent in watch.bent] == [2, 2, 2]
    assert bounds.behind(divisor).bent == (1, 2)


def test_a_bound_is_felt_where_the_divisor_is_not_in_proportion_to_what_counts():
    assert Bound((("at least", 1.0),)).is_felt(0)
    assert not Bound((("at least", 1.0),)).is_felt(2)
    assert not Bound((("plus", 1e-8), ("times", 3.0))).is_felt(2)
    assert Bound((("plus", 1.0), ("times", 3.0))).is_felt(2)
