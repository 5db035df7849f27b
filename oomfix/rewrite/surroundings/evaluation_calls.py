"""Evaluation that collects what the model returns: `memory.evaluate` runs it in pieces where it does not fit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import names_bound_by_target, names_read
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.header import manager_in
from oomfix.rewrite.text.manager_calls import through_manager
from oomfix.script.facts.trace import Forward
from oomfix.script.facts.values import Graph
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_METHOD = Pattern(r"\.(\w+_)?(forward|predict|encode|decode|generate|sample|infer|get|set|compute)(_\w+)?$")
_COLLECTING = frozenset("append extend".split())


def evaluation_call_edits(reading: Reading) -> list[Edit]:
    """The edits that run models through the manager where an evaluation collects their outputs batch by batch.

    Left as they are: models that are not switched to `eval()`, whose outputs may depend on the whole batch; calls
    whose gradients are not off; calls under the script's own autocast; scripts without a manager at their top.
    """
    script, blocks = reading.script, reading.blocks
    manager = manager_in(script)
    if manager is None or not script.may_run_on_cuda:
        return []
    ways: dict[int, list[Forward]] = {}
    for forward in script.trace.forwards.values():
        ways.setdefault(id(forward.node), []).append(forward)
    chosen: dict[ast.Call, None] = {}
    for forward in script.evaluation_forwards:
        if forward.path is not None and all(_only_evaluates(way) for way in ways[id(forward.node)]):
            if _is_of_module(forward) and _is_collected(forward.node, blocks):
                chosen[forward.node] = None
    return through_manager(reading.layout, chosen, f"{manager}.evaluate")


def _is_of_module(forward: Forward) -> bool:
    """Whether the module itself is called, not one of its methods, with nothing that the manager takes for its own."""
    path = path_of(forward.node.func)
    named = any(keyword.arg in (None, "batch_size") for keyword in forward.node.keywords)
    return path is not None and path == forward.path and not _METHOD.search(path) and not named


def _only_evaluates(forward: Forward) -> bool:
    return forward.evaluating and forward.site.grad is Graph.NO and forward.site.autocast is None


def _is_collected(call: ast.Call, blocks: Blocks) -> bool:
    """Whether the loop around a call puts something computed from its result into a list."""
    statement, loop = blocks.statement_of(call), blocks.loop_of(call)
    if not isinstance(statement, ast.Assign) or statement.value is not call or not isinstance(loop, ast.For):
        return False
    derived = names_bound_by_target(*statement.targets)
    for node in walk(loop):
        if isinstance(node, ast.Assign) and names_read(node.value) & derived:
            derived |= names_bound_by_target(*node.targets)
    return bool(names_read(*_collected(loop)) & derived)


def _collected(loop: ast.For) -> Iterator[ast.expr]:
    for node in walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COLLECTING:
            yield from node.args
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List | ast.ListComp):
            yield node.value
