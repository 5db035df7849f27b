"""Ending an autocast block behind the loss, so that its backward runs outside (OOM305)."""

from __future__ import annotations

import ast

from oomfix.rewrite.amp import Amp
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.layout import Layout
from oomfix.script import Script
from oomfix.script.edits import Edit


def end_autocast_edits(script: Script, blocks: Blocks, layout: Layout, amp: Amp) -> dict[int, Edit]:
    """The edits that move a backward, and what follows it, out of the autocast block it stands in.

    Returns:
        The edit for the line of each backward that can be moved: it stands directly in a block of autocast alone,
        behind something, on lines of its own. No edit changes the number of lines.
    """
    edits: dict[int, Edit] = {}
    for event in script.distinct(script.backwards):
        statement = blocks.statement_of(event.node)
        block = next(blocks.ancestors(statement), None)
        if not isinstance(statement, ast.Expr) or not isinstance(block, ast.With) or len(block.items) != 1:
            continue
        index = block.body.index(statement) if statement in block.body else 0
        if not index or not amp.is_autocast(block):
            continue
        moved = [layout.chunk(other, block.body, block.lineno) for other in block.body[index:]]
        outside = layout.own_lines(block)
        if outside is None or any(lines is None for lines in moved):
            continue
        first, last = moved[0], moved[-1]
        assert first is not None and last is not None
        inner = layout.margin(block.body[index])
        lines = layout.moved(first._replace(last=last.last), inner, layout.margin(block))
        span = layout.span(first._replace(last=last.last))
        edits.setdefault(event.node.lineno, Edit(*span, layout.newline.join(lines)))
    return edits
