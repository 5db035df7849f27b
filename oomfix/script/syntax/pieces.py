"""Loops over the pieces of one tensor: a batch that is cut up by hand, so that each piece fits."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import names_in, walk

_CUTTING = frozenset({"chunk", "split", "tensor_split"})
_PASSING = frozenset({"zip", "enumerate", "reversed", "list", "tuple", "tqdm", "tqdm.tqdm"})
_RANGES = frozenset({"range", "trange", "tqdm.trange"})
_DEEPEST = 4
"""`list(enumerate(zip(...)))`, and no name that is made of itself for ever."""

Written = Callable[[ast.expr], ast.expr]
"""Gives what a name was assigned, as it is written, and everything else as it is."""


class Pieces(NamedTuple):
    """What a loop goes over piece by piece.

    Attributes:
        whole: the tensor that is cut.
        number: how many pieces there are.
    """

    whole: ast.expr
    number: ast.expr


def pieces_of(loop: ast.For | ast.AsyncFor, written: Written) -> Pieces | None:
    """What a loop goes over piece by piece, along the first dimension; None where that is not certain.

    `for part in x.chunk(n)`, `for a, b in zip(x.split(m), y.split(m))`; within `for i in range(...)` a slice such as
    `x[i : i + m]` or `x[i::n]`, or a piece by its number. Along another dimension it may be the time that is cut.
    """
    iterable = written(loop.iter)
    for _ in range(_DEEPEST):
        if isinstance(iterable, ast.Call) and path_of(iterable.func) in _PASSING and iterable.args:
            iterable = written(iterable.args[0])
    if isinstance(iterable, ast.Call) and path_of(iterable.func) in _RANGES and iterable.args:
        return _taken_by_number(loop, iterable, written)
    return _cut(iterable)


def _cut(node: ast.expr) -> Pieces | None:
    """`x.chunk(n)`, `torch.split(x, m)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _CUTTING:
        return None
    whole, arguments = node.func.value, node.args
    if path_of(whole) == "torch" and arguments:
        whole, *arguments = arguments
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    dimension = arguments[1] if len(arguments) > 1 else named.get("dim", ast.Constant(0))
    is_first = isinstance(dimension, ast.Constant) and dimension.value == 0
    if (
        not arguments
        or not is_first
        or (isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str))
    ):
        return None
    return Pieces(whole, arguments[0] if node.func.attr == "chunk" else _length(node))


def _taken_by_number(loop: ast.For | ast.AsyncFor, numbers: ast.Call, written: Written) -> Pieces | None:
    """What is taken piece by piece by the number of the round, of something that no round makes."""
    nodes = list(walk(loop))
    made = {part.id for part in nodes if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    counting = names_in(loop.target)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and counting & names_in(node.value):
            counting |= names_in(*node.targets)  # `start = i * m`
    for node in nodes:
        if not isinstance(node, ast.Subscript):
            continue
        by_number = isinstance(node.slice, ast.Name) and node.slice.id in counting
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        from_number = isinstance(first, ast.Slice) and not counting.isdisjoint(names_in(first))
        if not (by_number or from_number) or made & names_in(node.value):
            continue
        if by_number and (pieces := _cut(written(node.value))) is not None:
            return pieces
        if from_number:
            return Pieces(node.value, numbers.args[0] if len(numbers.args) == 1 else _length(numbers))
    return None


def _length(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("len", ast.Load()), [node], [])
