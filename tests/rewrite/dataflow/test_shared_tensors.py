"""Tensors that statements change in place under other names."""

import ast

import pytest

from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.shared_tensors import are_changed_in_place
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.nodes import Nodes, walk

CODE = """
def double(first, second=None): second.mul_(2)
class Meter:
    def double(self, one): one.mul_(2)
    @staticmethod
    def halve(one, other): one.div_(2)
"""


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        ("double(x, out)", True),
        ("double(out, x)", False),
        ("double(x, second=out)", True),
        ("double(*pair, out)", True),
        ("double(*out)", True),
        ("double(x, **out)", True),
        ("meter.double(out)", True),
        ("Meter.double(meter, out)", True),
        ("meter.halve(out, x)", True),
        ("meter.halve(x, out)", False),
    ],
)
def test_a_function_changes_what_a_call_gives_the_parameter_that_it_writes_to(call, changes):
    tree = ast.parse(f"{CODE}{call}")
    functions = FunctionsCalled(Imports(tree, Nodes(walk(tree))))
    assert are_changed_in_place({"out"}, tree.body[-1:], functions, []) == changes


@pytest.mark.parametrize(
    ("ahead", "change", "changes"),
    [
        ("view = out", "view.mul_(2)", True),
        ("view = out + 1", "view.mul_(2)", False),
        ("view = kept = out", "view.mul_(2)", True),
        ("view = given or out", "view.mul_(2)", True),
        ("views = {'a': x, 'b': out}", "views['b'].mul_(2)", True),
        ("for view in [x, out]: pass", "view.mul_(2)", True),
    ],
)
def test_a_tensor_is_changed_under_every_name_that_it_may_have(ahead, change, changes):
    tree = ast.parse(f"{ahead}\n{change}")
    functions = FunctionsCalled(Imports(tree, Nodes(walk(tree))))
    assert are_changed_in_place({"out"}, tree.body[-1:], functions, tree.body[:-1]) == changes
