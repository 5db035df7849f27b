"""Loops that freeze a network, or let it train again."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import names_in, only_argument, walk


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
        elif any(isinstance(part, ast.Continue | ast.Break) for part in walk(statement)):
            return None  # some are left as they are
        for part in always:
            if (trains := _sets_training(part, parameter)) is not None:
                return iterable.func.value, trains
    return None


def thawed_by(loop: ast.For | ast.AsyncFor, listed: ast.expr, thawed: Set[str]) -> Iterator[ast.expr]:
    """What the parameters are of that a loop goes over, where it trains some of them, whatever it makes of the others.

    `for p in chosen: p.requires_grad = True`, `if "head" in name: p.requires_grad = True`, or
    `p.requires_grad = "head" in name`.

    Args:
        loop: what goes over the parameters.
        listed: what they were listed by: `adapters_of(net)`, `[p for p in net.parameters() if p.ndim > 1]`.
        thawed: the paths of all that the file trains.
    """
    bound = names_in(loop.target)
    if thawed.isdisjoint(bound):
        return
    statements = [part for part in walk(loop) if isinstance(part, ast.stmt)]
    settings = [_sets_training(statement, name) for statement in statements for name in bound]
    if not any(value is not None and _trains_some(value, bound) for value in settings):
        return
    for node in walk(listed):
        if isinstance(node, ast.Call):
            yield from node.args
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters"):
                yield node.func.value


def _trains_some(value: ast.expr, bound: set[str]) -> bool:
    """Whether what `requires_grad` is set to is true, or asks what the loop has bound: the name of the parameter."""
    return not bound.isdisjoint(names_in(value)) or (isinstance(value, ast.Constant) and value.value is True)


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
