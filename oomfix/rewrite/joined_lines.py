"""Statements that `;` joins on one line, put on lines of their own where they have to be moved."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit, bounds


def separate(reading: Reading, lines: Iterable[int]) -> list[Edit]:
    """The edits that end each line behind each of its statements; none for a block behind its own header."""
    wanted = set(lines)
    nodes = reading.script.imports.nodes if wanted else ()
    return [edit for node in nodes for edit in _in_blocks_of(node, reading, wanted)]


def _in_blocks_of(node: ast.AST, reading: Reading, lines: set[int]) -> Iterator[Edit]:
    source, layout = reading.source, reading.layout
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        for one, other in itertools.pairwise(block):
            if other.lineno != one.end_lineno or other.lineno not in lines:
                continue
            first = next(statement for statement in block if statement.end_lineno == one.end_lineno)
            margin = layout.margin(first)
            end, start = bounds(source, one)[1], bounds(source, other)[0]
            begins = source.text[source.line_starts[first.lineno - 1] : bounds(source, first)[0]] == margin
            if begins and not source.text[end:start].strip(" \t;"):
                yield Edit(end, start, f"{layout.newline}{margin}")
