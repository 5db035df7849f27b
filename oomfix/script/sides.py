"""Decisions that are asked again: what one side of a test has bound is what a name holds on that side the next time."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from oomfix.script.nodes import walk
from oomfix.script.state import Binding, Frame, Side, State

Bound = tuple[dict[str, Any], dict[str, Any]]


def asked_by(test: ast.expr, binding_of: Callable[[ast.expr], Binding | None]) -> list[Binding | None] | None:
    """The bindings that a test asks; None where it calls something."""
    parts = list(walk(test))
    if any(isinstance(part, ast.Call) for part in parts):
        return None
    return [binding_of(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)]


def bound_by(before: State, body: State | None, orelse: State | None) -> Bound | None:
    """What the two ends of a decision have bound since it was reached; None where one of them does not come through."""
    if body is None or orelse is None:
        return None
    return body.names.changes_over(before.names), orelse.names.changes_over(before.names)


def remember(frame: Frame, test: ast.expr, sides: Bound | None, asked: list[Binding | None] | None) -> None:
    """Keep what each side of a test has bound, beside what the names hold after both.

    Args:
        frame: the frame, behind the decision.
        test: what was decided.
        sides: what `bound_by` gave.
        asked: what `asked_by` gave.
    """
    if sides is None or asked is None or frame.state is None:
        return
    for value, bound in zip((True, False), sides, strict=True):
        names = {
            name: (frame.state.names.get(name), own)
            for name, own in bound.items()
            if name.isidentifier() and isinstance(own, Binding)
        }
        if names:
            frame.sides[ast.unparse(test), value] = Side(asked, names)


def recall(frame: Frame, test: ast.expr, value: bool, asked: list[Binding | None] | None) -> None:
    """Bind the names that nothing has bound since to what they held on this side of the test.

    Nothing is bound where the test asks something that was bound since.
    """
    if asked is None or not frame.sides:
        return
    side = frame.sides.get((ast.unparse(test), value))
    if side is None or frame.state is None or not _same(side.asked, asked):
        return
    for name, (joined, own) in side.names.items():
        if joined is not None and frame.state.names.get(name) is joined:
            frame.state.names.bind(name, own)


def _same(before: list[Binding | None], now: list[Binding | None]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
