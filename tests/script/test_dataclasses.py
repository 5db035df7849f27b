"""What the constructor of a dataclass is given is what its objects hold."""

from __future__ import annotations

import pytest

METRICS = """
    from dataclasses import dataclass, field
    from torch import Tensor

    class Base:
        start: float

    {decorator}
    class Metrics(Base):
        count: int
        loss: Tensor
        {rest}

    def measure(net, x, y):
        loss = (net(x.cuda()) - y.cuda()).pow(2).mean()
        return {made}

    def train(net, loader, optimizer):
        for x, y in loader:
            metrics = measure(net, x, y)
            {backward}
            optimizer.step()
"""
USUAL = {
    "decorator": "@dataclass",
    "rest": "note: str = ''",
    "made": "Metrics(count=len(x), loss=loss)",
    "backward": "(metrics.loss * 2).backward()",
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"decorator": "@dataclass(frozen=True)", "made": "Metrics(len(x), loss, 'first')"},
        {"rest": "note: str = field(default='')", "made": "Metrics(len(x), loss=loss)"},
    ],
)
def test_a_loss_that_a_dataclass_holds_goes_back_through_the_network(report, changed):
    assert report(METRICS.format(**USUAL | changed)) == [("OOM202", 14)]


@pytest.mark.parametrize(
    "changed",
    [
        {"backward": "(metrics.count * 2).backward()"},
        {"made": "Metrics(count=loss, loss=len(x))"},
        {"decorator": "@register"},
        {"rest": "def __init__(self, count, loss):\n            self.loss = count"},
    ],
)
def test_nothing_else_of_it_does(report, changed):
    assert report(METRICS.format(**USUAL | changed)) == []


TUPLE = """
    from typing import NamedTuple
    import torch

    class Result(NamedTuple):
        loss: torch.Tensor
        count: int = 0

    def train(model, loader, optimizer, kept):
        model.cuda()
        for x, y in loader:
            result = Result({made})
            {loss}.backward()
            optimizer.step()
            kept.append({kept})
"""


@pytest.mark.parametrize(
    ("made", "loss", "kept", "found"),
    [
        ("criterion(model(x.cuda()), y), len(x)", "result.loss", "result.loss", [("OOM102", 14)]),
        ("loss=criterion(model(x.cuda()), y)", "result[0]", "result.count", []),
        ("count=len(x), loss=criterion(model(x.cuda()), y)", "loss, count = result; loss", "count", []),
        ("*[criterion(model(x.cuda()), y), len(x)]", "result.loss", "result.count", []),
    ],
)
def test_a_named_tuple_holds_what_it_is_made_of(report, made, loss, kept, found):
    assert report(TUPLE.format(made=made, loss=loss, kept=kept)) == [*found, ("OOM202", 11)]


STEPS = """
    import torch
    from typing import NamedTuple

    class Step(NamedTuple):
        chance: torch.Tensor
        reward: float

    def train(policy, env, optimizer):
        policy.cuda()
        for episode in range(100):
            steps = []
            for t in range(10):
                chances = torch.distributions.Categorical(logits=policy(env.state.cuda()))
                action = chances.sample()
                steps.append(Step({chance}, env.step(action.item())))
            loss = -sum(step.chance * step.reward for step in steps)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("chance", "found"),
    [("chances.log_prob(action)", [("OOM202", 13)]), ("chances.log_prob(action).detach()", [])],
)
def test_named_tuples_of_a_list_hold_what_they_are_made_of(report, chance, found):
    assert report(STEPS.format(chance=chance)) == found
