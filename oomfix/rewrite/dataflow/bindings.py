"""Which names a node binds, each with the expression that it is then another name for, or a part of."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from oomfix.script.syntax.names import path_of

_BINDING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)


def bindings_of(nodes: Iterable[ast.AST]) -> list[tuple[ast.expr, ast.expr]]:
    """What each of these nodes binds to what, see `bindings`."""
    return [binding for node in nodes if isinstance(node, _BINDING) for binding in bindings(node)]


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a node binds to what, `a, b = x, y` one by one; of a loop, to what it goes through."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _bindings_of_parts(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _bindings_of_loop(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def _bindings_of_parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match target, value:
        case ((ast.Tuple(places) | ast.List(places)), (ast.Tuple(parts) | ast.List(parts))) if len(places) == len(
            parts
        ):
            if not any(isinstance(one, ast.Starred) for one in (*places, *parts)):
                yield from zip(places, parts, strict=True)
                return
    yield target, value


def _bindings_of_loop(target: ast.expr, source: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What each round of a loop binds: a part of `nets`, of `enumerate(nets)`, `zip(nets, losses)`, `nets.items()`."""
    last = target.elts[-1] if isinstance(target, ast.Tuple) else target
    if not isinstance(source, ast.Call):
        yield target, source
    elif isinstance(source.func, ast.Attribute) and source.func.attr in ("items", "values"):
        yield last, source.func.value
    elif path_of(source.func) == "zip" and isinstance(target, ast.Tuple):
        yield from zip(target.elts, source.args, strict=False)
    elif path_of(source.func) in ("enumerate", "reversed") and source.args:
        yield from _bindings_of_loop(last, source.args[0])
