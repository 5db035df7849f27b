"""The test that decides when processes exchange gradients, handed over together with the window that it follows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.window_shape import CannotFold, WindowShape, flag_of
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import walk


def exchange_edits(shape: WindowShape, reading: Reading, closed: str) -> list[Edit]:
    """The edits that make `no_sync` and `require_backward_grad_sync` follow the window of the manager.

    The last window may be shorter once the manager counts: its last batch has to exchange gradients too.

    Args:
        shape: the window of a loop as the script counts it.
        reading: the script.
        closed: the expression that is true on the last batch of a window.

    Raises:
        CannotFold: gradients are exchanged on other terms than the window's.
    """
    loop, blocks = shape.count.loop, reading.blocks
    edits: dict[int, Edit] = {}
    for node in walk(loop):
        if isinstance(node, ast.Call) and last_name(node) == "no_sync":
            tests = _tests_around(node, loop, blocks)
        elif isinstance(node, ast.Assign) and _sets_exchange(node):
            tests = [node.value]
        else:
            continue
        following = [part for test in tests for part in _following(test, shape, blocks)]
        if len(following) != 1:
            raise CannotFold(f"when gradients are exchanged in line {node.lineno} is not seen to follow it")
        test, when_closed = following[0]
        if test is not shape.test:
            edits[id(test)] = Edit(*bounds(reading.source, test), closed if when_closed else f"not {closed}")
    return list(edits.values())


def _sets_exchange(node: ast.Assign) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "require_backward_grad_sync" for one in node.targets)


def _tests_around(node: ast.AST, loop: ast.For, blocks: Blocks) -> list[ast.expr]:
    """The conditions of the loop that a call depends on."""
    found = []
    for parent in blocks.ancestors(node):
        if parent is loop:
            break
        if isinstance(parent, ast.IfExp | ast.If):
            found.append(parent.test)
    return found


def _following(test: ast.expr, shape: WindowShape, blocks: Blocks) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition that follow the window, and whether they are true where it closes, or elsewhere."""
    when_closed = shape.follows(test)
    if when_closed is not None:
        yield test, when_closed
        return
    parts: list[ast.expr] = []
    if isinstance(test, ast.BoolOp):
        parts = test.values
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        parts = [test.operand]
    elif isinstance(test, ast.Name) and (flag := flag_of(test, shape.count.loop, blocks)) is not None:
        parts = [flag]
    for part in parts:
        yield from _following(part, shape, blocks)
