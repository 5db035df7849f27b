"""Which statements of a block a backward may depend on, whatever stands in their way."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.liveness import names_bound
from oomfix.rewrite.facts.reading import Reading


def needed_for(block: Sequence[ast.stmt], end: int, manager: str) -> set[int]:
    """The indices of what a backward may depend on.

    Args:
        block: the statements around the backward.
        end: its index.
        manager: the name of the manager.
    """
    paths = paths_read(block[end]) - {f"{manager}.backward"}
    found: set[int] = set()
    for index in reversed(range(end)):
        if overlap(names_bound(block[index]) | changed_paths(block[index]) - {manager}, paths):
            found.add(index)
            paths |= paths_read(block[index])
    return found


def ways_to(backward: ast.Call, reading: Reading) -> Iterator[tuple[list[ast.stmt], int]]:
    """The blocks that a loss may be computed in, each with the index of what runs its backward there.

    They are the one of the backward, and those around the `if train:` or `with timer():` that it stands in.
    """
    statement: ast.AST = reading.blocks.statement_of(backward)
    while isinstance(statement, ast.stmt):
        block = reading.blocks.block_of(statement)
        yield block, block.index(statement)
        statement = next(reading.blocks.ancestors(statement))
        if not isinstance(statement, ast.If | ast.With):
            return
