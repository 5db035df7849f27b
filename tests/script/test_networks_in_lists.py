"""Networks that lists and dicts hold are known by what is asked of their entries."""

from __future__ import annotations

import pytest

CRITICS = """
    import torch
    from project import make

    class Agent:
        def __init__(self, count, device):
            self.device = device
            self.judges, self.steppers = [], []
            for i in range(count):
                self.judges.append(make(i))
            {asked}

        def update(self, states, targets):
            for i in range(len(self.judges)):
                loss = (self.judges[i](states.to(self.device)) - targets).pow(2).mean()
                loss.backward()
                self.steppers[i].step()
"""


@pytest.mark.parametrize(
    "asked",
    [
        "self.steppers = [torch.optim.Adam(self.judges[i].parameters()) for i in range(count)]",
        "self.judges[0].train()\n            self.judges[count - 1].train()",
        "for i in range(count):\n                self.judges[i].zero_grad()",
    ],
)
def test_entries_whose_weights_are_trained_are_networks(report, asked):
    assert report(CRITICS.format(asked=asked)) == [("OOM202", 14 + asked.count("\n"))]


@pytest.mark.parametrize(
    "asked",
    [
        "pass",
        "self.steppers[count - 1].zero_grad()",  # an optimizer's
        "for i in range(count):\n                self.judges[i].to(device)",  # as what only holds a grid is
    ],
)
def test_other_entries_may_be_functions(report, asked):
    assert report(CRITICS.format(asked=asked)) == []


def test_entries_of_entries_are_networks_too(report):
    code = """
        import torch

        def update(networks, batch):
            for kind in ["leader", "follower"]:
                for name in ["left", "right"]:
                    optimizer = torch.optim.Adam(networks[kind][name].parameters())
                    for x, y in batch:
                        chance, value = networks[kind][name](state=x.cuda(), train=True)
                        (chance.mean() + value.mean()).backward()
                        optimizer.step()
    """
    assert report(code) == [("OOM202", 8)]
