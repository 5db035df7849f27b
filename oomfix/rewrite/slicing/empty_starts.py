"""`aux = None`, `share = 0.0` between the lines of a slice that may bind the name further down: a line of the slice."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.liveness import definitely_bound, names_bound


def with_empty_starts(block: list[ast.stmt], chosen: Sequence[int]) -> list[int]:
    """A slice with the lines in it that say what a name is where its branches do not bind it.

    Args:
        block: the statements around the slice.
        chosen: the indices of the slice's statements, ascending.
    """
    found = list(chosen)
    for index in range(chosen[0], chosen[-1]) if chosen else ():
        if index not in chosen and _is_start_of(block[index], [block[other] for other in chosen if other > index]):
            found.append(index)
    return sorted(found)


def _is_start_of(statement: ast.stmt, later: list[ast.stmt]) -> bool:
    """Whether a statement binds names to constants that others may bind; what all ways bind may start elsewhere."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
        return False
    if not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    names = names_bound(statement)
    if statement.value.value is not None:
        names -= definitely_bound(later)
    return any(not names.isdisjoint(names_bound(other)) for other in later)
