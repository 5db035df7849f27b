"""Functions that give away arrays: what becomes one without being detached had no graph before."""

from __future__ import annotations

import pytest

GIVEN = """
    import torch
    import numpy as np

    class Runner:
        def run_policy(self, s):
            mean, deviation = self.net(torch.tensor(s))
            {end}

        def update(self, s, a):
            mean, deviation = self.net(s)
            loss = (mean - a).pow(2).mean()
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    "end",
    [
        "return torch.distributions.Normal(mean, deviation).sample().cpu().numpy()",
        "drawn = torch.distributions.Normal(mean, deviation).sample(); return drawn.numpy().clip(-1, 1)",
        "return mean.topk(3)[1].cpu().numpy()",
        "best, chosen = mean.topk(3); return chosen.numpy()",
        "return torch.max(mean, 1)[1].numpy()",
    ],
)
def test_draws_and_indices_hold_no_graph_that_an_array_would_need_off(report, end):
    assert ("OOM201", 6) in report(GIVEN.format(end=end))


@pytest.mark.parametrize(
    "end",
    [
        # torch refuses these where a graph was recorded: there is none
        "return torch.distributions.Normal(mean, deviation).rsample().numpy()",
        "return mean.topk(3)[0].cpu().numpy()",
        "best, chosen = mean.topk(3); return best.numpy()",
        # the probability leaves as well
        "drawn = torch.distributions.Normal(mean, deviation).sample(); return drawn.numpy(), mean",
    ],
)
def test_values_do(report, end):
    assert ("OOM201", 6) not in report(GIVEN.format(end=end))


AT_THE_TOP = """
    import torch

    def train(net, loader, optimizer):
        for x, y in loader:
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()

    net = Net()
    net.load_state_dict(torch.load("net.pt", map_location="cpu"))
    guessed = net(images)
    {rest}
"""


@pytest.mark.parametrize("rest", ["show(images, guessed.data.numpy())", "guessed = guessed.detach().numpy()"])
def test_so_it_is_in_no_function_whatever_others_would_train(report, rest):
    assert ("OOM201", 11) in report(AT_THE_TOP.format(rest=rest))


@pytest.mark.parametrize("rest", ["show(images, guessed)", "hold(guessed); show(guessed.detach().numpy())"])
def test_what_goes_elsewhere_is_left_alone(report, rest):
    assert ("OOM201", 11) not in report(AT_THE_TOP.format(rest=rest))
