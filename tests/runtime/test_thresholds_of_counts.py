"""What a loss makes of a count of the whole batch by a threshold is never taken for what parts make of theirs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

ROWS = 24


def data(count: int, least: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, labels and a mask, which stands in one half of every second batch."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        mask = torch.rand(ROWS, generator=generator) < 0.4
        mask[ROWS // 2 : None if number % 2 else 0] = False
        mask[:least] = True
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        found.append((x, torch.randint(0, 4, (ROWS,), generator=generator), mask))
    return found


def split_calls(loss, batches, micro_batches: int = 3) -> int:
    """How many calls ran in parts of a training whose losses and gradients are those of plain torch."""
    runtime.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in batches:
        whole = loss(model, *batch)
        expected = torch.autograd.grad(whole, list(model.parameters()))
        found = memory.forward_backward(lambda *batch: loss(model, *batch), *batch)
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close([found, *gradients], [whole.detach(), *expected], rtol=1e-11, atol=1e-13)
        memory.step(optimizer)
    (known,) = memory._forwards
    return known.split_calls


FACTORS = [
    lambda count: count > 2,
    lambda count: 1 if count > 2 else 0.3,
    lambda count: 1 if count.item() - 1 > 2 else 0.3,
    lambda count: torch.where(count > 3, 1.0, 0.5),
    lambda count: 1 if count == 4 else 2,
    lambda count: (count - 3).sign(),
    lambda count: torch.heaviside(count.double() - 3.5, torch.zeros((), dtype=torch.float64)),
    lambda count: (count.double() - 3).relu(),
    lambda count: 1 / count.clamp(max=4).clamp(min=1),
]
ROUNDED = [
    lambda count: count // 2 + 1,
    lambda count: count.item() // 2 + 1,
    lambda count: count % 3 + 1,
    lambda count: (count >> 1).clamp(min=1),
    lambda count: (count.item() >> 1) + 1,
    lambda count: (count / 3).ceil().clamp(min=1),
    lambda count: torch.div(count, 2, rounding_mode="floor").clamp(min=1),
    lambda count: torch.round(count / 2).clamp(min=1),
]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("least", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_factor_that_jumps_or_bends_with_a_count_leaves_the_batch_whole(factor, least):
    """Also where no row has any of what is counted, or all rows of one part of those that are checked."""

    def beside(model, x, y, mask):
        return factor(mask.sum()) * F.cross_entropy(model(x), y)

    def of_its_own(model, x, y, mask):
        each = F.cross_entropy(model(x), y, reduction="none")
        return factor(mask.sum()) * ((each * mask).sum() / mask.sum().clamp(min=1)) + model(x).square().mean()

    for loss in (beside, of_its_own):
        assert split_calls(loss, data(4, least)) == 0


@pytest.mark.parametrize(
    "divisor", [*ROUNDED[::2], *(pytest.param(one, marks=pytest.mark.slow) for one in ROUNDED[1::2])]
)
def test_a_count_that_is_rounded_is_no_count(divisor):
    def alone(model, x, y, mask):
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / divisor(mask.sum())

    def beside(model, x, y, mask):
        return alone(model, x, y, mask) + model(x)[y > 1].square().mean()

    for loss in (alone, beside):
        assert split_calls(loss, data(4)) == 0
        assert split_calls(loss, data(4, least=2)) == 0


TRUTHS = [
    lambda mask: mask.any(),
    lambda mask: 1 if mask.any() else 3,
    lambda mask: 1 if mask.sum() else 3,
    lambda mask: 3 if not mask.sum() else 1,
    lambda mask: 3 if mask.sum() == 0 else 1,
    lambda mask: 1 + (mask.sum() != 0).double(),
    lambda mask: 1 if not (~mask).all() else 3,
]


@pytest.mark.parametrize("factor", TRUTHS)
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_factor_that_follows_what_is_true_of_a_batch_is_told_where_a_part_has_another(factor, micro_batches):
    """Every batch has a sample that counts, and from the third one on, some part has none."""

    def loss(model, x, y, mask):
        return factor(mask) * F.cross_entropy(model(x), y) + model(x).square().mean()

    batches = data(6, least=1)
    for number, (_, _, mask) in enumerate(batches):
        mask[:: 4 if number < 2 else ROWS] = True
    assert split_calls(loss, batches, micro_batches) < 6


def test_what_is_true_of_every_part_leaves_them_parts():
    def loss(model, x, y, mask):
        each = F.cross_entropy(model(x), y, reduction="none")
        return each[mask].mean() if mask.any() else 0 * each.sum()

    batches = data(6)
    for _, _, mask in batches:
        mask[::4] = True
    assert split_calls(loss, batches) >= 5


def test_a_loss_that_is_a_plain_number_for_some_rows_leaves_the_batch_whole():
    """Where a check meets some that have one and some that have none, it says so, and does not fail."""

    def loss(model, x, y, mask):
        return model(x).square().mean() if (mask & (y > 0)).any() else 0.0

    for number, (x, y, mask) in enumerate(data(24)):
        generator = torch.Generator().manual_seed(number)
        mask = torch.rand(ROWS, generator=generator) < 0.3
        mask[number % ROWS], y[number % ROWS] = True, 1
        split_calls(loss, [(x, y, mask)])
