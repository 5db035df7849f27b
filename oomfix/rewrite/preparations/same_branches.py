"""An `if` whose branches have become the same is one of them: `if amp: ... else: ...` once precision is handed over.

Where only their backwards are alike, these run ahead of the `if`, so that the loss they go through can be lifted. What
unscales gradients under a flag that decided no more than that does so without it: the manager knows what it has scaled.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import Blocks, next_in_chain
from oomfix.rewrite.dataflow.calls import called_name, only_calls
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_TRAINING = frozenset({"backward", "step"})
_SCALING = Pattern(r"(^|_)(amp|scaler|half|(b?f|float_?)16|mixed|precision)(_|$)", re.IGNORECASE)
_ASKING = frozenset({"is_enabled", "is_available", "isinstance", "hasattr", "len"})
"""What may be called in a test, ahead of a backward as well as behind it, or not at all."""


class MergedBranches(NamedTuple):
    """The edits, and which of the manager's backwards go, counted from 0 in the order of the text."""

    edits: list[Edit]
    gone: set[int]


def merge_branches(reading: Reading, manager: str) -> MergedBranches:
    """The edits that put the first branch in the place of an `if` with two equal ones, or what both begin with ahead.

    Only branches that train through the manager are looked at: the script never had equal ones of its own.
    """
    blocks = reading.blocks
    calls = [node for node in reading.script.imports.nodes.of(ast.Call) if _method(node, manager)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    backwards = [call for call in calls if _method(call, manager) == "backward"]
    edits: list[Edit] = []
    gone: set[int] = set()
    flags: set[str] = set()
    for branch in dict.fromkeys(branch for call in calls for branch in blocks.conditions_of(call)[:1]):
        merged = _merged(branch, reading, manager)
        found = [merged] if merged is not None else _hoisted(branch, reading, manager)
        if found:
            flags.add(ast.dump(branch.test))
        found = found or _asked_in_any_case(branch, reading)
        if found:
            edits += found
            other = {id(node) for node in walk(*branch.orelse)}
            gone |= {number for number, call in enumerate(backwards) if id(call) in other}
    for node in reading.script.imports.nodes.of(ast.If) if flags else ():
        if ast.dump(node.test) in flags and _only_unscales(node, manager):
            edits += [edit for edit in [_body_of(node, reading)] if edit is not None]
    return MergedBranches(edits, gone)


def _only_unscales(branch: ast.If, manager: str) -> bool:
    return not branch.orelse and len(branch.body) == 1 and only_calls(branch.body[0], f"{manager}.unscale_")


def _method(call: ast.Call, manager: str) -> str | None:
    """The manager's method that a call trains with, or None."""
    path = path_of(call.func) or ""
    name = path.rsplit(".", 1)[-1]
    return name if path == f"{manager}.{name}" and name in _TRAINING else None


def _merged(branch: ast.If, reading: Reading, manager: str) -> Edit | None:
    """The first branch in the place of an `if`, if the second differs at most in that it unscales nothing.

    Where a test may ask something else than whether losses are scaled, the second may leave that to a later batch of
    its window.
    """
    body, other = [ast.dump(one) for one in branch.body], [ast.dump(one) for one in branch.orelse]
    if body != other:
        if not _asks_for_scaling(branch.test):
            return None
        unscaling = [only_calls(one, f"{manager}.unscale_") for one in branch.body]
        if [one for one, unscales in zip(body, unscaling, strict=True) if not unscales] != other:
            return None
    return _body_of(branch, reading)


def _asked_in_any_case(branch: ast.If, reading: Reading) -> list[Edit]:
    """The edits that ask `if closes:` once, in the place of `if amp and closes: ... elif closes: ...`."""
    other, layout = next_in_chain(branch), reading.layout
    if (
        other is None
        or other.orelse
        or not isinstance(branch.test, ast.BoolOp)
        or not isinstance(branch.test.op, ast.And)
    ):
        return []
    asked, bodies = ast.dump(other.test), [[ast.dump(one) for one in side.body] for side in (branch, other)]
    flags = [one for one in branch.test.values if ast.dump(one) != asked]
    if bodies[0] != bodies[1] or len(flags) != len(branch.test.values) - 1 or not all(map(_asks_for_scaling, flags)):
        return []
    lines = layout.own_lines(other)
    if lines is None or not _may_go(branch, reading.blocks):
        return []
    test = Edit(*bounds(layout.source, branch.test), layout.source.segment(other.test))
    return [test, Edit(*layout.whole(lines), "")]


def _asks_for_scaling(test: ast.expr) -> bool:
    """`args.amp`, `scaler is not None`, `scaler.is_enabled()`, and nothing besides."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Compare):
        test = test.left
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and called_name(test) == "is_enabled":
        test = test.func.value
    return bool(_SCALING.search(last_of(path_of(test) or "")))


def _body_of(branch: ast.If, reading: Reading) -> Edit | None:
    """The first branch in the place of its `if`; None where that cannot be written."""
    layout = reading.layout
    own = layout.own_lines(branch)
    if own is None or not _may_go(branch, reading.blocks):
        return None
    chunks = reading.chunks(branch.body)
    if chunks is None or branch.body[0].lineno == branch.lineno:
        return None
    inner, margin = layout.margin(branch.body[0]), layout.margin(branch)
    lines = layout.moved(Lines(chunks[0].first, chunks[-1].last), inner, margin)
    return Edit(*layout.span(own), layout.newline.join(lines))


def _may_go(branch: ast.If, blocks: Blocks) -> bool:
    """Whether asking the test has no effect, and the `if` is no `elif`."""
    nodes = list(walk(branch.test))
    if any(isinstance(node, ast.NamedExpr | ast.Await) for node in nodes):
        return False
    if not all(called_name(node) in _ASKING for node in nodes if isinstance(node, ast.Call)):
        return False
    outer = next(blocks.ancestors(branch))
    return not (isinstance(outer, ast.If) and branch in outer.orelse and len(outer.orelse) == 1)


def _hoisted(branch: ast.If, reading: Reading, manager: str) -> list[Edit]:
    """The backwards that both branches begin with, as one ahead of the `if`.

    `memory.backward(scaler.scale(loss) if scaler is not None else loss)`. Nothing where a branch holds nothing else.
    """
    layout = reading.layout
    if not branch.orelse or not _may_go(branch, reading.blocks) or min(len(branch.body), len(branch.orelse)) < 2:
        return []
    losses, edits = [], []
    for block in (branch.body, branch.orelse):
        first, lines = block[0], layout.own_lines(block[0])
        if lines is None or not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Call):
            return []
        if _method(first.value, manager) != "backward" or len(first.value.args) != 1 or first.value.keywords:
            return []
        losses.append(layout.source.segment(first.value.args[0]))
        edits.append(without(layout, first, block))
    text = layout.source.segment(branch.test)
    test = f"({text})" if isinstance(branch.test, ast.IfExp | ast.Lambda) else text
    loss = losses[0] if losses[0] == losses[1] else f"{losses[0]} if {test} else {losses[1]}"
    start = layout.source.line_starts[branch.lineno - 1]
    return [layout.inserted(start, [f"{layout.margin(branch)}{manager}.backward({loss})"]), *edits]
