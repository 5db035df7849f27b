"""The terms of a loss: what is summed into an expression, by the paths as they are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.facts.named_like import is_loss_not_weight
from oomfix.script.syntax.names import path_of


def additive_terms(node: ast.expr) -> list[str]:
    """The paths that are summed (weighted or not) into an expression, through method calls such as `.mean()`."""
    path = path_of(node)
    if path is not None:
        return [path]
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Add | ast.Sub):
            return additive_terms(node.left) + additive_terms(node.right)
        if isinstance(node.op, ast.Div):
            return additive_terms(node.left)
        # Of a product, the weight is a setting: only what says that it is a loss, or stands beside a literal, is one.
        weighted = [
            side
            for side, other in ((node.left, node.right), (node.right, node.left))
            if isinstance(other, ast.Constant) or is_loss_not_weight(path_of(side) or "")
        ]
        return [term for side in weighted for term in additive_terms(side)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "scale" and node.args:
            return additive_terms(node.args[0])
        if node.func.attr in ("mean", "sum", "float", "squeeze"):
            return additive_terms(node.func.value)
    if isinstance(node, ast.UnaryOp):
        return additive_terms(node.operand)
    return []


def summed_terms(node: ast.expr) -> list[str]:
    """The paths that are summed, weighted or not, and nothing else: of `(target - out) ** 2 + penalty` the penalty."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return [*summed_terms(left), *summed_terms(right)]
        case ast.BinOp(left, ast.Div(), _):
            return summed_terms(left)
        case ast.BinOp(left, ast.Mult(), right):
            weighted = set(additive_terms(node))
            return [path for path in map(path_of, (left, right)) if path in weighted]
        case ast.UnaryOp(_, operand):
            return summed_terms(operand)
    path = path_of(node)
    return [] if path is None else [path]


def called_terms(node: ast.expr, loss: str) -> Iterator[str]:
    """What is called for a loss or a term of it: `bound` in `-bound(x)`, `net.loss` in `0.1 * net.loss(x) + other`."""
    match node:
        case ast.Call(func, arguments):  # `loss = scalar(loss)` may stand behind the backward
            if (path := path_of(func)) is not None and loss not in map(path_of, arguments):
                yield path
        case ast.UnaryOp(_, operand):
            yield from called_terms(operand, loss)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            yield from (*called_terms(left, loss), *called_terms(right, loss))
        case ast.BinOp(ast.Constant() | ast.Name() | ast.Attribute(), ast.Mult(), ast.Call() as term):
            yield from (path for path in called_terms(term, loss) if is_loss_not_weight(path))
