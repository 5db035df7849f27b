"""Which functions of a file a call may mean."""

import ast

import pytest

from oomfix.rewrite.functions_called import FunctionsCalled
from oomfix.script.nodes import Nodes, walk
from tests.rewrite.small_loops import apply

CODE = """
class Journal:
    def log(self, row, *, step=None): pass
    @staticmethod
    def scale(x): pass
    @timed
    def norm(self, x): pass

def norm_of(x, order=2, *more, **others): pass
def sample(n, *, size): pass
def step(model, x): pass
step = partial(step, model)
"""
NODES = Nodes(walk(ast.parse(CODE)))


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("scores.log()", 0),
        ("torch.log(x)", 1),
        ("journal.log(x, step=1)", 1),
        ("Journal.log(journal, x)", 1),
        ("journal.log(x, y, z)", 0),
        ("journal.log(x, when=1)", 0),
        ("journal.log(*rows)", 1),
        ("journal.log(**rows)", 1),
        ("self.scale(x)", 1),
        ("x.norm()", 1),
        ("norm_of()", 0),
        ("norm_of(1, 2, 3, four=4)", 1),
        ("sample(3)", 0),
        ("sample(n=3, size=2)", 1),
        ("step(x)", 1),
    ],
)
def test_a_call_means_a_function_that_takes_its_arguments(call, number):
    assert len(FunctionsCalled(NODES).by(ast.parse(call, mode="eval").body)) == number


DELEGATING = """
class Trainer:
    def train_step(self, x):
        self.optimizer.zero_grad()
        loss = {}.train_step(x)
        loss.backward()
        self.optimizer.step()

    def train(self, loader):
        for x in loader:
            self.train_step(x)
"""


@pytest.mark.parametrize(("called", "form"), [("self.model", "micro-batched"), ("self", "in-place")])
def test_a_method_that_asks_a_part_for_what_has_its_own_name_does_not_call_itself(called, form):
    _, loops = apply(DELEGATING.format(called))
    assert [rewrite for rewrite, _ in loops] == [form]
