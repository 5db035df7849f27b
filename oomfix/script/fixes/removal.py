"""Taking a call out of a script: its statement, and the condition that asks for nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from oomfix.script.syntax.edits import Edit, remove_statement, whole_lines
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import blocks, walk
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.source import Source

_ABOUT_CACHE = Pattern(r"cache|memory|vram|显存|缓存|内存|メモリ|메모리", re.IGNORECASE)


class Removal:
    """Finds the edits that take calls out.

    Args:
        source: the file.
        nodes: all nodes of the file.
    """

    def __init__(self, source: Source, nodes: Sequence[ast.AST]) -> None:
        self._source = source
        self._nodes = nodes

    def of(self, call: ast.expr) -> tuple[Edit, ...]:
        """The edit that takes a call out which is a statement of its own; empty for any other.

        With it goes an `if` that does nothing else, and asks for nothing but the device or a flag, and what speaks
        of it.
        """
        found = self._statements.get(call)
        while found is not None and len(found[1]) == 1 and id(found[1]) in self._conditions:
            found = self._conditions[id(found[1])]
        return () if found is None else self._with_what_speaks_of_it(*found)

    def _with_what_speaks_of_it(self, statement: ast.stmt, block: list[ast.stmt]) -> tuple[Edit, ...]:
        """Take a statement out with the comment that speaks of nothing else, and one of two blank lines that meet."""
        edits = remove_statement(self._source, statement, block)
        if (
            len(edits) != 1
            or edits[0].replacement
            or (edits[0].start, edits[0].end) != whole_lines(self._source, statement)
        ):
            return edits
        lines, first = ["", *self._source.lines, ""], statement.lineno
        comment, above = lines[first - 1].strip(), lines[max(first - 2, 0)].strip()
        if comment.startswith("#") and _ABOUT_CACHE.search(comment) and not above.startswith("#"):
            first -= not _goes_on(statement, block)
        below = lines[min(self._source.position(edits[0].end)[0], len(lines) - 1)]
        first -= first > 1 and not lines[first - 1].strip() and not below.strip()
        return (edits[0]._replace(start=self._source.line_starts[first - 1]),)

    @cached_property
    def _statements(self) -> dict[ast.expr, tuple[ast.stmt, list[ast.stmt]]]:
        """Calls that are statements of their own, with the statement and its block."""
        return {
            statement.value: (statement, block)
            for block in blocks(self._nodes)
            for statement in block
            if isinstance(statement, ast.Expr)
        }

    @cached_property
    def _conditions(self) -> dict[int, tuple[ast.stmt, list[ast.stmt]]]:
        """The `if` without `else` around a block, where its test may go; with the block that the `if` is in."""
        return {
            id(statement.body): (statement, block)
            for block in blocks(self._nodes)
            for statement in block
            if isinstance(statement, ast.If) and not statement.orelse and _asks_nothing_else(statement.test)
        }


def _goes_on(statement: ast.stmt, block: list[ast.stmt]) -> bool:
    """Whether what frees memory goes on right below a statement: `gc.collect()`, `del outputs`."""
    behind = block[block.index(statement) + 1 :][:1]
    return any(
        other.lineno == (statement.end_lineno or 0) + 1
        and (isinstance(other, ast.Delete) or "collect" in ast.unparse(other))
        for other in behind
    )


def _asks_nothing_else(test: ast.expr) -> bool:
    """Whether a test calls nothing but `torch.cuda.is_available()` and `torch.device("cpu")`, and binds nothing."""
    calls = [path_of(node.func) for node in walk(test) if isinstance(node, ast.Call)]
    return all((path or "").endswith(("is_available", "device")) for path in calls) and not any(
        isinstance(node, ast.NamedExpr | ast.Await) for node in walk(test)
    )
