"""Methods that a class has from another one of the file, called by `super()`."""

from __future__ import annotations

import pytest

TESTER = """
    import torch

    class Base:
        def __init__(self, network):
            self.network = network.cuda()

        def score_all(self, loader):
            return [self.answer(x) for x in loader]

        def answer(self, x):
            return x

    class Tester(Base):
        def score_all(self, loader):
            {around}return {called}.score_all(loader)

        def answer(self, x):
            out = self.network(x)
            return out, out.mean()

    def test(network, loader):
        network.eval()
        for one, target in Tester(network).score_all(loader):
            print(one.argmax(1).eq(target))
"""


@pytest.mark.parametrize("called", ["super()", "super(Tester, self)"])
def test_the_method_of_the_base_is_followed_with_the_object_of_the_class(report, called):
    assert report(TESTER.format(around="", called=called)) == [("OOM201", 18)]


@pytest.mark.parametrize("called", ["super()", "other"])
def test_what_is_around_the_call_is_around_what_the_base_runs(report, called):
    code = TESTER.format(around="with torch.no_grad():\n                ", called=called)
    assert report(code) == []


CONSTRUCTED = """
    import torch

    class Base:
        def __init__(self, network):
            self.solver = {made}

    class Tester(Base):
        def __init__(self, network):
            super().__init__(network)
            self.solver.eval()

        def answer(self, x):
            return self.solver(x).argmax(1).tolist()
"""


@pytest.mark.parametrize(("made", "runs"), [("torch.nn.Linear(8, 2)", True), ("torch.nn.CrossEntropyLoss()", False)])
def test_a_constructor_of_the_base_makes_what_the_class_has(read, made, runs):
    assert bool(read(CONSTRUCTED.format(made=made)).trace.forwards) is runs
