"""`aux = None` between the lines of a slice that may bind the name further down: a line of the slice."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.liveness import names_bound


def with_empty_starts(block: list[ast.stmt], chosen: Sequence[int]) -> list[int]:
    """A slice with the lines in it that say what a name is where its branches do not bind it.

    Args:
        block: the statements around the slice.
        chosen: the indices of the slice's statements, ascending.
    """
    found = list(chosen)
    for index in range(chosen[0], chosen[-1]) if chosen else ():
        later = (name for other in chosen if other > index for name in names_bound(block[other]))
        if index not in chosen and _is_empty(block[index]) and not names_bound(block[index]).isdisjoint(later):
            found.append(index)
    return sorted(found)


def _is_empty(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    return isinstance(statement.value, ast.Constant) and statement.value.value is None
