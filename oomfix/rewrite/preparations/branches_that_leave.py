"""What stands in the `else` of a branch that always leaves the iteration stands behind it as well.

`if i == 0: ...; continue` for the pass that sets a network up, with the forward and no backward in its `else`.
"""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Lines
from oomfix.script.syntax.edits import Edit

_NEVER_SWALLOWING = frozenset("no_grad enable_grad inference_mode set_grad_enabled autocast".split())
"""Contexts whose blocks are left by nothing but their last statement and exceptions that go on."""


def end_branches(reading: Reading, manager: str) -> list[Edit]:
    """The edits that move the `else` of branches which always leave behind them, ahead of backwards in their block."""
    edits: dict[ast.If, Edit | None] = {}
    for call in reading.calls_to(f"{manager}.backward"):
        statement = reading.blocks.statement_of(call)
        block = reading.blocks.block_of(statement)
        for other in block[: block.index(statement)]:
            if isinstance(other, ast.If) and other.orelse and _always_leaves(other.body):
                edits.setdefault(other, _without_else(other, reading))
    return [edit for edit in edits.values() if edit is not None]


def _always_leaves(block: list[ast.stmt]) -> bool:
    match block[-1]:
        case ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
            return True
        case ast.With(items=items, body=body):
            return all(called_name(item.context_expr) in _NEVER_SWALLOWING for item in items) and _always_leaves(body)
        case ast.If(body=body, orelse=orelse):
            return bool(orelse) and _always_leaves(body) and _always_leaves(orelse)
    return False


def _without_else(branch: ast.If, reading: Reading) -> Edit | None:
    layout, lines = reading.layout, reading.source.lines
    header = branch.orelse[0].lineno - 1
    while not lines[header - 1].strip() or lines[header - 1].lstrip().startswith("#"):
        header -= 1
    if lines[header - 1].partition("#")[0].strip() != "else:" or layout.own_lines(branch) is None:
        return None
    inside = Lines(header + 1, layout.last_line(branch))
    moved = layout.moved(inside, layout.margin(branch.orelse[0]), layout.margin(branch))
    return Edit(*layout.span(inside._replace(first=header)), layout.newline.join(moved))
