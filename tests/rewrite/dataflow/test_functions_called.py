"""Which functions of a file a call may mean."""

import ast

import pytest

from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.nodes import Nodes, walk
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


def called_in(code):
    tree = ast.parse(code)
    return FunctionsCalled(Imports(tree, Nodes(walk(tree))))


def parsed(call):
    return ast.parse(call, mode="eval").body


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
    assert len(called_in(CODE).by(parsed(call))) == number


IN_SIGHT = """
import numpy as np
from torch import log, train

class Base:
    def __init__(self, size): pass
    def log(self, row): pass
    def train(self, loader): pass

class Journal(Base):
    @classmethod
    def read(cls, path): pass
    @staticmethod
    def scale(x, by=2): pass

def mean(values): pass
def keep(values): pass
def late(self, x): pass
journal.keep = keep
run(shown=late)
"""


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("np.mean(x)", []),
        ("mean(x)", ["mean"]),
        ("x.mean(1)", []),
        ("journal.keep(x)", ["keep"]),
        ("log(x)", []),
        ("journal.log(x)", ["log"]),
        ("journal.log(journal, x)", []),
        ("journal.train(loader)", []),
    ],
)
def test_a_call_means_no_function_that_is_not_in_sight_there(call, found):
    assert [one.name for one in called_in(IN_SIGHT).by(parsed(call))] == found


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("journal.train(loader)", ["train"]),
        ("model.train()", []),
        ("Journal(8)", ["__init__"]),
        ("np.Base(8)", []),
    ],
)
def test_what_a_call_enters_are_also_methods_called_train_and_what_makes_objects(call, found):
    assert [one.name for one in called_in(IN_SIGHT).entered_by(parsed(call))] == found


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("journal.log(x)", "row=x"),
        ("Journal.log(journal, x)", "self=journal row=x"),
        ("Journal.read(path)", "path=path"),
        ("journal.scale(x, y)", "x=x by=y"),
        ("late(journal, x)", "self=journal x=x"),
        ("journal.late(x)", "x=x"),
        ("Journal(8)", "size=8"),
    ],
)
def test_the_arguments_of_a_call_go_to_parameters_behind_that_of_its_object(call, given):
    functions, call = called_in(IN_SIGHT), parsed(call)
    function = (functions.entered_by(call) or functions.of_path("late"))[0]
    pairs = functions.bound(call, function).given
    assert " ".join(f"{parameter.arg}={ast.unparse(argument)}" for parameter, argument in pairs) == given


def test_the_calls_of_a_function_are_those_that_may_enter_it():
    code = (
        IN_SIGHT
        + "Base(1)\nJournal(2)\nclass More(Base):\n    def __init__(self):\n        super().__init__(3)\nMore()"
    )
    functions = called_in(code)
    (constructor,) = functions.of_path("Base")
    assert sorted(ast.unparse(call) for call in functions.calls_of(constructor)) == [
        "Base(1)",
        "Journal(2)",
        "super().__init__(3)",
    ]


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


CLASSES = """
class Trainer:
    if fast:
        def mean(self, out): ...
    else:
        def mean(self, out): ...

    def total(self, out): ...

Alias = Trainer
"""


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("type(self).total(self, x)", 1),
        ("self.__class__.total(self, x)", 1),
        ("Alias.total(trainer, x)", 1),
        ("trainer.total(other, x)", 0),
        ("trainer.mean(x)", 2),
        ("mean(x)", 0),
    ],
)
def test_a_method_is_found_by_any_name_of_its_class_and_in_a_branch_of_it(call, found):
    assert len(called_in(CLASSES).by(parsed(call))) == found
