"""Decisions that are asked twice: what one side of them has bound is there where it is asked again."""

from __future__ import annotations

import pytest

ASKED_TWICE = """
    def train(loader, noise):
        for x, y in loader:
            net.train()
            model.train()
            if {first}:
                level = net(x)
                out = model(x, level)
            else:
                out = model(x)
            loss = criterion(out, y)
            if {again}:
                loss = loss + criterion(level, noise)
            loss.backward()
            optimizer.step()
            net.eval()
            model.eval()
            if opt.mode == "both":
                level = net(x)
                out = model(x, level)
            else:
                out = model(x)
            print(psnr(out, y))
"""


def test_a_look_after_the_step_is_none_of_the_next_loss_where_the_same_test_makes_its_term(report):
    reported = report(ASKED_TWICE.format(first='opt.mode == "both"', again='opt.mode == "both"'))
    assert ("OOM201", 18) in reported
    assert ("OOM201", 19) in reported


@pytest.mark.parametrize("again", ['opt.mode != "one"', "asks()"])
def test_another_test_says_nothing_about_what_was_bound(report, again):
    assert ("OOM201", 18) not in report(ASKED_TWICE.format(first='opt.mode == "both"', again=again))


CHANGED = """
    def train(loader, kind):
        total = 0.0
        for x, y in loader:
            if kind == "plain":
                value = 1.0
            else:
                value = criterion(model(x), y)
                value.backward()
                optimizer.step()
            {between}
            if kind == "plain":
                total += value
"""


@pytest.mark.parametrize(
    ("between", "kept"), [("", False), ("kind = next(kinds)", True), ("value = criterion(model(x), y)", True)]
)
def test_what_was_bound_since_counts(report, between, kept):
    assert (("OOM101", 12) in report(CHANGED.format(between=between))) is kept


RECURRENT = """
    import torch

    class Agent:
        def __init__(self, kind):
            self.kind = kind
            self.model, self.optimizer = Model().cuda(), torch.optim.Adam(model.parameters())
            self.state = None

        def act(self, x):
            out, self.state = self.model(x, self.state)
            return out.argmax().item()

        def learn(self, x, y):
            if {first}:
                self.state = {reset}
            {between}
            if {again}:
                out, self.state = self.model(x, self.state)
            else:
                out = self.model(x)
            self.optimizer.zero_grad()
            criterion(out, y).backward()
            self.optimizer.step()

    agent = Agent(sys.argv[1])
    for observation in environment:
        agent.act(observation)
        agent.learn(*replay.sample())
"""
RESET = {
    "first": 'self.kind == "recurrent"',
    "again": 'self.kind == "recurrent"',
    "reset": "torch.zeros(1, 8)",
    "between": "pass",
}


def test_an_attribute_is_what_that_side_has_made_it_where_it_is_asked_again(report):
    assert ("OOM201", 10) in report(RECURRENT.format(**RESET))


@pytest.mark.parametrize(
    "changed",
    [
        {"again": 'self.kind != "plain"'},
        {"reset": "self.state"},
        {"between": "self.act(x)"},
        {"between": "self.kind = next(kinds)"},
    ],
)
def test_what_an_attribute_may_hold_by_then_counts(report, changed):
    assert ("OOM201", 10) not in report(RECURRENT.format(**RESET | changed))
