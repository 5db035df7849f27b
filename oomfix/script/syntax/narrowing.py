"""Tests that tell a number, or nothing at all, from a tensor."""

from __future__ import annotations

import ast

from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import walk

_NUMBERS = frozenset("int float bool complex Number Real number generic floating NoneType".split())
_SAME = ast.Is | ast.Eq | ast.In


def narrowed_by(test: ast.expr) -> tuple[ast.Name | None, bool]:
    """The name that a test leaves without a tensor, and the side of the test on which it does.

    `x is None`, `type(x) == float`, `type(x) in (int, float)`, `isinstance(x, float)`, and their opposites.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        name, side = narrowed_by(test.operand)
        return name, not side
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        side, other = isinstance(test.ops[0], _SAME), test.comparators[0]
        if not side and not isinstance(test.ops[0], ast.IsNot | ast.NotEq | ast.NotIn):
            return None, side
        if isinstance(test.left, ast.Name) and isinstance(other, ast.Constant) and other.value is None:
            return test.left, side
        asked = _argument(test.left, "type", 1)
        return (asked if _are_numbers(other) else None), side
    if isinstance(test, ast.Call) and (asked := _argument(test, "isinstance", 2)) and _are_numbers(test.args[1]):
        return asked, True
    return None, True


def narrowed_to_terms(branch: ast.If) -> tuple[ast.Name | None, bool]:
    """The name that a test tells from a tensor, and the side where it is none, if that side only adds it to something.

    `if torch.is_tensor(x): ... else: total += x`: what is no tensor may still be a list or a dict of them, which is
    asked for its parts.
    """
    test, side = branch.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, side = test.operand, not side
    asked = _argument(test, "torch.is_tensor", 1)
    if isinstance(test, ast.Call) and len(test.args) == 2 and last_of(path_of(test.args[1])) == "Tensor":
        asked = _argument(test, "isinstance", 2)
    if asked is None:
        return None, side
    body = branch.body if side else branch.orelse
    return (asked if body and all(_adds_alone(statement, asked.id) for statement in body) else None), side


def _adds_alone(statement: ast.stmt, name: str) -> bool:
    """Whether a statement reads a name, if at all, as what it adds: `log[key] += value`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Name):
        return True
    return not any(isinstance(node, ast.Name) and node.id == name for node in walk(statement))


def _argument(node: ast.expr, function: str, arguments: int) -> ast.Name | None:
    """The name that a builtin is asked about first."""
    if not isinstance(node, ast.Call) or path_of(node.func) != function or len(node.args) != arguments:
        return None
    return node.args[0] if isinstance(node.args[0], ast.Name) else None


def _are_numbers(node: ast.expr) -> bool:
    """`float`, `(int, float)`, `numbers.Number`, `int | float`: types of numbers only."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(map(_are_numbers, node.elts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _are_numbers(node.left) and _are_numbers(node.right)
    return last_of(path_of(node)) in _NUMBERS
