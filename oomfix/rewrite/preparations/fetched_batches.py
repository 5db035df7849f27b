"""A batch that is fetched in the arguments of a network, `model(next(batches))`, gets a name, so as to be given."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.effects import fetches
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.script.syntax.edits import Edit, bounds


def name_batches(reading: Reading, manager: str) -> list[Edit]:
    """The edits that fetch a batch ahead of the statement that has it in its arguments.

    Only where it is the first thing that the statement calls, so that everything runs in the order it did, and where
    nothing but the manager's autocast is entered before.
    """
    free = FreeNames(reading.script).one_of("batch", "fetched_batch")
    done: set[ast.stmt] = set()
    edits: list[Edit] = []
    for call in reading.calls_to(f"{manager}.backward"):
        for statement in reading.blocks.block_of(reading.blocks.statement_of(call)):
            if statement not in done and (fetched := _first_fetched(statement, manager)) is not None:
                done.add(statement)
                edits += _named(reading, statement, fetched, free)
    return edits


def _first_fetched(statement: ast.stmt, manager: str) -> ast.Call | None:
    """The call that fetches, where a statement calls nothing before it and has it in the arguments of another one."""
    inner: ast.AST = statement
    while isinstance(inner, ast.With):
        if any(f"{manager}.autocast(" not in ast.unparse(item.context_expr) for item in inner.items):
            return None
        inner = inner.body[0]
    if not isinstance(inner, ast.Assign | ast.AnnAssign) or inner.value is None:
        return None
    outer = inner.value
    first = next(_in_order_of_ending(outer), None)
    return first if first is not None and first is not outer and fetches(first) else None


def _in_order_of_ending(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of an expression as they are made: those in the arguments of one come before it."""
    calls = list(calls_in(node))
    calls.sort(key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))
    return iter(calls)


def _named(reading: Reading, statement: ast.stmt, fetched: ast.Call, name: str) -> Iterator[Edit]:
    source, layout = reading.source, reading.layout
    if layout.own_lines(statement) is None:
        return
    start = source.line_starts[statement.lineno - 1]
    yield layout.inserted(start, [f"{layout.margin(statement)}{name} = {source.segment(fetched)}"])
    yield Edit(*bounds(source, fetched), name)
