"""Metrics at the end of a block around the forward, moved behind it; the number of lines stays."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, nodes_of_scope, nodes_of_scope_body
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.preparations.autocast_end import ended_ahead_of
from oomfix.script import TrainingLoop
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import walk

_LEFT = frozenset({"set_grad_enabled", "enable_grad"})
_BINDING = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def metric_edits(reading: Reading) -> dict[int, list[Edit]]:
    """The edits that move metrics at the end of blocks around forwards behind them, by the line of their training loop.

    Next to the loss, `losses.append(loss.item())` would run for every part of a batch. Moved are statements that are
    there for their effect, change nothing that the block makes or the loss is made of, and run no network. They leave
    blocks of autocast, of gradients that a flag switches, and of what measures.
    """
    edits: dict[int, list[Edit]] = {}
    for block, loop in _blocks_of_forwards(reading).items():
        if _runs_backward(block, loop) or not _may_be_left(block, reading):
            continue
        metrics = _metrics_at_the_end(block, loop, reading)
        edit = ended_ahead_of(block, metrics[0], reading) if metrics else None
        if edit is not None:
            edits.setdefault(loop.line, []).append(edit)
    return edits


def _runs_backward(block: ast.With, loop: TrainingLoop) -> bool:
    """Whether a block is around a backward too: its metrics follow the call there, and its step is measured there."""
    backwards = {id(event.node) for event in loop.backwards}
    return any(id(node) in backwards for node in walk(block))


def _may_be_left(block: ast.With, reading: Reading) -> bool:
    """Whether metrics are the same behind a block."""
    if reading.amp.is_autocast(block) or reading.amp.holds_autocast(block) or reading.measures(block):
        return True
    return {called_name(item.context_expr) for item in block.items} <= _LEFT


def _metrics_at_the_end(block: ast.With, loop: TrainingLoop, reading: Reading) -> list[ast.stmt]:
    """The statements at the end of a block that may move behind it, in order."""
    forwards = {id(forward.node) for forward in reading.script.trace.forwards.values()}
    made = {name for statement in block.body if not _is_for_effect(statement) for name in names_bound(statement)}
    read = _read_behind(block, loop, reading)
    found: list[ast.stmt] = []
    for statement in reversed(block.body):
        runs_network = any(id(call) in forwards for call in reading.calls_run.by(statement))
        bound = names_bound(statement)
        needed = bound & made or overlap(bound | changed_paths(statement), read)
        if runs_network or needed or not _is_for_effect(statement):
            break
        found.insert(0, statement)
    return found


def _blocks_of_forwards(reading: Reading) -> dict[ast.With, TrainingLoop]:
    """The `with` blocks around forwards in training loops, or around what runs them, with the loops."""
    found: dict[ast.With, TrainingLoop] = {}
    for loop in reading.loops:
        for forward in loop.forwards:
            for parent in reading.blocks.ancestors(forward.node):
                if isinstance(parent, ast.With):
                    found[parent] = loop
                elif parent is loop.node or isinstance(parent, FunctionNode):
                    break
        forwards, backwards = ({event.node for event in events} for events in (loop.forwards, loop.backwards))
        for block in (node for node in nodes_of_scope(loop.node) if isinstance(node, ast.With) and node not in found):
            run = set(reading.calls_run.by(block))
            if not forwards.isdisjoint(run) and backwards.isdisjoint(run):
                found[block] = loop
    return found


def _read_behind(block: ast.With, loop: TrainingLoop, reading: Reading) -> set[str]:
    """The access paths that a loss is made of behind a block; of a function that runs no backward, what it returns."""
    scope = reading.blocks.scope_of(block)
    if scope is None:
        return set()
    statements = [node for node in nodes_of_scope_body(scope) if isinstance(node, ast.stmt)]
    ends: list[ast.Call | ast.stmt] = [
        event.node for event in loop.backwards if reading.blocks.scope_of(event.node) is scope
    ]
    ends = ends or [statement for statement in statements if isinstance(statement, ast.Return)]
    paths = paths_read(*ends)
    first, last = block.end_lineno or block.lineno, max((end.lineno for end in ends), default=0)
    behind = [one for one in statements if isinstance(one, _BINDING) and first < one.lineno < last]
    for statement in sorted(behind, key=lambda one: one.lineno, reverse=True):
        if overlap(names_bound(statement), paths):
            paths |= paths_read(statement)
    return paths


def _is_for_effect(statement: ast.stmt, *, differentiated: bool = True) -> bool:
    """Whether a statement is no part of a loss: it calls, or counts, or does so in blocks of its own."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.With):
        contexts = {called_name(item.context_expr) for item in statement.items}
        differentiated = differentiated and contexts.isdisjoint(("no_grad", "inference_mode"))
    if isinstance(statement, ast.If | ast.For | ast.With):
        inner = [*statement.body, *getattr(statement, "orelse", ())]
        return all(_is_for_effect(one, differentiated=differentiated) for one in inner)
    return isinstance(statement, ast.AugAssign) or (isinstance(statement, ast.Assign) and not differentiated)
