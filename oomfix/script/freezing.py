"""Loops that freeze a network, or let it train again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.names import path_of
from oomfix.script.nodes import only_argument, walk


def frozen_by(loop: ast.For | ast.AsyncFor) -> tuple[ast.expr, ast.expr] | None:
    """The network whose parameters a loop freezes or thaws, and what it makes `requires_grad` of each.

    `for p in net.parameters(): p.requires_grad = False`, unconditionally (or `if p.requires_grad`), also by
    `requires_grad_`, `detach_` and over `named_parameters`; or some of them are trained, `if "head" in name`, whatever
    is made of the others. None for any other loop.
    """
    iterable, target = loop.iter, loop.target
    if not (isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Attribute)):
        return None
    if iterable.func.attr == "named_parameters" and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    elif iterable.func.attr != "parameters":
        return None
    parameter = path_of(target)
    said = (_sets_training(part, parameter) for part in walk(loop) if isinstance(part, ast.stmt))
    trained = next((trains for trains in said if isinstance(trains, ast.Constant) and trains.value is True), None)
    if trained is not None:
        return iterable.func.value, trained
    for statement in loop.body:
        always = [statement]
        if isinstance(statement, ast.If) and path_of(statement.test) == f"{parameter}.requires_grad":
            always = statement.body  # the others are frozen as they are
        for part in always:
            if (trains := _sets_training(part, parameter)) is not None:
                return iterable.func.value, trains
    return None


def thawed_by(loop: ast.For | ast.AsyncFor, listed: ast.expr) -> Iterator[ast.expr]:
    """What a list of parameters was made of, each of which a loop trains: `for p in chosen: p.requires_grad = True`.

    Args:
        loop: what goes over the list.
        listed: what the list was assigned from: `adapters_of(net)`, `[p for p in net.parameters() if p.ndim > 1]`.
    """
    parameter = path_of(loop.target)
    trains = [_sets_training(statement, parameter) for statement in loop.body]
    if not any(isinstance(value, ast.Constant) and value.value is True for value in trains):
        return
    for node in walk(listed):
        if isinstance(node, ast.Call):
            yield from node.args
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters"):
                yield node.func.value


def _sets_training(statement: ast.stmt, parameter: str | None) -> ast.expr | None:
    """What a statement makes `requires_grad` of a parameter; None where it does not say."""
    if isinstance(statement, ast.Assign) and path_of(statement.targets[0]) == f"{parameter}.requires_grad":
        return statement.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if path_of(call.func) == f"{parameter}.requires_grad_":
            return only_argument(call) or ast.Constant(True)
        if path_of(call.func) == f"{parameter}.detach_":
            return ast.Constant(False)
    return None
