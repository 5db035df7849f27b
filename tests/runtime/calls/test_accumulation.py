"""Accumulation windows that are not plain: left early, nested, empty batches, mixed calls, lengths that lie.

All in float64, against the gradient of the mean over all samples of the window, to 1e-12.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from oomfix import runtime
from oomfix.runtime.calls.accumulation import Totals
from oomfix.runtime.compat import OutOfMemoryError
from tests.runtime.through import through


def batches(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 6, generator=generator).double(), torch.arange(n) % 4) for n in sizes]


def squares(out, y):
    return F.mse_loss(out, F.one_hot(y, 4).double())


def gradient(model, data, loss=squares):
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return torch.autograd.grad(loss(model(x), y), [model.weight])[0]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.fixture
def model():
    return nn.Linear(6, 4).double()


@pytest.fixture
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def by_forward_backward(memory, model, x, y):
    memory.forward_backward(lambda x, y: squares(model(x), y), x, y)


def by_backward(memory, model, x, y):
    memory.backward(squares(model(x), y))


def by_both(memory, model, x, y):
    (by_backward if len(x) % 2 else by_forward_backward)(memory, model, x, y)


CALLS = [by_forward_backward, by_backward, by_both]


# -- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2.0, np.int64(2), np.float32(2)], ids=["float", "numpy's int", "numpy's float"])
def test_a_whole_number_of_batches_may_be_a_quotient(k):
    memory = runtime.preset("16gb")
    assert [memory.window_closed for _ in memory.accumulate(batches(4, 4, 4), k)] == [False, True, True]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "endless"])
@pytest.mark.parametrize("sizes", [(5, 6, 5, 6, 6, 3), (7, 1, 2, 8, 1), (4, 0, 4, 4, 0, 3), (0, 4, 4), (6, 6, 0)])
def test_every_sample_of_a_window_weighs_the_same(model, sgd, call, sized, sizes):
    data, memory = batches(*sizes), runtime.preset("16gb")
    expected = [gradient(model, data[start : start + 4]) for start in range(0, len(data), 4)]
    for x, y in memory.accumulate(data if sized else iter(data), 4):
        call(memory, model, x, y)
        if memory.window_closed:
            assert close(model.weight.grad, expected.pop(0))
            model.zero_grad()
    assert not expected


def test_a_window_of_empty_batches_has_no_gradient(model):
    memory = runtime.preset("16gb")
    for x, y in memory.accumulate(batches(0, 0), 2):
        by_forward_backward(memory, model, x, y)
        by_backward(memory, model, x, y)
    assert model.weight.grad is None


def test_a_loss_by_targets_and_one_by_samples_are_not_mixed(model):
    """`backward` cannot know how many targets its loss is a mean of."""

    def forward(x, y):
        return F.cross_entropy(model(x), y, ignore_index=3)

    memory = runtime.preset("16gb")
    with pytest.raises(RuntimeError, match=r"backward: .* averaged over its targets, not over samples"):
        for x, y in memory.accumulate(batches(4, 4), 2):
            if memory.window_closed:
                memory.backward(forward(x, y))
            else:
                memory.forward_backward(forward, x, y)


def without_memory_for_a_check(model):
    """A forward pre-hook that fails the runs of a check, for the time of a call."""

    def fail(*_):
        if not torch.is_grad_enabled():
            raise OutOfMemoryError("CUDA out of memory.")

    return model.register_forward_pre_hook(fail)


def over_targets(out, y):
    return F.cross_entropy(out, y, ignore_index=3)


def test_a_single_cross_entropy_is_a_mean_over_targets_though_no_check_could_be_made(model):
    """What the window is averaged over is decided at its first call, and 3 of 4 targets do not count at the second."""
    data, memory = batches(8, 8), runtime.preset("16gb", precision="fp32")
    data[1][1][:6] = 3
    for x, y in memory.accumulate(data, 2):
        hook = without_memory_for_a_check(model)
        memory.forward_backward(lambda x, y: over_targets(model(x), y), x, y)
        hook.remove()
    assert close(model.weight.grad, gradient(model, data, over_targets))


def test_a_batch_is_not_split_by_targets_in_a_window_that_is_averaged_over_samples(model):
    """Which of two cross entropies counts no check could say at the first call; the second has others in each part."""
    data, memory = batches(8, 8), runtime.preset("16gb", precision="fp32", micro_batches=4)
    data[1][1][1] = 3

    def loss(out, y):
        return over_targets(out, y) + over_targets(2 * out, y)

    for index, (x, y) in enumerate(memory.accumulate(data, 2)):
        hook = None if index else without_memory_for_a_check(model)
        memory.forward_backward(lambda x, y: loss(model(x), y), x, y)
        if hook is not None:
            hook.remove()
    expected = sum(gradient(model, [batch], loss) for batch in data) / 2
    assert close(model.weight.grad, expected)


def marked(targets, left):
    """A batch of which so many of 5 targets count in each sample, and so many entries are left by a mask."""
    generator = torch.Generator().manual_seed(len(targets))
    x, y = torch.randn(len(targets), 6, generator=generator).double(), torch.arange(len(targets)) % 4
    y = y.repeat(5, 1).T.clone()
    for row, count in zip(y, targets, strict=True):
        row[count:] = -100
    return x, y, (torch.arange(5) < torch.tensor(left)[:, None]).double()


FIRST = marked([5, 3, 2, 4] * 2, [5, 3, 2, 4] * 2)
LIKE_THE_FIRST = marked([1, 2, 4] * 2, [1, 2, 4] * 2)
OTHER = marked([2, 1, 1] * 2, [5, 5, 2] * 2)
TWICE = marked([2, 1, 1] * 2, [4, 2, 2] * 2)


def over_both(model, x, y, mask):
    out = model(x)[:, :, None].repeat(1, 1, 5)
    return F.cross_entropy(out, y) + ((out**2).sum(1) * mask).sum() / mask.sum()


def weighed(model, forward, data, weights):
    """The gradient of the mean over batches of such weights."""
    gradients = [torch.autograd.grad(forward(*batch), [model.weight])[0] for batch in data]
    return sum(gradient * (weight / sum(weights)) for gradient, weight in zip(gradients, weights, strict=True))


@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"split": "never"}], ids=str)
@pytest.mark.parametrize(
    ("data", "weigh"),
    [
        ((FIRST, LIKE_THE_FIRST, LIKE_THE_FIRST), lambda x, y, mask: (y >= 0).sum()),
        ((FIRST, OTHER, LIKE_THE_FIRST), lambda x, y, mask: len(x)),
    ],
    ids=["in proportion throughout", "only at the first batch"],
)
def test_a_window_of_two_means_is_weighed_by_targets_as_long_as_both_are_in_proportion_and_else_by_samples(
    model, data, weigh, settings
):
    """No weight of a batch is right for both means where they are not."""
    memory, weights = runtime.preset("16gb", precision="fp32", **settings), [weigh(*batch) for batch in data]
    expected = weighed(model, lambda *batch: over_both(model, *batch), data, weights)
    for batch in memory.accumulate(data, len(data)):
        memory.forward_backward(lambda *batch: over_both(model, *batch), *batch)
    assert close(model.weight.grad, expected)


@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"split": "never"}], ids=str)
def test_a_window_whose_means_part_after_batches_of_other_shares_is_refused(model, settings):
    memory = runtime.preset("16gb", precision="fp32", **settings)
    with pytest.raises(RuntimeError, match="had targets in one proportion in the first batches"):
        for batch in memory.accumulate([FIRST, LIKE_THE_FIRST, OTHER], 3):
            memory.forward_backward(lambda *batch: over_both(model, *batch), *batch)


def test_a_term_that_counts_no_samples_leaves_a_window_to_its_targets(model):
    """What it divides by changes from batch to batch, with the length of the samples."""
    positions, memory = nn.Parameter(torch.randn(7).double()), runtime.preset("16gb", precision="fp32")
    data = [(*FIRST[:2], 5), (*OTHER[:2], 7)]

    def forward(x, y, length):
        out = model(x)[:, :, None].repeat(1, 1, 5)
        return F.cross_entropy(out, y) + (positions[:length] ** 2).mean()

    weights = [int((y >= 0).sum()) for _, y, _ in data]
    expected = weighed(model, forward, data, weights)
    for batch in memory.accumulate(data, 2):
        memory.forward_backward(forward, *batch)
    assert close(model.weight.grad, expected)


def test_a_call_that_failed_leaves_no_proportion_behind(model):
    def forward(*batch, fails=False):
        is_checked = len(batch[0]) < len(TWICE[0])
        return over_both((lambda x: through(fail)(model(x))) if fails and not is_checked else model, *batch)

    def fail(gradient):
        raise ValueError("a bad sample")

    memory, data = runtime.preset("16gb", precision="fp32"), [FIRST, LIKE_THE_FIRST]
    weights = [int((y >= 0).sum()) for _, y, _ in data]
    expected = weighed(model, forward, data, weights)
    for index, batch in enumerate(memory.accumulate(data, 2)):
        if index == 0:
            with pytest.raises(ValueError, match="a bad sample"):
                memory.forward_backward(forward, *TWICE, fails=True)
        memory.forward_backward(forward, *batch)
    assert close(model.weight.grad, expected)


def test_a_batch_of_which_nothing_counts_leaves_the_rest_of_its_window_in_parts(model):
    data, sizes = batches(8, 8, 8), []
    data[1][1][:] = 3
    memory = runtime.preset("16gb", precision="fp32", micro_batches=4)

    def forward(x, y):
        if torch.is_grad_enabled():
            sizes.append(len(x))
        return over_targets(model(x), y)

    for x, y in memory.accumulate(data, 3):
        sizes.clear()
        memory.forward_backward(forward, x, y)
        assert sizes[-4:] == [2, 2, 2, 2]
    assert close(model.weight.grad, gradient(model, data, over_targets))


def test_a_batch_of_which_nothing_counts_has_its_gradient_outside_of_a_window(model, caplog):
    """The one that it has without a manager, for weight decay goes on where there is one; the next is split again."""
    (x, y), memory, sizes = batches(8)[0], runtime.preset("16gb", precision="fp32", micro_batches=4), []
    nothing = torch.full_like(y, 3)

    def forward(x, y):
        sizes.append(len(x))
        return over_targets(model(x), y)

    for targets in (y, y, nothing, y):
        model.weight.grad = None
        memory.forward_backward(forward, x, targets)
        assert close(model.weight.grad, gradient(model, [(x, targets)], over_targets))
    assert sizes[-4:] == [2, 2, 2, 2]
    assert "were not the gradients" not in caplog.text


def test_a_loss_without_a_graph_is_refused_in_a_window_too(model):
    memory, frozen = runtime.preset("16gb", precision="fp32", micro_batches=4), torch.tensor(False)

    def forward(x, y):
        loss = squares(model(x), y)
        return loss.detach() if frozen else loss

    with pytest.raises(ValueError, match="a loss without a graph"):
        for index, (x, y) in enumerate(memory.accumulate(batches(8, 8, 8), 3)):
            frozen.fill_(index == 2)
            memory.forward_backward(forward, x, y)


def test_an_empty_batch_does_not_decide_what_its_window_is_a_mean_of(model):
    """A mean over what a mask leaves, which is 6 samples of one batch and 2 of the next."""
    data, memory = batches(0, 8, 8), runtime.preset("16gb", precision="fp32")
    data[2][1][:5] = 3

    def forward(x, y):
        counts = y < 3
        return ((model(x) ** 2).sum(1) * counts).sum() / counts.sum().clamp(min=1)

    for x, y in memory.accumulate(data, 3):
        memory.forward_backward(forward, x, y)
    (expected,) = torch.autograd.grad(forward(*(torch.cat(parts) for parts in zip(*data, strict=True))), [model.weight])
    assert close(model.weight.grad, expected)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("first", [(0, 0, 0, 1), (0, 0, 1, 1, 0, 0, 0, 1)], ids=["one counts", "three of eight"])
def test_a_first_batch_of_which_few_samples_count_leaves_a_window_to_what_masks_leave(model, first, split):
    """A check finds nothing that counts in a part of its rows."""
    data, memory = batches(len(first), 5, 6), runtime.preset("16gb", precision="fp32", micro_batches=split)
    masks = [torch.tensor(first), torch.ones(5), torch.tensor([1, 0, 1, 1, 1, 0])]
    data = [(x, y, mask.double()) for (x, y), mask in zip(data, masks, strict=True)]

    def forward(x, y, mask):
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()

    for batch in memory.accumulate(data, 3):
        memory.forward_backward(forward, *batch)
    (expected,) = torch.autograd.grad(forward(*map(torch.cat, zip(*data, strict=True))), [model.weight])
    assert close(model.weight.grad, expected)


@pytest.mark.parametrize("call", CALLS)
def test_a_preset_that_is_off_divides_by_the_batches_of_a_window(model, sgd, call):
    """As scripts do by hand; the last window has one batch."""
    data, memory, seen = batches(4, 6, 5), runtime.preset("off"), []
    for x, y in memory.accumulate(data, 2):
        call(memory, model, x, y)
        if memory.window_closed:
            seen.append(model.weight.grad)
            model.weight.grad = None
    assert close(seen[0], (gradient(model, data[:1]) + gradient(model, data[1:2])) / 2)
    assert close(seen[1], gradient(model, data[2:]))


@pytest.mark.parametrize("later", [2, 3], ids=["its check allows a split", "its check refuses"])
def test_a_least_divisor_that_changes_within_a_window_is_refused_in_parts_too(model, later):
    """Both batches are means over what a mask leaves, the first divided by at least 1."""
    data, memory = batches(16, 16), runtime.preset("16gb", precision="fp32", micro_batches=4)

    def forward(x, y, least):
        of_each = (model(x) ** 2).sum(1) * (y < 3)
        return of_each.sum() / (y < 3).sum().clamp(min=least)

    with pytest.raises(RuntimeError, match="the same least divisor"):
        for (x, y), least in zip(memory.accumulate(data, 2), (1, later), strict=True):
            memory.forward_backward(forward, x, y, least)


def test_a_backward_that_failed_weighs_nothing(model, sgd):
    def fail(gradient):
        raise ValueError("a bad sample")

    data, memory = batches(4, 4, 2), runtime.preset("16gb")
    for index, (x, y) in enumerate(memory.accumulate(data, 3)):
        if index == 1:
            with pytest.raises(ValueError, match="a bad sample"):
                memory.backward(through(fail)(squares(model(x), y)))
            by_backward(memory, model, x, y)
        else:
            by_backward(memory, model, x, y)
    assert close(model.weight.grad, gradient(model, data))


@pytest.mark.parametrize("fails", [by_backward, by_forward_backward])
def test_a_call_that_failed_decides_nothing_for_its_window(model, fails):
    """The first call of a window is averaged over samples, and fails; what goes well are means over targets."""

    def fail(gradient):
        raise ValueError("a bad sample")

    data, memory = batches(4, 4, 2), runtime.preset("16gb", precision="fp32")
    for index, (x, y) in enumerate(memory.accumulate(data, 3)):
        if not index:
            with pytest.raises(ValueError, match="a bad sample"):
                fails(memory, through(fail), model(x), y)
        memory.forward_backward(lambda x, y: over_targets(model(x), y), x, y)
    assert close(model.weight.grad, gradient(model, data, over_targets))


# -- loops that are left ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_a_step_after_a_break_is_by_the_mean_over_what_there_was(model, sgd, call):
    data, memory = batches(6, 6, 5, 6), runtime.preset("16gb")
    expected, before = gradient(model, data[:3]), model.weight.detach().clone()
    for index, (x, y) in enumerate(memory.accumulate(data, 4)):
        call(memory, model, x, y)
        if index == 2:
            break
    memory.step(sgd)
    assert close(before - model.weight, expected)


def test_what_is_left_of_a_window_does_not_touch_later_gradients(model, sgd):
    data, memory = batches(6, 6, 4), runtime.preset("16gb")
    for x, y in memory.accumulate(data, 4):
        by_backward(memory, model, x, y)
        break
    memory.zero_grad(sgd)
    expected, before = gradient(model, data[1:2]), model.weight.detach().clone()
    # with a backward of the script's own, whose gradients the manager has not seen
    squares(model(data[1][0]), data[1][1]).backward()
    memory.step(sgd)
    assert close(before - model.weight, expected)


@pytest.mark.parametrize("how", ["break", "exception"])
def test_after_a_loop_that_was_left_calls_stand_for_themselves(model, how):
    data, memory = batches(6, 6, 4), runtime.preset("16gb")
    try:
        for x, y in memory.accumulate(data, 3):
            by_backward(memory, model, x, y)
            if how == "break":
                break
            raise KeyError(how)
    except KeyError:
        pass
    assert memory.window_closed
    model.zero_grad()
    by_forward_backward(memory, model, *data[2])
    assert close(model.weight.grad, gradient(model, data[2:]))


def test_a_loop_that_was_left_does_not_keep_its_model():
    memory, left, other = runtime.preset("16gb"), nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    data, alive = batches(6, 6), weakref.ref(left.weight)
    for x, y in memory.accumulate(data, 2):
        by_backward(memory, left, x, y)
        break
    del left
    by_backward(memory, other, *data[1])
    gc.collect()
    assert alive() is None


def test_a_step_in_the_middle_of_a_window_is_refused(model, sgd):
    """The iterator has a name, as tqdm's has: nothing tells a `break` from the next call in the body."""
    data, memory = batches(6, 6, 4), runtime.preset("16gb")
    iterator, before = memory.accumulate(data, 3), model.weight.detach().clone()
    for x, y in iterator:
        by_backward(memory, model, x, y)
        break
    with pytest.raises(RuntimeError, match=r"step: batch 1 of an accumulation window of 3.*memory\.window_closed"):
        memory.step(sgd)
    assert torch.equal(before, model.weight)
    iterator.close()
    expected = gradient(model, data[:1])
    memory.step(sgd)
    assert close(before - model.weight, expected)


def test_an_optimizer_that_has_no_part_in_the_window_may_step_in_it(model):
    other = nn.Linear(6, 4).double()
    memory, of_other = runtime.preset("16gb"), torch.optim.SGD(other.parameters(), lr=1.0)
    for x, y in memory.accumulate(batches(4, 4), 2):
        by_backward(memory, model, x, y)
        before, expected = other.weight.detach().clone(), gradient(other, [(x, y)])
        squares(other(x), y).backward()
        memory.step(of_other)
        assert close(before - other.weight, expected)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_that_are_zeros_before_a_window_do_not_stand_in_the_way_of_its_ragged_tail(model, call):
    data, memory = batches(4, 4, 3), runtime.preset("16gb")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for x, y in memory.accumulate(data, 3):
        call(memory, model, x, y)
    assert close(model.weight.grad, gradient(model, data))


def test_a_window_of_lists_of_images_is_weighed_by_images_not_by_their_channels(model):
    """A list of tensors of one length may also be an input and its targets."""
    data, memory = [torch.randn(n, 3, 4, 6).double() for n in (2, 2, 1)], runtime.preset("16gb")
    for images in memory.accumulate([list(batch) for batch in data], 3):
        memory.backward(model(torch.stack(images)).pow(2).mean())
    expected = torch.autograd.grad(model(torch.cat(data)).pow(2).mean(), [model.weight])[0]
    assert close(model.weight.grad, expected)


@pytest.mark.parametrize("others", [lambda x: {"names": ["a"] * len(x)}, lambda x: ["a"] * len(x), lambda x: None])
def test_a_window_of_tuples_of_a_tensor_and_something_else_is_weighed_by_samples(model, others):
    data, memory = [x for x, _ in batches(4, 4, 1)], runtime.preset("16gb")
    for x, _ in memory.accumulate([(x, others(x)) for x in data], 3):
        memory.backward(model(x).pow(2).mean())
    expected = torch.autograd.grad(model(torch.cat(data)).pow(2).mean(), [model.weight])[0]
    assert close(model.weight.grad, expected)


@pytest.mark.parametrize("last", [4, 3])
def test_two_losses_in_one_gradient_are_weighed_where_one_factor_is_right_for_both(model, last):
    """The first is over 4, 4 and `last` samples, the second over 2 of each batch."""
    data, memory = batches(4, 4, last), runtime.preset("16gb")
    for x, y in memory.accumulate(data, 3):
        by_forward_backward(memory, model, x, y)
        if memory.window_closed and last == 3:
            with pytest.raises(RuntimeError, match="cannot be weighed apart"):
                by_forward_backward(memory, model, x[:2], y[:2])
            return
        by_forward_backward(memory, model, x[:2], y[:2])
    expected = gradient(model, data) + gradient(model, [(x[:2], y[:2]) for x, y in data])
    assert close(model.weight.grad, expected)


def test_an_optimizer_may_step_ahead_of_the_last_loss_of_its_window(model, sgd):
    """Its gradients hold two of three second losses by then, each of which counts a third, as by hand."""
    data, memory = batches(4, 4, 4), runtime.preset("16gb")
    opposite = [(-x, y) for x, y in data[:2]]
    expected = gradient(model, data) + 2 / 3 * gradient(model, opposite)
    before = model.weight.detach().clone()
    for x, y in memory.accumulate(data, 3):
        by_backward(memory, model, x, y)
        if memory.window_closed:
            memory.step(sgd)
            break
        by_backward(memory, model, -x, y)
    assert close(before - model.weight, expected)


def test_a_loop_that_was_left_and_ends_late_does_not_end_the_next(model):
    """A progress bar keeps the iterator of the loop before, and lets go of it in the middle of the next."""
    data, memory = batches(6, 6, 5), runtime.preset("16gb")
    old = memory.accumulate(data, 3)
    next(old)
    for index, (x, y) in enumerate(memory.accumulate(data, 3)):
        if index == 1:
            old.close()
            del old
            gc.collect()
        by_forward_backward(memory, model, x, y)
        assert memory.window_closed == (index == 2)
    assert close(model.weight.grad, gradient(model, data))


def test_nested_windows_are_refused(model):
    data, memory = batches(4, 4), runtime.preset("16gb")
    with pytest.raises(RuntimeError, match="windows cannot be nested"):
        for _ in memory.accumulate(data, 2):
            for _ in memory.accumulate(data, 2):
                pass


def test_loops_one_after_the_other_are_windows_of_their_own(model):
    memory = runtime.preset("16gb")
    for sizes in ((4, 2), (3,), (5, 5, 1)):
        data = batches(*sizes)
        for x, y in memory.accumulate(data, 3):
            by_backward(memory, model, x, y)
        assert close(model.weight.grad, gradient(model, data))
        model.zero_grad()


# -- lengths ---------------------------------------------------------------------------------------------------


class Lying:
    def __init__(self, data, length):
        self.data, self.length = data, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.data)


class Stream(IterableDataset):
    """Says more than it gives, as shards over workers do."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.arange(5.0))


def test_a_loader_that_ends_before_its_length_is_told_and_its_window_can_be_stepped(model, sgd, caplog):
    data, memory = batches(4, 4, 4, 2), runtime.preset("16gb")
    expected, closed = gradient(model, data[3:]), []
    for x, y in memory.accumulate(Lying(data, 6), 3):
        by_backward(memory, model, x, y)
        closed.append(memory.window_closed)
        if memory.window_closed:
            model.zero_grad()
    assert closed == [False, False, True, False]
    assert "fewer batches than its length says" in caplog.text
    before = model.weight.detach().clone()
    memory.step(sgd)
    assert close(before - model.weight, expected)


def test_a_loader_longer_than_its_length_goes_on_in_windows_of_one(model):
    data, memory = batches(4, 4, 2, 3), runtime.preset("16gb")
    for index, (x, y) in enumerate(memory.accumulate(Lying(data, 2), 2)):
        by_backward(memory, model, x, y)
        if index > 1:
            assert close(model.weight.grad, gradient(model, [(x, y)]))
        if memory.window_closed:
            model.zero_grad()
    assert index == 3


def test_the_length_of_a_stream_is_not_believed():
    memory = runtime.preset("16gb")
    closed = [memory.window_closed for _ in memory.accumulate(DataLoader(Stream(), batch_size=2), 2)]
    assert closed == [False, True, True]


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4)])
def test_a_backward_through_a_reentrant_checkpoint_is_refused_where_its_gradients_need_a_correction(sizes):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    memory, optimizer = runtime.preset("16gb"), torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(size, 4).double() for size in sizes]
    (expected,) = torch.autograd.grad(model(torch.cat(batches)).pow(2).mean(), model[0].weight)

    def train():
        for x in memory.accumulate(batches, 2):
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
            memory.backward(model[1](hidden).pow(2).mean())
        assert torch.allclose(model[0].weight.grad, expected, rtol=1e-12)
        memory.step(optimizer)

    if sizes[0] == sizes[1]:
        train()
    else:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            train()


# -- out of memory while it is looked for what a window is a mean of -------------------------------------------


@pytest.mark.parametrize("failing", range(1, 7))
@pytest.mark.parametrize("ignored", [-100, 3], ids=["samples", "targets"])
def test_a_check_that_runs_out_of_memory_decides_what_it_would_have(model, failing, ignored):
    """Fewer rows than it has run out of memory on may show less: a part of one row loses its dimension."""
    data, memory, sizes = batches(24, 22), runtime.preset("16gb", precision="fp32"), []

    def loss(out, y):
        return F.cross_entropy(out.squeeze()[:, :4], y, ignore_index=ignored) + 0.5 * F.cross_entropy(
            2 * out, y, ignore_index=ignored
        )

    def forward(x, y):
        sizes.append(len(x))
        if len(sizes) == failing:
            raise OutOfMemoryError("CUDA out of memory.")
        return loss(model(x), y)

    for x, y in memory.accumulate(data, 2):
        memory.forward_backward(forward, x, y)
    assert close(model.weight.grad, gradient(model, data, loss))
    assert sizes[failing - 1] < len(data[0][0])


def test_a_call_that_fails_in_a_later_batch_leaves_what_earlier_ones_counted():
    totals = Totals()
    totals.begin(position=0).divisor.share(4, expected=8)
    slot = totals.begin(position=1)
    slot.divisor.share(2, expected=8)
    totals.withdraw(slot)
    assert (slot.divisor.total, slot.calls) == (4, 1)
