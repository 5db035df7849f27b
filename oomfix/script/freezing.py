"""Loops that freeze a network, or let it train again."""

from __future__ import annotations

import ast

from oomfix.script.names import path_of
from oomfix.script.nodes import only_argument


def frozen_by(loop: ast.For | ast.AsyncFor) -> tuple[ast.expr, ast.expr] | None:
    """The network all of whose parameters a loop freezes or thaws, and what it makes `requires_grad` of each.

    `for p in net.parameters(): p.requires_grad = False`, unconditionally (or `if p.requires_grad`), also by
    `requires_grad_`, `detach_` and over `named_parameters`. None for any other loop.
    """
    iterable, target = loop.iter, loop.target
    if not (isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Attribute)):
        return None
    if iterable.func.attr == "named_parameters" and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    elif iterable.func.attr != "parameters":
        return None
    parameter = path_of(target)
    for statement in loop.body:
        always = [statement]
        if isinstance(statement, ast.If) and path_of(statement.test) == f"{parameter}.requires_grad":
            always = statement.body  # the others are frozen as they are
        for part in always:
            if (trains := _sets_training(part, parameter)) is not None:
                return iterable.func.value, trains
    return None


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
