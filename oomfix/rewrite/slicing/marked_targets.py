"""Targets that are marked between network and criterion, `y[y == 255] = -100`, in a tensor that came with the batch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import works_in_place
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import names_bound, names_bound_by_target, names_read
from oomfix.rewrite.dataflow.shared_tensors import one_by_one, sharing_memory
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.slicing.between import stays_the_same_ahead_of
from oomfix.script.syntax.names import path_of, root_of
from oomfix.script.syntax.nodes import arguments_of, names_in

_KEEPING_NOTHING = frozenset("torch F nn np print len range int float".split())
"""Functions, and libraries of functions, that keep nothing of what they are given."""


def marked(site: Site, chosen: Sequence[int], runs_forward: Callable[[ast.AST], bool], helpers: Helpers) -> list[int]:
    """The indices of a slice that write into a tensor of the batch, and read nothing that the slice computes.

    Inside of the slice they would write to what is read outside as well, for each part of the batch. They mean the same
    ahead of it, where they draw no random numbers, and nothing that they pass knows the tensor: by its name, by that of
    one that shares its memory, or because it was given to something that may have kept it.

    Args:
        site: where the backward stands.
        chosen: the indices of the slice's statements in the block, ascending.
        runs_forward: whether a statement runs a network.
        helpers: the functions of the file.
    """
    if not isinstance(site.iteration, ast.For):
        return []
    found: list[int] = []
    for place, index in enumerate(chosen):
        statement = site.block[index]
        written = _written_by(statement)
        if not written or runs_forward(statement):
            continue
        if helpers.draw_random_numbers(statement) or helpers.fetch(statement) or helpers.lasting_effect(statement):
            continue
        passed = [site.block[other] for other in chosen[:place] if other not in found]
        others = [*passed, *(site.block[other] for other in chosen[place + 1 :])]
        own = names_bound(statement)
        if any(own & names_read(other) or written & names_bound(other) for other in others):
            continue
        ahead = [one for one in site.iteration.body if one.lineno < statement.lineno]
        known = sharing_memory(written, ahead)
        if not known <= _batch(site.iteration, ahead) or _may_be_kept(known, ahead):
            continue
        if known & names_read(*passed) or not stays_the_same_ahead_of(statement, passed):
            continue
        found.append(index)
    return found


def _written_by(statement: ast.stmt) -> set[str]:
    """The names of the tensors that a statement writes into; none where it does anything else but name numbers."""
    found: set[str] = set()
    for one in _simple_statements(statement):
        match one:
            case ast.Expr(ast.Call(func=ast.Attribute(value=owner, attr=method))) if works_in_place(method):
                found.add(_tensor(owner))
            case ast.Assign(targets=[ast.Subscript(value=owner)]) | ast.AugAssign(target=ast.Subscript(value=owner)):
                found.add(_tensor(owner))
            case ast.Assign(targets=[ast.Name()]):
                pass
            case _:
                return set()
    return set() if "" in found or leaves(statement) is not None else found


def _simple_statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """A statement, or those under a loop or a test."""
    if isinstance(statement, ast.For | ast.If):
        for one in (*statement.body, *statement.orelse):
            yield from _simple_statements(one)
    else:
        yield statement


def _tensor(owner: ast.expr) -> str:
    """`y` of `y`, `y[0]` and `y.data`; "" for anything else."""
    while isinstance(owner, ast.Subscript) or (isinstance(owner, ast.Attribute) and owner.attr == "data"):
        owner = owner.value
    return owner.id if isinstance(owner, ast.Name) else ""


def _batch(loop: ast.For, ahead: Sequence[ast.stmt]) -> set[str]:
    """The names that stand for what a loop was given for this iteration, or is made of that alone."""
    found = names_bound_by_target(loop.target)
    for statement in ahead:
        made: set[str] = set()
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            for target, value in one_by_one(statement.targets[0], statement.value):
                if root_of(path_of(_receiver(value)) or "") in found:
                    made |= names_bound_by_target(target)
        found = (found - names_bound(statement)) | made
    return found


def _receiver(value: ast.expr) -> ast.expr:
    """`y` of `y.to(device).long()` and `y[:, 0]`."""
    while True:
        match value:
            case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner):
                value = inner
            case _:
                return value


def _may_be_kept(known: set[str], ahead: Sequence[ast.stmt]) -> bool:
    """Whether a tensor is given to something that may keep it for later: `net.condition_on(y)`."""
    calls = calls_in(*ahead)
    giving = (call for call in calls if known & names_in(*arguments_of(call)))
    return any(root_of(path_of(call.func) or "") not in _KEEPING_NOTHING for call in giving)
