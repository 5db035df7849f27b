"""Objects that say in an attribute whether they train, and what their methods do in each mode."""

from __future__ import annotations

import pytest

AGENT = """
    import torch
    from core import Agent

    class DQN(Agent):
        def __init__(self, model):
            super().__init__()
            self.model = model.cuda()
            {made}

        def observe(self, batch, target):
            if not self.{flag}:
                return
            loss = self.criterion(self.model(batch), target)
            loss.backward()
            self.optimizer.step()

        def fit(self):
            self.{flag} = {on}
            while self.step < self.steps:
                self.observe(self.batch, self.target)

        def test(self):
            self.{flag} = {off}
            while self.episodes < 10:
                self.observe(self.batch, self.target)
"""
OWN = {"made": "pass", "flag": "training", "on": "True", "off": "False"}


def lines_of_loops(script):
    return [loop.node.lineno for loop in script.loops]


@pytest.mark.parametrize("changed", [{}, {"flag": "is_train"}, {"flag": "learning"}, {"made": "self.training = True"}])
def test_what_an_object_does_in_training_alone_happens_in_no_test(read, changed):
    assert lines_of_loops(read(AGENT.format(**OWN | changed))) == [19]


@pytest.mark.parametrize("changed", [{"flag": "verbose"}, {"off": "self.given"}, {"on": "flag", "off": "other"}])
def test_any_other_flag_may_have_either_value(read, changed):
    assert lines_of_loops(read(AGENT.format(**OWN | changed))) == [19, 24]


def test_a_mode_that_is_set_where_the_object_is_made_may_be_changed_from_elsewhere(read):
    changed = {"made": "self.training = False", "on": "self.given", "off": "self.given"}
    assert lines_of_loops(read(AGENT.format(**OWN | changed))) == [19, 24]


def test_the_forwards_of_a_test_are_those_of_its_mode(report):
    code = """
        import torch

        class Trainer:
            def run(self, loader):
                for x, y in loader:
                    out = self.model(x)
                    if self.is_training:
                        self.criterion(out, y).backward()
                        self.optimizer.step()

            def train(self):
                self.is_training = True
                self.run(self.train_loader)

            def check(self):
                self.is_training = False
                self.run(self.other_loader)
    """
    assert report(code) == [("OOM201", 6), ("OOM202", 6)]
