"""Losses that a loop over samples adds up, and that are divided by how many of them had something to add."""

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError

LOSSES = {
    "mean squares": lambda output, target: F.mse_loss(output, target),
    "cross entropies": lambda output, target: F.cross_entropy(output, target.argmax(1)),
    "divided by hand": lambda output, target: (output - target).abs().sum() / len(output),
}
TOTALS = {
    "one": lambda losses: sum(losses) / len(losses),
    "at least one": lambda losses: sum(losses) / max(len(losses), 1),
    "beside another term": lambda losses: 0.1 * losses[0].detach() * 0 + sum(losses) / len(losses),
    "two terms": lambda losses: sum(losses) / len(losses) + sum(loss.pow(2) for loss in losses) / len(losses),
    "in two steps": lambda losses: 2 * (sum(losses) / len(losses)) / 4,
    "times a number": lambda losses: sum(losses) * (1.0 / len(losses)),
    "each divided": lambda losses: sum(loss / len(losses) for loss in losses),
    "each times a number": lambda losses: sum(loss * (1.0 / len(losses)) for loss in losses),
    "a mean along a dimension": lambda losses: torch.stack(losses).mean(0),
    "a weighted sum": lambda losses: torch.stack(losses) @ torch.full([len(losses)], 1.0 / len(losses)).double(),
    "a running mean": lambda losses: reduce(lambda mean, nth: mean + (nth[1] - mean) / nth[0], enumerate(losses, 1), 0),
}


def images(count, empty, seed):
    """So many images with one to four boxes each, but for those numbered in `empty`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [0 if number in empty else 1 + (number * 7 + seed) % 4 for number in range(count)]
    drawn = [torch.randn(length, 7, generator=generator).double() for length in lengths]
    return [boxes[:, :4] for boxes in drawn], [boxes[:, 4:] for boxes in drawn]


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("micro_batches", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_mean_over_images_with_boxes_is_seen_at_the_first_call_that_has_some_without(total, loss, micro_batches):
    """The third call is not checked, and graphs of loops differ from micro-batch to micro-batch anyway."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(outputs, targets):
        pairs = zip(outputs, targets, strict=True)
        return TOTALS[total]([LOSSES[loss](net(x), y) for x, y in pairs if len(x)])

    memory = runtime.preset("16gb", micro_batches=micro_batches)
    for number, empty in enumerate([(), (), (1, 4, 5), (), (0, 2, 9), (11,)]):
        batch = images(12, empty, number)
        expected = torch.autograd.grad(forward(*batch), [*net.parameters()])
        net.zero_grad()
        memory.forward_backward(forward, *batch)
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("total", ["one", "times a number", "each divided"])
def test_a_mean_over_samples_that_are_told_by_what_is_in_them_is_seen(total):
    """All have boxes, of which only those that are positive add to the loss."""
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=3)

    def forward(outputs, targets):
        pairs = zip(outputs, targets, strict=True)
        return TOTALS[total]([F.mse_loss(net(x), y) for x, y in pairs if (y[:, 0] > 0).any()])

    for number, negative in enumerate([(), (), (1, 4, 5), (), (0, 2, 9)]):
        outputs, targets = images(12, (), number)
        for place, target in enumerate(targets):
            target[0, 0] = 1.0
            if place in negative:
                target[:, 0] = -1.0
        expected = torch.autograd.grad(forward(outputs, targets), net.weight)[0]
        net.zero_grad()
        memory.forward_backward(forward, outputs, targets)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_a_loop_that_leaves_out_samples_and_divides_by_all_of_them_still_splits():
    """It is checked where some are left out for the first time, at the third call, and then at powers of two."""
    net, memory, runs = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=3), []

    def forward(outputs, targets):
        runs.append(len(outputs))
        return sum(F.mse_loss(net(x), y) for x, y in zip(outputs, targets, strict=True) if len(x)) / len(outputs)

    checked = []
    for number, empty in enumerate([(), (), (1, 4, 5), (), (0, 2, 9), (3,), (2, 7), (), (1, 11), (8,)]):
        batch = images(12, empty, number)
        expected = torch.autograd.grad(forward(*batch), net.weight)[0]
        net.zero_grad()
        runs.clear()
        memory.forward_backward(forward, *batch)
        checked += [number] if len(runs) > 3 else []
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)
    assert memory.report().forwards[0].whole_because is None
    assert checked == [0, 1, 2, 3, 7]


@pytest.mark.parametrize("by", ["images", "a mask"])
def test_a_mean_over_as_many_samples_in_parts_of_other_sizes_is_seen(by):
    """The parts of eleven samples are four, four and three, of which three have boxes each: a divisor that stays."""
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=3)

    def forward(outputs, targets):
        losses = [F.mse_loss(net(x), y) for x, y in zip(outputs, targets, strict=True) if by == "a mask" or len(x)]
        if by == "images":
            return sum(losses) / len(losses)
        has_boxes = torch.tensor([len(x) > 0 for x in outputs])
        return torch.stack(losses)[has_boxes].mean()

    for number, empty in enumerate([(), (), (1, 6)]):
        batch = images(11, empty, number)
        expected = torch.autograd.grad(forward(*batch), net.weight)[0]
        net.zero_grad()
        memory.forward_backward(forward, *batch)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loop_over_samples_that_all_have_something_is_split(loss):
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=3)

    def forward(outputs, targets):
        total = 0.0
        for x, y in zip(outputs, targets, strict=True):
            total = total + LOSSES[loss](net(x), y)
        return total / len(outputs)

    for number, count in enumerate((12, 12, 7, 5, 12)):
        batch = images(count, (), number)
        expected = torch.autograd.grad(forward(*batch), net.weight)[0]
        net.zero_grad()
        memory.forward_backward(forward, *batch)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)
    assert memory.report().forwards[0].whole_because is None


def test_an_evaluation_of_images_of_which_some_have_no_boxes_for_the_first_time_is_checked():
    """It has no graph that tells what a loop has left out."""
    torch.manual_seed(0)
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb")

    def forward(outputs, targets):
        if len(outputs) > 5:
            raise OutOfMemoryError("CUDA out of memory")
        losses = [F.mse_loss(net(x), y) for x, y in zip(outputs, targets, strict=True) if len(x)]
        return sum(losses) / len(losses)

    for number in range(2):
        outputs, targets = images(12, (), number)
        expected = torch.stack([F.mse_loss(net(x), y) for x, y in zip(outputs, targets, strict=True)]).mean()
        torch.testing.assert_close(memory.evaluate(forward, outputs, targets), expected.detach())
    with pytest.raises(runtime.DoesNotFitError, match="depend on each other"):
        memory.evaluate(forward, *images(12, (1, 4, 5), 2))
