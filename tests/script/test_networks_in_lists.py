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


MEMBERS = """
    import torch

    def update(self, batch, target):
        for x in batch:
            loss = sum((value - target).pow(2).mean() for value in {values})
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    "values",
    [
        "[q(x.cuda()) for q in self.critics]",
        "[q(x.cuda()) for q in self.online.critics]",
        "[q(x.cuda()) for _, q in enumerate(critics)]",
        "(member(x.cuda()) for member in self.networks.values())",
        "{name: member(x.cuda()) for name, member in models.items()}.values()",
        "[layer(x.cuda()) for layer in self.net.layers]",
    ],
)
def test_what_is_called_of_several_networks_is_one(report, values):
    assert report(MEMBERS.format(values=values)) == [("OOM202", 5)]


@pytest.mark.parametrize(
    "values",
    [
        "[f(x.cuda()) for f in self.judges]",
        "[f(x.cuda()) for f in self.losses]",
        "[f(x.cuda()) for f in self.transforms]",
        "[make(x.cuda(), name) for name in models]",
        "[f(x.cuda()) for f in [torch.sin, torch.cos]]",
    ],
)
def test_what_is_called_of_others_may_be_a_function(report, values):
    assert report(MEMBERS.format(values=values)) == []


@pytest.mark.parametrize(
    "run",
    [
        "outputs = [member(x) for member in models]",
        "for member in models: outputs.append(member(x).argmax(1))",
    ],
)
def test_every_network_of_an_ensemble_is_evaluated(report, run):
    code = f"""
        import torch

        def evaluate(models, loader):
            outputs = []
            for x, _ in loader:
                {run}
                print(outputs)
    """
    assert report(code) == [("OOM201", 6)]


@pytest.mark.parametrize("made", ["build(8)", "build(8).cuda()"])
def test_what_makes_a_network_is_none(report, made):
    code = f"""
        import torch

        def evaluate(models, loader):
            for build in models:
                net = {made}
                net.eval()
                for x, y in loader:
                    print(net(x.cuda()).argmax(1) == y)
    """
    assert report(code) == [("OOM201", 8)]
