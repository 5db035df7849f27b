"""A mean that a program takes itself over what a mask leaves is split exactly, by what the parts divide by."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.runtime.verification.divisors import counting, divisors, numbers

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS, TIMES = 12, 6
MORE_MASKS = [pytest.param("ragged", marks=pytest.mark.slow)]  # the first two batches of "later"
CALLS = 6  # of which the first, the second and the fourth are checked

MEANS: dict[str, Loss] = {
    "sum by sum": lambda output, target, mask: (((output - target) ** 2).mean(-1) * mask).sum() / mask.sum(),
    "number by number": lambda output, target, mask: ((output - target).abs().sum(-1) * mask).sum() / mask.sum().item(),
    "a little added": lambda output, target, mask: (
        (((output - target) ** 2).sum(-1) * mask).sum() / (mask.sum() + 1e-12)
    ),
    "selected": lambda output, target, mask: ((output - target) ** 2).mean(-1)[mask.bool()].mean(),
    "a loss of torch": lambda output, target, mask: F.smooth_l1_loss(output[mask.bool()], target[mask.bool()]),
    "a cross entropy of what is selected": lambda output, target, mask: (
        F.cross_entropy(output[mask.bool()], target[mask.bool()].argmax(-1), reduction="sum") / mask.sum()
    ),
    "its mean": lambda output, target, mask: F.cross_entropy(output[mask.bool()], target[mask.bool()].argmax(-1)),
    "accumulated": lambda output, target, mask: (((output - target) ** 2).sum(-1) * mask).sum() / mask.sum() / 4,
    "two terms": lambda output, target, mask: (
        (((output - target) ** 2).sum(-1) * mask).sum() / mask.sum()
        + 0.5 * ((output.abs().sum(-1) * mask).sum() / mask.sum())
    ),
}
OTHERS: dict[str, Loss] = {
    # another weight would be right for each term
    "rows and what is left": lambda output, target, mask: (
        (((output - target) ** 2).sum(-1) * mask).sum() / mask.sum() + (output**2).mean()
    ),
    "divided by a norm": lambda output, target, mask: (output - target).pow(2).sum() / target.norm(),
    "at least one by hand": lambda output, target, mask: (
        (((output - target) ** 2).mean(-1) * mask).sum() / max(int(mask.sum()), 1)
    ),
    "or one": lambda output, target, mask: (
        (((output - target) ** 2).mean(-1) * mask).sum() / (4 * (mask.sum().item() or 1))
    ),
    "all terms, by at least four": lambda output, target, mask: (
        (output - target).abs().sum() / (4 * max(int(mask.sum()), 1))
    ),
    # a part that leaves nothing has terms nevertheless, as the background has in a detector's loss
    "terms of what is not left": lambda output, target, mask: (output - target).abs().sum() / mask.sum(),
    "another mean where none is left": lambda output, target, mask: (
        ((output - target) ** 2).mean(-1)[mask.bool()].mean() if mask.any() else (output - target).abs().mean()
    ),
    "the longest": lambda output, target, mask: (
        (((output - target) ** 2).sum(-1) * mask).sum() / mask.sum() / mask.sum(1).max()
    ),
    "by what it trains": lambda output, target, mask: ((output - target) ** 2).sum() / output.exp().sum(),
    # what is kept away from 0 in one place is not in another, or goes elsewhere too
    "bounded and not": lambda output, target, mask: (
        masked(output, target, mask) / mask.sum().clamp(min=1) + masked(output, -target, mask) / (mask.sum() + 1e-8)
    ),
    "bounded of other masks": lambda output, target, mask: (
        masked(output, target, mask) / mask.sum().clamp(min=1)
        + masked(output[:, :3], -target[:, :3], mask[:, :3]) / mask[:, :3].sum().clamp(min=1)
    ),
    "bounded twice": lambda output, target, mask: (
        masked(output, target, mask) / mask.sum().clamp(min=1) / mask.sum().clamp(min=1)
    ),
    "bounded at both ends": lambda output, target, mask: masked(output, target, mask) / mask.sum().clamp(1, 30),
    "bounded by a tensor": lambda output, target, mask: (
        masked(output, target, mask) / mask.sum().clamp(mask.new_ones(()))
    ),
    "bounded norm": lambda output, target, mask: masked(output, target, mask) / target.norm().clamp(min=1),
    "bounded and counted": lambda output, target, mask: also_counted(output, target, mask),
    "bounded and joined": lambda output, target, mask: also_joined(output, target, mask),
    "bounded and read": lambda output, target, mask: also_read(output, target, mask),
    "pairs": lambda output, target, mask: (
        ((output @ output.transpose(1, 2)).mean(2) * mask).sum() / mask.sum() * output.mean()
    ),
}


# those whose means are counted before the parts run
COUNTED_FIRST = {
    "rows and what is left",
    "at least one by hand",
    "or one",
    "all terms, by at least four",
    "terms of what is not left",
    "another mean where none is left",
    "bounded and not",
    "bounded of other masks",
}


def masked(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (((output - target) ** 2).mean(-1) * mask).sum()


def also_counted(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum().clamp(min=1)
    return (((output - target) ** 2).mean(-1) * (mask / count)).sum() + masked(output, -target, mask) / count


def also_joined(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum().clamp(min=1)
    return masked(output, target, mask) / count * (torch.stack([count, count]).mean() / count)


def also_read(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum().clamp(min=1)
    return masked(output, target, mask) / count * (2 if count.tolist() > 16 else 1)


# what a mask leaves, kept away from 0: nearly 14 entries of each of three parts, 42 of a batch
BOUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "at least one": lambda mask: mask.sum().clamp(min=1),
    "of torch": lambda mask: torch.clamp(mask.sum(), min=1),
    "by position": lambda mask: mask.sum().clamp(1.0),
    "of its own name": lambda mask: mask.sum().clamp_min(1e-6),
    "in place": lambda mask: mask.sum().clamp_(min=1),
    "of a whole number": lambda mask: mask.bool().sum().clamp(min=1),
    "a little added": lambda mask: mask.sum() + 1e-8,
    "to a little": lambda mask: 1e-8 + mask.sum(),
    "added in place": lambda mask: mask.sum().add_(1e-8),
    "one added": lambda mask: mask.sum() + 1,
    "all features": lambda mask: 5 * mask.sum().clamp(min=1),
    "of all features": lambda mask: (mask.sum() * 5).clamp(min=1) + 1e-8,
    "cast": lambda mask: mask.sum(dtype=torch.float32).clamp(min=1).to(mask.dtype),
    "more than a part has": lambda mask: mask.sum().clamp(min=16),
    "more than a batch has": lambda mask: mask.sum().clamp(min=1000),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batches(count: int, masks: str = "ragged") -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sequences of other lengths.

    They are "full" in the first three batches; "empty" for two of three parts, or so from the third batch on ("later").
    Or there is "nothing" in every second batch.
    """
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        x, y = torch.randn(2, ROWS, TIMES, 5, dtype=torch.float64, generator=generator)
        lengths = torch.randint(1, TIMES + 1, (ROWS, 1), generator=generator)
        if masks == "full" and number < 3:
            lengths[:] = TIMES
        if masks == "empty" or (masks == "later" and number > 1):
            lengths[4:] = 0
        if masks == "nothing" and number % 2:
            lengths[:] = 0
        found.append((x, y, (torch.arange(TIMES) < lengths).double()))
    return found


def trained(loss: Loss, data: list[tuple[torch.Tensor, ...]], **overrides: object) -> tuple[torch.Tensor, int]:
    """The weights after a step for each batch, and how many calls ran in parts."""
    runtime.reset()
    model = network()
    memory = runtime.preset("16gb", precision="fp32", **overrides)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y, mask in data:
        memory.forward_backward(lambda x, y, mask: loss(model(x), y, mask), x, y, mask)
        memory.step(optimizer)
    (known,) = memory._forwards
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), known.split_calls


@pytest.mark.parametrize("masks", ["full", "later", *MORE_MASKS, pytest.param("empty", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MEANS)
def test_means_over_what_a_mask_leaves_train_in_parts_as_whole(name, masks):
    data = batches(CALLS, masks)
    whole, _ = trained(MEANS[name], data)
    split, calls = trained(MEANS[name], data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == CALLS


@pytest.mark.parametrize(
    "masks", ["empty", "later", "nothing", *MORE_MASKS, pytest.param("full", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", BOUNDED)
def test_means_whose_divisor_is_kept_away_from_0_train_in_parts_as_whole(name, masks):
    """No part divides by the least number, or some, or all, or the batch does too, where every second one is empty."""
    data = batches(CALLS, masks)

    def loss(output, target, mask):
        return masked(output, target, mask) / BOUNDED[name](mask)

    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    # few rows that are below a bound do not tell a mean from a sum
    assert calls == CALLS or "more" in name


@pytest.mark.parametrize("masks", ["empty", "later", "nothing", *MORE_MASKS])
@pytest.mark.parametrize(
    "bounded",
    [
        lambda mask: mask.sum().clamp(min=1),
        lambda mask: mask.sum().clamp(min=16),
        lambda mask: mask.sum() + 1e-8,
        lambda mask: max(int(mask.sum()), 1),
        lambda mask: max(mask.sum(), 1),
        lambda mask: mask.sum() if mask.sum() > 0 else 1,
        lambda mask: torch.maximum(mask.sum(), torch.tensor(1.0)),
    ],
)
def test_terms_of_what_is_not_left_are_weighed_by_what_the_parts_really_divide_by(bounded, masks):
    """As the background is in a detector's loss: a part that leaves nothing divides by the least number, not by 0."""
    # a batch of nothing is divided by 1e-8: after more of them, weights are rounded by more than this compares
    data = batches(CALLS - 2, masks)

    def loss(output, target, mask):
        return (output - target).abs().sum() / bounded(mask)

    whole, _ = trained(loss, data)
    split, _ = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bounded", [lambda mask: mask.sum().clamp(min=1), lambda mask: mask.sum() + 1])
def test_a_part_of_which_one_entry_counts_is_split_where_its_bound_is_seen(bounded):
    """Were it not seen, 1 might stand for 0."""
    data = batches(CALLS, "ragged")
    for number, (_, _, mask) in enumerate(data):
        mask[4:] = 0
        mask[4 + number % 8, 0] = 1

    def loss(output, target, mask):
        return masked(output, target, mask) / bounded(mask)

    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == CALLS


def test_a_divisor_that_few_rows_do_not_reach_is_counted_first(caplog):
    """What its clamp hides of the rows that are checked, it may show of a micro-batch."""

    def loss(output, target, mask):
        return masked(output, target, mask) / BOUNDED["more than a batch has"](mask)

    whole, _ = trained(loss, batches(4))
    split, calls = trained(loss, batches(4), micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == 4
    assert "micro-batches run once more, without gradients, to count these first" in caplog.text


def test_they_are_split_from_the_first_call_on_where_masks_are_full_too():
    _, calls = trained(MEANS["sum by sum"], batches(CALLS, "full"), micro_batches=3)
    assert calls == CALLS


@pytest.mark.parametrize("masks", ["full", "later", *MORE_MASKS])
@pytest.mark.parametrize("name", OTHERS)
def test_other_divisions_run_whole_or_are_counted_first(name, masks):
    # where the fourth call is the first that sees other than full masks, the eighth finds that they can be counted
    data = batches(CALLS + 3 * (masks == "full"), masks)
    whole, _ = trained(OTHERS[name], data)
    split, calls = trained(OTHERS[name], data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert (calls > 0) == (name in COUNTED_FIRST)


def test_masks_that_are_computed_count_too():
    """No padding token is what the loss is a mean over, as in training by hand on tokens."""

    def loss(output, target, mask):
        kept = mask != 0
        return F.cross_entropy(output.transpose(1, 2), target.argmax(-1), reduction="none")[kept].mean()

    data = batches(CALLS)
    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == CALLS


@pytest.mark.parametrize(
    "mean", [lambda error, hard: (error * hard).sum() / hard.sum(), lambda error, hard: error[hard].mean()]
)
def test_masks_that_are_computed_count_from_the_first_call_on_though_they_leave_all_of_a_few_rows(mean):
    """Hard entries: all of them, until the network has learned."""

    def loss(output, target, mask):
        error = (output - target).pow(2)
        return mean(error, error.detach() > 1e-9)

    data = batches(CALLS)
    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == CALLS


def marked(loss: Loss) -> Loss:
    """`loss` where masks mark what is left out, and ones leave nothing."""
    return lambda output, target, mask: loss(output, target, (mask == 0).double())


@pytest.mark.parametrize("name", OTHERS)
def test_other_divisions_are_told_apart_where_masks_mark_what_is_left_out(name):
    data = [(x, y, 1 - mask) for x, y, mask in batches(CALLS, "later")]
    whole, _ = trained(marked(OTHERS[name]), data)
    split, calls = trained(marked(OTHERS[name]), data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert (calls > 0) == (name in COUNTED_FIRST)


@pytest.mark.parametrize(
    "name", ["at least one by hand", "terms of what is not left", "another mean where none is left"]
)
def test_a_part_that_may_have_nothing_is_not_weighed(name):
    """Where no check can leave nothing, the parts show it: a loss of 0, a divisor of 1, other means than the rest."""

    def loss(output, target, codes):
        return OTHERS[name](output, target, (codes != 2).double())

    data = [(x, y, 2 - mask.long()) for x, y, mask in batches(CALLS, "later")]
    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == 2


LATE: dict[str, Loss] = {
    "indices of what is left": lambda output, target, labels: (
        ((output - target) ** 2).mean(-1)[labels.nonzero(as_tuple=True)].mean()
    ),
    "how many of them": lambda output, target, labels: (
        (((output - target) ** 2).mean(-1) * labels.bool()).sum() / len(labels.nonzero())
    ),
    "the longest": lambda output, target, labels: (
        (((output - target) ** 2).mean(-1) * labels.bool()).sum(1).mean() / labels.bool().sum(1).max()
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_a_loss_divides_by_is_in_proportion_to_the_rows_at_every_call(name):
    """All samples have labels at the calls that are checked, and none of these masks is one that could have gaps."""
    data = []
    for number, (x, y, mask) in enumerate(batches(4)):
        labels = 1 + torch.arange(ROWS * TIMES).view(ROWS, TIMES) % 7 % 3
        data.append((x, y, labels if number < 2 else labels * mask.long()))
    whole, _ = trained(LATE[name], data)
    split, calls = trained(LATE[name], data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls >= 2


def test_a_loop_over_samples_of_other_lengths_is_split():
    """Each of its means divides by the length of a sample, whatever micro-batch that is in."""

    def loss(output, target, mask):
        pairs = zip(output, target, mask.bool(), strict=True)
        return sum(F.mse_loss(one[left], other[left]) for one, other, left in pairs) / len(output)

    data = batches(4)
    whole, _ = trained(loss, data)
    split, calls = trained(loss, data, micro_batches=3)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert calls == 4


def test_a_bound_that_changes_is_followed():
    """By a schedule, between two checks: at its seventh batch it is more than a part has, and the batch."""
    found = []
    for sizes in ({}, {"micro_batches": 3}):
        runtime.reset()
        memory, model, least = runtime.preset("16gb", precision="fp32", **sizes), network(), [1]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (x, y, mask) in enumerate(batches(10)):
            least[0] = 100 if number > 5 else 1
            memory.forward_backward(
                lambda x, y, mask, model=model, least=least: (
                    masked(model(x), y, mask) / mask.sum().clamp(min=least[0])
                ),
                x, y, mask,
            )  # fmt: skip
            memory.step(optimizer)
        found.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        (known,) = memory._forwards
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    assert known.split_calls >= 6


@pytest.mark.parametrize("masks", ["empty", "later", "nothing", *MORE_MASKS])
def test_results_beside_a_bounded_mean_are_those_of_the_batch(masks):
    """What is not bounded is no number for a part of which nothing is left, and is one for the batch."""
    model = network()

    def forward(x, y, mask):
        error = masked(model(x), y, mask)
        bounded = error / mask.sum().clamp(min=1)
        return bounded, bounded.item(), (error / mask.sum()).detach(), mask.sum()

    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    for x, y, mask in batches(CALLS, masks):
        found = memory.forward_backward(forward, x, y, mask)
        for one, other in zip(found, forward(x, y, mask), strict=True):
            expected = other.detach() if isinstance(other, torch.Tensor) else other
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=0, equal_nan=True)
    (known,) = memory._forwards
    # a part that divides by the least number does not tell which of the others do
    assert (known.split_calls > 0) == (masks != "empty")


def test_a_bounded_mean_of_a_compiled_model_runs_whole():
    """What compiled code calls is not seen, and what sees it would be compiled with it; from the fourth batch on."""
    found = []
    for sizes in ({}, {"micro_batches": 3}):
        runtime.reset()
        memory, model = runtime.preset("16gb", precision="fp32", **sizes), network()
        for number, (x, y, mask) in enumerate(batches(6, "empty")):
            if number == 3 and sizes:
                model.compile(backend="eager")
            memory.forward_backward(
                lambda x, y, mask, model=model: masked(model(x), y, mask) / mask.sum().clamp(min=1), x, y, mask
            )
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    assert [known.split_calls for known in memory._forwards] == [3, 0]


@pytest.mark.parametrize("masks", ["ragged", "empty", "nothing"])
def test_a_bounded_mean_of_a_model_in_bf16_is_split(masks):
    """Its masks are in bf16 too, which holds such counts as they are."""
    found = []
    for sizes in ({}, {"micro_batches": 3}):
        runtime.reset()
        memory, model = runtime.preset("16gb", precision="bf16", **sizes), network().float()
        for x, y, mask in batches(4, masks):
            memory.forward_backward(
                lambda x, y, mask, model=model: masked(model(x), y, mask) / mask.sum().clamp(min=1),
                *(x.float(), y.float(), mask.bfloat16()),
            )
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
        (known,) = memory._forwards
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2 * float(found[0].abs().max()))
    assert known.split_calls == 4


def test_means_over_masks_of_their_own_are_not_weighed_alike():
    """One leaves nothing of the first part, from the third batch on."""

    def forward(model, x, y, mask, other):
        error, size = (model(x) - y).pow(2).sum(-1), model(x).abs().sum(-1)
        return (error * mask).sum() / mask.sum() + (size * other).sum() / other.sum()

    found = []
    for sizes in ({}, {"micro_batches": 3}):
        runtime.reset()
        memory, model = runtime.preset("16gb", precision="fp32", **sizes), network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (x, y, mask) in enumerate(batches(4)):
            mask, other = torch.ones_like(mask), torch.ones_like(mask)
            if number > 1:
                mask[:4] = 0
            memory.forward_backward(forward, model, x, y, mask, other)
            memory.step(optimizer)
        found.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_metrics_beside_it_are_those_of_the_batch():
    model, (x, y, mask) = network(), batches(1)[0]

    def forward(x, y, mask):
        error = ((model(x) - y) ** 2).mean(-1)
        return (error * mask).sum() / mask.sum(), (error.detach() * mask).sum() / mask.sum(), mask.sum(), error

    runtime.reset()
    found = runtime.preset("16gb", precision="fp32", micro_batches=5).forward_backward(forward, x, y, mask)
    for one, other in zip(found, forward(x, y, mask), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("masks", ["ragged", "full", "empty", "nothing", "first of nothing"])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", ["at least one", "one added", "a little added"])
def test_a_window_of_bounded_means_is_bounded_once(name, splits, masks):
    """Over all that the masks of its batches leave: at its end it is known whether that is less than the bound."""
    data, model = batches(4, masks), network()
    if masks == "first of nothing":
        data[0][2][:] = 0

    def loss(output, target, mask):
        return masked(output, target, mask) / BOUNDED[name](mask)

    memory = runtime.preset("16gb", precision="fp32", **({"micro_batches": 3} if splits else {}))
    # what the loss is a mean of is known from a window before
    for number, (x, y, mask) in enumerate(memory.accumulate([*batches(4), *data], 4)):
        if number == 4:
            model.zero_grad()
        memory.forward_backward(lambda x, y, mask: loss(model(x), y, mask), x, y, mask)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    x, y, mask = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    loss(model(x), y, mask).backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("splits", [False, True])
def test_a_window_is_the_mean_over_all_that_its_masks_leave(splits):
    data, model = batches(4), network()
    loss = MEANS["sum by sum"]
    x, y, mask = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    loss(model(x), y, mask).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    runtime.reset()
    memory = runtime.preset("16gb", precision="fp32", **({"micro_batches": 3} if splits else {}))
    for x, y, mask in memory.accumulate(data, 4):
        memory.forward_backward(lambda x, y, mask: loss(model(x), y, mask), x, y, mask)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("loss", [MEANS["sum by sum"], marked(MEANS["sum by sum"])])
def test_a_window_takes_a_batch_of_which_next_to_nothing_is_left(loss, left):
    """No part of the third batch, or one with a divisor of 1, which may stand for 0, has something to add."""
    data, marks = batches(4), loss is not MEANS["sum by sum"]
    data[2][2][:] = 0
    data[2][2].view(-1)[:left] = 1
    data = [(x, y, 1 - mask if marks else mask) for x, y, mask in data]
    found = []
    for sizes in ({}, {"micro_batches": 3}):
        runtime.reset()
        memory, model = runtime.preset("16gb", precision="fp32", **sizes), network()
        for x, y, mask in memory.accumulate(data, 4):
            memory.forward_backward(lambda x, y, mask, model=model: loss(model(x), y, mask), x, y, mask)
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_divisors_are_read_in_the_order_of_the_terms():
    x = torch.randn(4, 5, requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    loss = (x[mask].sum() / mask.sum() + 2 * x.mean() - F.mse_loss(x, x.detach() + 1)) / 4
    assert numbers([divisor.amount for divisor in divisors(loss)]) == [4.0, 3.0, 20.0, 20.0]
    assert divisors(x.sum() / x.exp().sum()) == []
    assert divisors(x.sum()) == []


@pytest.mark.parametrize("failing", [2, 5, 12])
def test_a_call_that_runs_out_of_memory_forgets_what_was_counted(failing):
    """Of a window of four batches in three parts each: what is counted again was not counted before."""
    data, model, parts = batches(4, "empty"), network(), []

    def forward(x, y, mask):
        parts.extend([len(x)] if len(x) == 4 else [])
        if len(parts) == failing and len(x) == 4:
            raise OutOfMemoryError("CUDA out of memory.")
        return masked(model(x), y, mask) / (mask.sum() + 1)

    memory = runtime.preset("16gb", precision="fp32", micro_batches=3)
    for x, y, mask in memory.accumulate(data, 4):
        memory.forward_backward(forward, x, y, mask)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    x, y, mask = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    (masked(model(x), y, mask) / (mask.sum() + 1)).backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
    assert len(parts) >= failing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_divisors_on_a_card_are_read_together_with_plain_numbers():
    x = torch.randn(4, device="cuda", requires_grad=True)
    loss = x.sum() / torch.tensor(3.0, device="cuda") / 4
    assert numbers([divisor.amount for divisor in divisors(loss)]) == [4.0, 3.0]


def test_a_plain_number_that_a_loss_is_divided_by_is_read_under_a_dispatch_mode():
    """Flop counters and memory traces see every operation, and have no tensor to read there."""

    def loss(output, target, mask):
        return F.mse_loss(output, target) / 3

    weights, _ = trained(loss, batches(4))
    with FlopCounterMode(display=False):
        split, split_calls = trained(loss, batches(4), micro_batches=3)
    assert torch.allclose(split, weights, rtol=1e-12)
    assert split_calls == 4


def test_divisors_count_that_are_those_of_the_parts_together():
    assert counting([4.0, 3.0, 20.0, 0.7], [[4.0, 1.0, 15.0, 0.4], [4.0, 2.0, 5.0, 0.6]]) == (1, 2)
    assert counting([3.0], [[1.0, 2.0], [2.0]]) == ()


@pytest.mark.parametrize("window", [1, 3])
def test_rows_of_which_a_part_has_nothing_that_counts_leave_an_earlier_verdict_as_it_was(window, caplog):
    """Labels to ignore, though the loss does not use them, decide which rows are looked at."""
    torch.manual_seed(0)
    model, memory = nn.Linear(6, 4).double(), runtime.preset("16gb", precision="fp32", micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(x, labels, mask):
        return (model(x).pow(2).sum(1) * mask).sum() / mask.sum().clamp(min=1)

    batches = []
    for seed in range(9):
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.rand(ROWS, generator=generator) < 0.6).double()
        mask[0] = mask[6] = 1
        labels = torch.where(torch.rand(ROWS, generator=generator) < 0.3, -100, 1)
        batches.append((torch.randn(ROWS, 6, generator=generator).double(), labels, mask))
    for place, batch in enumerate(memory.accumulate(batches, window)):
        memory.forward_backward(forward, *batch)
        if memory.window_closed:
            together = batches[place + 1 - window : place + 1]
            expected = torch.autograd.grad(forward(*map(torch.cat, zip(*together, strict=True))), [*model.parameters()])
            torch.testing.assert_close([p.grad for p in model.parameters()], [*expected], rtol=1e-12, atol=1e-14)
            memory.step(optimizer)
    assert "earlier call" not in caplog.text
