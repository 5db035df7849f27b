"""Resets of gradients beside a forward, moved out: to the branch of the backward, or ahead of autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.changes import paths_read
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad, trains
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.text.layout import Layout
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk

_PLAIN = (ast.Compare, ast.Name, ast.Attribute, ast.Constant, ast.UnaryOp, ast.BoolOp)
_PARTS = (ast.expr_context, ast.cmpop, ast.unaryop, ast.boolop)


def reset_edits(reading: Reading) -> list[Edit]:
    """The edits that move `optimizer.zero_grad()` down to the backward, where one test decides about both.

    `if phase == "train": optimizer.zero_grad(); out = model(x)`, with another forward in its `else`, and further down
    `if phase == "train": loss.backward()`. Beside the forward, each part of a batch would drop what the parts before
    have added. A reset in a block of autocast, behind the forward there, moves ahead of that.
    """
    edits: list[Edit] = [edit for reset in _resets_in_autocast(reading) for edit in _moved_ahead(reset, reading)]
    for backward in {id(event.node): event.node for loop in reading.loops for event in loop.backwards}.values():
        statement = reading.blocks.statement_of(backward)
        for reset in _resets_ahead(statement, reading):
            edits += _moved(reset, statement, reading.layout)
    return edits


def _resets_ahead(backward: ast.stmt, reading: Reading) -> Iterator[ast.Expr]:
    """The resets in branches ahead of that of a backward, taken together with it, with nothing of gradients between."""
    decision = reading.blocks.branch_of(backward)
    if not isinstance(decision, ast.If) or backward not in decision.body or not _is_plain(decision.test):
        return
    block = reading.blocks.block_of(decision)
    until = [*block[: block.index(decision)], *decision.body[: decision.body.index(backward)]]
    for number, other in enumerate(until):
        if not isinstance(other, ast.If) or ast.dump(other.test) != ast.dump(decision.test):
            continue
        for place, reset in enumerate(other.body):
            if not isinstance(reset, ast.Expr) or not is_zero_grad(reset) or len(other.body) == 1:
                continue
            between = [*other.body[place + 1 :], *until[number + 1 :]]
            if not any(_minds(one, decision.test) or names_bound(one) & names_read(reset) for one in between):
                yield reset


def _resets_in_autocast(reading: Reading) -> Iterator[ast.Expr]:
    """The resets in blocks of autocast in training loops, with nothing of gradients ahead of them there."""
    inside = {node for loop in reading.loops for node in walk(loop.node)}
    for block in reading.script.imports.nodes.of(ast.With):
        if block not in inside or not reading.amp.is_autocast(block):
            continue
        for index, reset in enumerate(block.body):
            ahead = block.body[:index]
            if not isinstance(reset, ast.Expr) or not is_zero_grad(reset):
                if leaves(reset) or reads_gradients(reset) or trains(reset):
                    break
            elif not names_bound(*ahead, *block.items) & names_read(reset):
                if not any(_stores(one) & paths_read(reset) for one in ahead):
                    yield reset


def _stores(statement: ast.stmt) -> set[str | None]:
    """The `zero_grad` of what a statement, or one in its blocks, assigns to attributes."""
    stored = (node for node in walk(statement) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {f"{path_of(node)}.zero_grad" for node in stored}


def _moved_ahead(reset: ast.Expr, reading: Reading) -> list[Edit]:
    """The edits that put a reset, with its comments, ahead of the block it stands in."""
    layout, block = reading.layout, next(reading.blocks.ancestors(reset))
    assert isinstance(block, ast.With)
    lines, own = reading.chunk(reset), layout.own_lines(block)
    if lines is None or own is None or len(block.body) == 1:
        return []
    place = layout.whole(own)[0]
    moved = layout.moved(lines, layout.margin(reset), layout.margin(block))
    below = layout.source.lines[lines.last]
    gone = lines._replace(last=lines.last + 1) if reset is block.body[0] and not below.strip() else lines
    return [layout.removed(gone), layout.inserted(place, moved)]


def _is_plain(test: ast.expr) -> bool:
    """Whether a test gives the same twice, unless a name in it is bound anew."""
    return all(isinstance(node, (*_PLAIN, *_PARTS)) for node in ast.walk(test))


def _minds(statement: ast.stmt, test: ast.expr) -> bool:
    """Whether a statement notices that gradients are reset behind it, or changes what a test says."""
    if leaves(statement) or reads_gradients(statement) or trains(statement):
        return True
    asked = {path_of(node) for node in walk(test) if isinstance(node, ast.Attribute)}
    stored = (node for node in walk(statement) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return bool(names_bound(statement) & names_read(test)) or any(path_of(node) in asked for node in stored)


def _moved(reset: ast.Expr, backward: ast.stmt, layout: Layout) -> list[Edit]:
    lines, behind = layout.own_lines(reset), layout.own_lines(backward)
    if lines is None or behind is None:
        return []
    place = layout.whole(behind)[0]
    moved = layout.moved(lines, layout.margin(reset), layout.margin(backward))
    return [layout.removed(lines), layout.inserted(place, moved)]
