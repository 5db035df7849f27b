"""Means over what a mask leaves, beside a cross entropy over all: targets held out of it look like the mask's gaps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError

ROWS = 3  # of which memory has room in an evaluation


def batches():
    """The first two have full masks, and are those that are checked before any has a gap."""
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        mask = torch.ones(8).double()
        if number > 1:
            mask[torch.rand(8, generator=generator) < 0.4] = 0.0
            mask[number] = 1.0
        yield (
            torch.randn(8, 6, generator=generator).double(),
            torch.randint(0, 4, (8,), generator=generator),
            mask,
        )


@pytest.mark.parametrize("trains", [True, False])
def test_a_mean_over_what_a_mask_leaves_is_that_of_the_whole_batch(trains):
    torch.manual_seed(0)
    net, memory = nn.Linear(6, 4).double(), runtime.preset("16gb", micro_batches=3 if trains else "auto")

    def forward(x, y, mask):
        if not trains and len(x) > ROWS:
            raise OutOfMemoryError("CUDA out of memory")
        output = net(x)
        errors = F.cross_entropy(output, y, reduction="none")
        return F.cross_entropy(output, y), (errors * mask).sum() / mask.sum()

    run = memory.forward_backward if trains else memory.evaluate
    for x, y, mask in batches():
        errors = F.cross_entropy(net(x), y, reduction="none").detach()
        if trains:
            loss, masked = run(forward, x, y, mask)
            torch.testing.assert_close([loss, masked], [errors.mean(), (errors * mask).sum() / mask.sum()])
        else:
            with pytest.raises(runtime.DoesNotFitError):
                run(forward, x, y, mask)


@pytest.mark.parametrize("trains", [True, False])
def test_means_over_all_beside_a_mask_still_split(trains):
    torch.manual_seed(0)
    net, memory = nn.Linear(6, 4).double(), runtime.preset("16gb", micro_batches=3 if trains else "auto")

    def forward(x, y, mask):
        if len(x) > ROWS + trains:
            raise OutOfMemoryError("CUDA out of memory")
        output = net(x)
        return F.cross_entropy(output, y.where(mask > 0, -100)), output.pow(2).mean(), mask.sum()

    run = memory.forward_backward if trains else memory.evaluate
    for x, y, mask in batches():
        output = net(x).detach()
        found = run(forward, x, y, mask)
        expected = [F.cross_entropy(output, y.where(mask > 0, -100)), output.pow(2).mean(), mask.sum()]
        torch.testing.assert_close([*found], expected)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_window_of_class_weighted_means_is_weighed_by_targets_whatever_classes_a_check_has_met(micro_batches):
    """Of rows that come again, the weights may be in proportion to their number, where both means are one."""
    torch.manual_seed(0)
    weight, wrong = torch.tensor([0.5, 1.0, 2.0, 0.1]).double(), []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        net = nn.Linear(6, 4).double()
        runtime.reset()
        memory = runtime.preset("16gb", micro_batches=micro_batches)
        batches = [
            (torch.randn(rows, 6, generator=generator).double(), torch.randint(0, 4, (rows,), generator=generator))
            for rows in (4, 8)
        ]
        for x, y in memory.accumulate(batches, 2):
            memory.forward_backward(lambda x, y, net=net: F.cross_entropy(net(x), y, weight=weight), x, y)
        x, y = map(torch.cat, zip(*batches, strict=True))
        expected = torch.autograd.grad(F.cross_entropy(net(x), y, weight=weight), net.weight)[0]
        wrong += [] if torch.allclose(net.weight.grad, expected, rtol=1e-9) else [seed]
    assert not wrong
