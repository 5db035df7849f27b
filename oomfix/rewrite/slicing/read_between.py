"""What is read off a result between lines of a slice, `score = out.mean().item()`, one of which changes it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.script.syntax.names import last_name, path_of

_READING = frozenset("detach clone cpu float mean sum item sigmoid".split())


def with_readers(block: list[ast.stmt], chosen: Sequence[int], root: ast.expr, helpers: Helpers) -> list[int]:
    """A slice with the statements between its own that read what it binds anew, or changes in place, further down.

    Behind the slice they would read something else. In its function they read what they did, and give it out.

    Args:
        block: the statements around the slice.
        chosen: the indices of the slice's statements, ascending.
        root: what is differentiated.
        helpers: the functions of the file.
    """
    found = list(chosen)
    slice_reads = {name for index in chosen for name in names_read(block[index])} | names_read(root)
    slice_binds = {name for index in chosen for name in names_bound(block[index])}
    for index in range(chosen[0], chosen[-1]) if chosen else ():
        statement = block[index]
        if index in chosen or not only_reads(statement) or names_bound(statement) & (slice_reads | slice_binds):
            continue
        ahead = [block[other] for other in chosen if other < index]
        behind = [block[other] for other in chosen if other > index]
        read = names_read(statement)
        is_changed = not read.isdisjoint(names_bound(*behind))
        is_changed = is_changed or helpers.change_in_place(read, behind, ahead)
        if is_changed and read <= names_bound(*ahead):
            found.append(index)
    return sorted(found)


def only_reads(statement: ast.stmt) -> bool:
    """Whether a statement binds a name to what it reads: `score = out`, `score = out.detach().mean()`."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    if not all(last_name(call) in _READING and not call.args and not call.keywords for call in calls_in(statement)):
        return False
    value = statement.value
    while isinstance(value, ast.Call):
        method = value.func
        if not isinstance(method, ast.Attribute):
            return False
        value = method.value
    return path_of(value) is not None
