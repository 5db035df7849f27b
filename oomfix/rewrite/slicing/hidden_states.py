"""Hidden states made for a batch, `hidden = net.init_hidden(len(x))`: a part of it needs one for fewer rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.liveness import names_bound, names_bound_by_target
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.slicing.batch_names import asks_first_size
from oomfix.rewrite.slicing.plain_numbers import size_of
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.patterns import Pattern

_STATE = Pattern(r"^(get_)?init(ial(i[sz]e)?)?_?(\w+_)?(hidden|state)s?$", re.IGNORECASE)


def makes_state(statement: ast.stmt) -> bool:
    """`hidden = net.init_hidden(len(x))`."""
    return isinstance(statement, ast.Assign) and bool(_STATE.match(called_name(statement.value)))


def states_made_before(site: Site, first: int, read: set[str], draws: Callable[[ast.AST], bool]) -> list[int]:
    """The indices of the statements that make hidden states ahead of a slice and may be its first ones.

    Args:
        site: where the backward stands.
        first: the index in its block that the slice begins at.
        read: the names that the slice reads from outside.
        draws: whether a statement draws random numbers, as one that makes a state may do as well.
    """
    found: list[int] = []
    for index in range(site.first, first):
        statement, behind = site.block[index], site.block[index + 1 : first]
        if names_bound(statement) & read and not any(map(draws, behind)):
            if _makes_state_of_a_batch(statement, site.block[:index]):
                found.append(index)
    return found


def _makes_state_of_a_batch(statement: ast.stmt, ahead: list[ast.stmt]) -> bool:
    """Whether a statement calls what makes a state for the rows of the batch, perhaps counted ahead of it."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    numbers = {name for other in ahead if isinstance(other, ast.Assign) for name in _numbers_of_rows(other)}
    return bool(_STATE.match(last_name(statement.value))) and any(
        given.id in numbers if isinstance(given, ast.Name) else size_of(given) is not None and asks_first_size(given)
        for given in statement.value.args
    )


def _numbers_of_rows(statement: ast.Assign) -> set[str]:
    """`n` of `n = len(x)` and of `n, steps = x.shape`: along the other dimensions a batch is not cut."""
    if size_of(statement.value) is None:
        return set()
    shapes = [target.elts[0] for target in statement.targets if isinstance(target, ast.Tuple)]
    numbers = shapes if shapes or not asks_first_size(statement.value) else statement.targets
    return names_bound_by_target(*numbers)
