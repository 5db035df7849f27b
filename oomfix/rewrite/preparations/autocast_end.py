"""Ending an autocast block behind the loss, whose backward runs outside (OOM305); the number of lines stays."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Lines
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import walk


def end_autocast_edits(reading: Reading) -> dict[int, Edit]:
    """The edits that move a backward, and what follows it, out of the autocast block it stands in.

    Returns:
        The edit for the line of each backward that can be moved: it stands directly in a block of autocast alone, or
        there under tests such as `if scaler: ... else: ...`, behind something, on lines of its own, and nothing behind
        the first one in the block computes another loss. Backwards of one block share their edit.
    """
    script, blocks = reading.script, reading.blocks
    edits: dict[int, Edit] = {}
    ended: dict[ast.With, Edit | None] = {}
    for event in script.distinct(script.backwards):
        statement = _with_its_test(blocks.statement_of(event.node), blocks)
        block = next(blocks.ancestors(statement), None)
        if not isinstance(block, ast.With) or statement not in block.body:
            continue
        if block not in ended:
            ends = reading.amp.is_autocast(block) and not _computes_behind(block, statement, reading)
            ended[block] = ended_ahead_of(block, _with_resets(statement, block.body), reading) if ends else None
        edit = ended[block]
        if edit is not None:
            edits.setdefault(event.node.lineno, edit)
    return edits


def _with_its_test(statement: ast.stmt, blocks: Blocks) -> ast.stmt:
    """A backward, or the outermost `if` around it of those that stand in each other alone."""
    parent = next(blocks.ancestors(statement), None)
    while isinstance(statement, ast.Expr | ast.If) and isinstance(parent, ast.If):
        statement = parent
        parent = next(blocks.ancestors(statement), None)
    return statement


def _with_resets(statement: ast.stmt, block: list[ast.stmt]) -> ast.stmt:
    """A statement, or the first of the resets of gradients that stand right ahead of it."""
    index = block.index(statement)
    while index > 1 and is_zero_grad(block[index - 1]):
        index -= 1
    return block[index]


def _computes_behind(block: ast.With, statement: ast.stmt, reading: Reading) -> bool:
    """Whether what follows a backward in its block runs a network, or a backward of what is made there.

    So do tests around it that hold more than the backward.
    """
    behind = block.body[block.body.index(statement) + isinstance(statement, ast.Expr) :]
    made = names_bound(*behind)
    forwards = {forward.node for forward in reading.script.trace.forwards.values()}
    backwards = {event.node for event in reading.script.backwards}
    return any(
        node in forwards or (node in backwards and not made.isdisjoint(names_read(node))) for node in walk(*behind)
    )


def ended_ahead_of(block: ast.With, statement: ast.stmt, reading: Reading) -> Edit | None:
    """The edit that ends a block of one context ahead of one of its statements, but for the first."""
    index = block.body.index(statement) if statement in block.body else 0
    if not index or len(block.items) != 1:
        return None
    layout = reading.layout
    chunks = reading.chunks(block.body[index:])
    if layout.own_lines(block) is None or chunks is None:
        return None
    whole = Lines(chunks[0].first, chunks[-1].last)
    lines = layout.moved(whole, layout.margin(block.body[index]), layout.margin(block))
    return Edit(*layout.span(whole), layout.newline.join(lines))
