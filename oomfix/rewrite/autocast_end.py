"""Ending an autocast block behind the loss: its backward runs outside (OOM305), and so do metrics.

No edit changes the number of lines.
"""

from __future__ import annotations

import ast

from oomfix.rewrite.liveness import FunctionNode, names_bound
from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit
from oomfix.script.nodes import walk


def end_autocast_edits(reading: Reading) -> dict[int, Edit]:
    """The edits that move a backward, and what follows it, out of the autocast block it stands in.

    Returns:
        The edit for the line of each backward that can be moved: it stands directly in a block of autocast alone,
        behind something, on lines of its own.
    """
    script, blocks = reading.script, reading.blocks
    edits: dict[int, Edit] = {}
    for event in script.distinct(script.backwards):
        statement = blocks.statement_of(event.node)
        block = next(blocks.ancestors(statement), None)
        if not isinstance(statement, ast.Expr) or not isinstance(block, ast.With):
            continue
        edit = _ended_at(block, statement, reading)
        if edit is not None:
            edits.setdefault(event.node.lineno, edit)
    return edits


def metric_edits(reading: Reading) -> dict[int, list[Edit]]:
    """The edits that move metrics at the end of autocast blocks behind them, by the line of their training loop.

    Next to the loss, `losses.append(loss.item())` would run for every part of a batch. Moved are statements that are
    there for their effect, change nothing that the block makes, and run no network.
    """
    forwards = {id(forward.node) for forward in reading.script.trace.forwards.values()}
    edits: dict[int, list[Edit]] = {}
    for block, line in _blocks_of_forwards(reading).items():
        made = {name for statement in block.body if not _is_for_effect(statement) for name in names_bound(statement)}
        first = None
        for statement in reversed(block.body):
            runs_network = any(id(node) in forwards for node in walk(statement))
            if runs_network or not _is_for_effect(statement) or names_bound(statement) & made:
                break
            first = statement
        edit = _ended_at(block, first, reading) if first is not None else None
        if edit is not None:
            edits.setdefault(line, []).append(edit)
    return edits


def _blocks_of_forwards(reading: Reading) -> dict[ast.With, int]:
    """The `with` blocks around forwards in training loops, with the lines of the loops."""
    found: dict[ast.With, int] = {}
    for loop in reading.loops:
        for forward in loop.forwards:
            for parent in reading.blocks.ancestors(forward.node):
                if isinstance(parent, ast.With):
                    found[parent] = loop.line
                elif parent is loop.node or isinstance(parent, FunctionNode):
                    break
    return found


def _is_for_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.AugAssign)


def _ended_at(block: ast.With, statement: ast.stmt, reading: Reading) -> Edit | None:
    """The edit that ends a block of autocast alone ahead of one of its statements, but for the first."""
    index = block.body.index(statement) if statement in block.body else 0
    if not index or len(block.items) != 1 or not reading.amp.is_autocast(block):
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
