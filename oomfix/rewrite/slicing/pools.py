"""Pools of earlier samples, `old = pool.query(fake)`, which hand out samples of before for those of this batch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from oomfix.rewrite.dataflow.changes import overlap, paths_read
from oomfix.rewrite.dataflow.liveness import names_bound
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.slicing.between import stays_the_same_ahead_of
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import arguments_of


def exchanged(
    site: Site, chosen: Sequence[int], runs_forward: Callable[[ast.AST], bool], helpers: Helpers
) -> list[int]:
    """The indices of a slice that exchange samples with a pool.

    A pool changes once for each batch, not for each part of one. Ahead of the slice it means the same, unless the slice
    knows it, or both draw random numbers: a network draws those of torch for its dropout.

    Args:
        site: where the backward stands.
        chosen: the indices of the slice's statements in the block, ascending.
        runs_forward: whether a statement runs a network.
        helpers: the functions of the file.
    """
    found: list[int] = []
    for place, index in enumerate(chosen):
        statement = site.block[index]
        pool = _pool_of(statement)
        if pool is None or runs_forward(statement) or not helpers.call_plain_objects(statement):
            continue
        if helpers.lasting_effect(statement) is None:
            continue
        passed = [site.block[other] for other in chosen[:place] if other not in found]
        left = [site.block[other] for other in chosen if other != index]
        if any(overlap({pool}, paths_read(other)) or names_bound(statement) & names_bound(other) for other in left):
            continue
        if helpers.draw_from_torch(statement) or any(map(helpers.draw_random_numbers, passed)):
            continue
        if stays_the_same_ahead_of(statement, passed):
            found.append(index)
    return found


def _pool_of(statement: ast.stmt) -> str | None:
    """`pool` of `old = pool.query(fake)`."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(target, ast.Name) for target in statement.targets):
        return None
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    given = arguments_of(call)
    plain = all(isinstance(one, ast.Name | ast.Constant) or _is_detached(one) for one in given)
    return path_of(call.func.value) if given and plain else None


def _is_detached(value: ast.expr) -> bool:
    """`fake.detach()`, `fake.data`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "detach" and path_of(value.func) is not None
    return isinstance(value, ast.Attribute) and value.attr == "data" and path_of(value) is not None
