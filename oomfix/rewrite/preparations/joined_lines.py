"""Statements that `;` joins on one line, put on lines of their own where they have to be moved."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.edits import Edit, bounds


def separate(reading: Reading, lines: Iterable[int]) -> list[Edit]:
    """The edits that end each line behind each of its statements, and behind the header of `if train: ...; ...`."""
    wanted = set(lines)
    nodes = reading.script.imports.nodes if wanted else ()
    return [edit for node in nodes for edit in _in_blocks_of(node, reading, wanted)]


def _in_blocks_of(node: ast.AST, reading: Reading, lines: set[int]) -> Iterator[Edit]:
    source, layout = reading.source, reading.layout
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        header = _header_end(block[0], reading) if isinstance(node, ast.stmt) and block[0].lineno in lines else None
        inner = layout.margin(block[0]) + layout.unit
        if header is not None:
            yield Edit(header, bounds(source, block[0])[0], f"{layout.newline}{inner}")
        for one, other in itertools.pairwise(block):
            if other.lineno != one.end_lineno or other.lineno not in lines:
                continue
            first = next(statement for statement in block if statement.end_lineno == one.end_lineno)
            margin = layout.margin(first) if header is None else inner
            end, start = bounds(source, one)[1], bounds(source, other)[0]
            begins = source.text[source.line_starts[first.lineno - 1] : bounds(source, first)[0]] == margin
            if (begins or header is not None) and not source.text[end:start].strip(" \t;"):
                yield Edit(end, start, f"{layout.newline}{margin}")


def _header_end(first: ast.stmt, reading: Reading) -> int | None:
    """Where the header of a block ends that its first statement shares a line with, `if train: ...; ...`, or None.

    A header on several lines has another margin than its last line.
    """
    source, line = reading.source, reading.source.line_starts[first.lineno - 1]
    ahead = source.text[line : bounds(source, first)[0]].rstrip(" \t")
    holder = next(reading.blocks.ancestors(first))
    is_one_line = ahead.lstrip(" \t").startswith("else") or getattr(holder, "lineno", 0) == first.lineno
    return line + len(ahead) if ahead.endswith(":") and is_one_line else None
