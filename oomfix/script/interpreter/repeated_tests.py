"""Decisions that are asked again: what one side of a test has bound is what a name holds on that side the next time.

So it is with the attributes of objects: `self.state`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oomfix.script.interpreter.state import Binding, Frame, Side, State
from oomfix.script.syntax.nodes import walk

Path = str | tuple[int, str]
Bound = tuple[dict[Path, Any], dict[Path, Any]]
_WITH_BINDINGS = (ast.Name, ast.Attribute)


@dataclass(eq=False)
class Asked:
    """A test where it is reached, and the bindings that it asks there."""

    test: ast.expr
    bindings: list[Binding | None]

    @cached_property
    def text(self) -> str:
        """The test as it is written."""
        return ast.unparse(self.test)


def asked_by(test: ast.expr, binding_of: Callable[[ast.expr], Binding | None]) -> Asked | None:
    """What a test asks; None where it calls something."""
    parts = list(walk(test))
    if any(isinstance(part, ast.Call) for part in parts):
        return None
    return Asked(test, [binding_of(part) for part in parts if isinstance(part, _WITH_BINDINGS)])


def bound_by(before: State, body: State | None, orelse: State | None) -> Bound | None:
    """What the two ends of a decision have bound since it was reached; None where one of them does not come through."""
    if body is None or orelse is None:
        return None
    return _changes(before, body), _changes(before, orelse)


def _changes(before: State, end: State) -> dict[Path, Any]:
    """What the names, and the attributes of objects, hold that were bound on one side."""
    changes: dict[Path, Any] = {}
    changes.update(end.attributes.changes_over(before.attributes).items())
    changes.update((name, own) for name, own in end.names.changes_over(before.names).items() if name.isidentifier())
    return changes


def remember(frame: Frame, asked: Asked | None, sides: Bound | None) -> None:
    """Keep what each side of a test has bound, beside what the names hold after both.

    Args:
        frame: the frame, behind the decision.
        asked: what `asked_by` gave.
        sides: what `bound_by` gave.
    """
    if sides is None or asked is None or frame.state is None:
        return
    for value, bound in zip((True, False), sides, strict=True):
        held = {path: (_held(frame.state, path), own) for path, own in bound.items() if isinstance(own, Binding)}
        if held:
            frame.sides[asked.text, value] = Side(asked.bindings, held)


def recall(frame: Frame, asked: Asked | None, value: bool) -> None:
    """Bind the names and attributes that nothing has bound since to what they held on this side of the test.

    Nothing is bound where the test asks something that was bound since.
    """
    if asked is None or not frame.sides:
        return
    side = frame.sides.get((asked.text, value))
    if side is None or frame.state is None or not _same(side.asked, asked.bindings):
        return
    for path, (joined, own) in side.held.items():
        if joined is None or _held(frame.state, path) is not joined:
            continue
        if isinstance(path, str):
            frame.state.names.bind(path, own)
        else:
            frame.state.attributes[path] = own


def _held(state: State, path: Path) -> Binding | None:
    return state.names.get(path) if isinstance(path, str) else state.attributes.get(path)


def _same(before: list[Binding | None], now: list[Binding | None]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
