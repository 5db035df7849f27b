"""An `if` whose branches have become the same is one of them: `if amp: ... else: ...` once precision is handed over."""

from __future__ import annotations

import ast
from typing import NamedTuple

from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.layout import Layout, Lines
from oomfix.script.edits import Edit
from oomfix.script.names import path_of
from oomfix.source import Source

_TRAINING = frozenset({"backward", "step"})


class Merged(NamedTuple):
    """The edits, and which of the manager's backwards go, counted from 0 in the order of the text."""

    edits: list[Edit]
    gone: set[int]


def merge_branches(source: Source, manager: str) -> Merged:
    """The edits that put the first branch in the place of an `if` with two equal ones.

    Only branches that train through the manager are looked at: the script never had equal ones of its own.
    """
    layout, blocks = Layout(source), Blocks(source.tree)
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and _method(node, manager)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    backwards = [call for call in calls if _method(call, manager) == "backward"]
    edits: list[Edit] = []
    gone: set[int] = set()
    for branch in dict.fromkeys(branch for call in calls for branch in blocks.conditions_of(call)[:1]):
        edit = _merged(branch, layout, blocks)
        if edit is not None:
            edits.append(edit)
            other = {id(node) for statement in branch.orelse for node in ast.walk(statement)}
            gone |= {number for number, call in enumerate(backwards) if id(call) in other}
    return Merged(edits, gone)


def _method(call: ast.Call, manager: str) -> str | None:
    """The manager's method that a call trains with, or None."""
    path = path_of(call.func) or ""
    name = path.rsplit(".", 1)[-1]
    return name if path == f"{manager}.{name}" and name in _TRAINING else None


def _merged(branch: ast.If, layout: Layout, blocks: Blocks) -> Edit | None:
    if [ast.dump(one) for one in branch.body] != [ast.dump(other) for other in branch.orelse]:
        return None
    if any(isinstance(node, ast.Call | ast.NamedExpr | ast.Await) for node in ast.walk(branch.test)):
        return None
    outer = next(blocks.ancestors(branch))
    own = layout.own_lines(branch)
    if own is None or (isinstance(outer, ast.If) and branch in outer.orelse and len(outer.orelse) == 1):
        return None
    chunks = [layout.chunk(statement, branch.body, branch.lineno) for statement in branch.body]
    if any(chunk is None for chunk in chunks) or branch.body[0].lineno == branch.lineno:
        return None
    inner, margin = layout.margin(branch.body[0]), layout.margin(branch)
    lines = layout.moved(Lines(_first_of(chunks), _last_of(chunks)), inner, margin)
    return Edit(*layout.span(own), layout.newline.join(lines))


def _first_of(chunks: list[Lines | None]) -> int:
    return min(chunk.first for chunk in chunks if chunk is not None)


def _last_of(chunks: list[Lines | None]) -> int:
    return max(chunk.last for chunk in chunks if chunk is not None)
