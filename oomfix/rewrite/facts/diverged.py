"""Tests that are true of numbers which a training that has gone wrong gives: not finite, or too large."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import only_argument

_READING = frozenset({"item", "detach", "cpu", "abs"})
"""What is asked of a loss for its number."""

_NO_NUMBERS = frozenset("inf +inf -inf infinity nan".split())


def asks_if_not_finite(test: ast.expr) -> bool:
    """`torch.isnan(loss) or torch.isinf(loss)`, `not torch.isfinite(losses).all()`: true where one number is not."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.Or) and all(map(asks_if_not_finite, test.values))
    if _is_compared_with_no_number(test):
        return True
    asked, over_all = {"isnan", "isinf"}, {"any", "sum"}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, asked, over_all = test.operand, {"isfinite"}, {"all"}
    return called_name(_without_reducing(test, over_all)) in asked


def asks_if_finite(test: ast.expr) -> bool:
    """`torch.isfinite(loss)`, `not torch.isnan(loss) and not torch.isinf(loss)`: false only where a number is not."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(asks_if_finite, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks_if_not_finite(test.operand)
    return called_name(_without_reducing(test, {"all"})) == "isfinite"


def asks_if_diverged(test: ast.expr) -> bool:
    """Whether a test is true of numbers that are not finite, or too large; other losses may have no graph: `== 0`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return all(map(asks_if_diverged, test.values))
    if asks_if_not_finite(test):
        return True
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    number, limit = _read_of(test.left), test.comparators[0]
    if isinstance(test.ops[0], ast.NotEq):  # of all numbers, only nan differs from itself
        return number is not None and number == _read_of(limit)
    is_number = isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value > 0
    return isinstance(test.ops[0], ast.Gt | ast.GtE) and is_number and number is not None


def _without_reducing(test: ast.expr, over_all: set[str]) -> ast.expr:
    """What is asked of each number: `found` of `bool(found)`, `torch.any(found) == True`, `found.sum() > 0`."""
    while True:
        match test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[ast.Constant(value=True)]):
                test = left
            case ast.Compare(left=left, ops=[ast.Gt()], comparators=[ast.Constant(value=0)]):
                test = left
            case ast.Call(func=ast.Attribute(value=value)) if not test.args and last_name(test) in over_all | {"item"}:
                test = value
            case ast.Call(args=[asked]) if last_name(test) in over_all | {"bool"}:
                test = asked
            case _:
                return test


def _is_compared_with_no_number(test: ast.expr) -> bool:
    """`abs(loss) == float("inf")`; nothing is equal to nan."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.Is) or len(test.ops) != 1:
        return False
    limit = test.comparators[0]
    if isinstance(limit, ast.UnaryOp) and isinstance(limit.op, ast.USub):
        limit = limit.operand
    if called_name(limit) == "float" and isinstance(limit, ast.Call):
        given = only_argument(limit)
        return isinstance(given, ast.Constant) and str(given.value).lower() in _NO_NUMBERS
    return isinstance(limit, ast.Attribute) and limit.attr in _NO_NUMBERS


def _read_of(node: ast.expr) -> str | None:
    """The name of `loss`, `loss.item()`, `float(loss)`."""
    if isinstance(node, ast.Call) and called_name(node) == "float" and len(node.args) == 1:
        node = node.args[0]
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and last_name(node) in _READING:
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else None
