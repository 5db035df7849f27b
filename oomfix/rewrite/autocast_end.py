"""Ending an autocast block behind the loss, whose backward runs outside (OOM305); the number of lines stays."""

from __future__ import annotations

import ast

from oomfix.rewrite.liveness import names_bound, names_read
from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit
from oomfix.script.nodes import walk


def end_autocast_edits(reading: Reading) -> dict[int, Edit]:
    """The edits that move a backward, and what follows it, out of the autocast block it stands in.

    Returns:
        The edit for the line of each backward that can be moved: it stands directly in a block of autocast alone,
        behind something, on lines of its own, and nothing behind the first one in the block computes another loss.
        Backwards of one block share their edit.
    """
    script, blocks = reading.script, reading.blocks
    edits: dict[int, Edit] = {}
    ended: dict[ast.With, Edit | None] = {}
    for event in script.distinct(script.backwards):
        statement = blocks.statement_of(event.node)
        block = next(blocks.ancestors(statement), None)
        if not isinstance(statement, ast.Expr) or not isinstance(block, ast.With) or statement not in block.body:
            continue
        if block not in ended:
            ends = reading.amp.is_autocast(block) and not _computes_behind(block, statement, reading)
            ended[block] = ended_ahead_of(block, statement, reading) if ends else None
        edit = ended[block]
        if edit is not None:
            edits.setdefault(event.node.lineno, edit)
    return edits


def _computes_behind(block: ast.With, statement: ast.stmt, reading: Reading) -> bool:
    """Whether what follows a backward in its block runs a network, or a backward of what is made there."""
    behind = block.body[block.body.index(statement) + 1 :]
    made = {name for other in behind for name in names_bound(other)}
    forwards = {forward.node for forward in reading.script.trace.forwards.values()}
    backwards = {event.node for event in reading.script.backwards}
    return any(
        node in forwards or (node in backwards and not made.isdisjoint(names_read(node)))
        for other in behind
        for node in walk(other)
    )


def ended_ahead_of(block: ast.With, statement: ast.stmt, reading: Reading) -> Edit | None:
    """The edit that ends a block of one context ahead of one of its statements, but for the first."""
    index = block.body.index(statement) if statement in block.body else 0
    if not index or len(block.items) != 1:
        return None
    layout = reading.layout
    moved = [layout.chunk(other, block.body, block.lineno) for other in block.body[index:]]
    if layout.own_lines(block) is None or any(lines is None for lines in moved):
        return None
    first, last = moved[0], moved[-1]
    assert first is not None and last is not None
    inner = layout.margin(block.body[index])
    lines = layout.moved(first._replace(last=last.last), inner, layout.margin(block))
    span = layout.span(first._replace(last=last.last))
    return Edit(*span, layout.newline.join(lines))
