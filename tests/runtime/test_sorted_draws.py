"""Numbers drawn for each sample and put into an order, such as the time steps of a diffusion model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

TIMES = {
    "sort": lambda times: times.sort().values,
    "argsort": lambda times: times[times.argsort()],
    "sort downwards": lambda times: times.sort(descending=True).values,
    "msort": torch.msort,
}


def wrong_calls(times, micro_batches):
    """Seeds of which a first call leaves another gradient than the whole batch, and why the last batch ran whole."""
    net, found = nn.Linear(5, 4).double(), []

    def forward(x):
        t = times(torch.randint(0, 1000, (len(x),))) / 1000
        return F.mse_loss(net(torch.cat([x * t[:, None], t[:, None]], 1)), x)

    for seed in range(12):
        runtime.reset()
        memory = runtime.preset("16gb", micro_batches=micro_batches)
        x = torch.randn(12, 4).double()
        torch.manual_seed(seed)
        expected = torch.autograd.grad(forward(x), net.weight)[0]
        net.zero_grad()
        torch.manual_seed(seed)
        memory.forward_backward(forward, x)
        found += [] if torch.allclose(net.weight.grad, expected, rtol=1e-9) else [seed]
    return found, memory.report().forwards[0].whole_because


@pytest.mark.parametrize("order", TIMES)
def test_draws_that_are_sorted_keep_the_batch_whole_though_those_of_a_check_came_in_order(order):
    """Of four draws, the last is the largest every fourth time, and sorted parts are parts of what is sorted then."""
    wrong, reason = wrong_calls(TIMES[order], 5)
    assert not wrong
    assert "depend on each other" in reason


def test_draws_that_are_not_sorted_still_split():
    assert wrong_calls(lambda times: times, 5) == ([], None)
