"""One tensor of labels that is filled anew for each loss, `label.fill_(fake)`, between network and criterion."""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set

from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.slicing.between import stays_the_same_ahead_of
from oomfix.script.syntax.names import path_of

_FILLING, _MOVING = ("fill_", "zero_"), ("to", "cuda")


def refilled(site: Site, chosen: Sequence[int], helpers: Helpers) -> list[int]:
    """The indices of a slice that fill a tensor from outside with one number, and of what moves that to a device.

    Inside of the slice they would fill what all losses share once for each part of a batch. They mean the same ahead of
    it, where nothing that they pass reads the tensor, or one that shares its memory.

    Args:
        site: where the backward stands.
        chosen: the indices of the slice's statements in the block, ascending.
        helpers: the functions of the file.
    """
    found: list[int] = []
    filled: set[str] = set()
    for place, index in enumerate(chosen):
        statement = site.block[index]
        name = _filled_by(statement) or _moved_by(statement, filled)
        passed = [site.block[other] for other in chosen[:place] if other not in found]
        if name is None or name in names_bound(*passed):
            continue
        read = names_read(*passed)
        body = site.block if site.iteration is None else site.iteration.body
        if stays_the_same_ahead_of(statement, passed) and not helpers.change_in_place(read, [statement], body):
            found.append(index)
            filled.add(name)
    return found


def _filled_by(statement: ast.stmt) -> str | None:
    """`label` of `label.fill_(1.0)` and `label.data.fill_(real)`."""
    match statement:
        case ast.Expr(ast.Call(func=ast.Attribute(value=owner, attr=method), args=args, keywords=[])):
            path = path_of(owner) or ""
            name = path.removesuffix(".data")
            plain = all(isinstance(one, ast.Constant) or path_of(one) is not None for one in args)
            return name if method in _FILLING and name.isidentifier() and plain else None
    return None


def _moved_by(statement: ast.stmt, filled: Set[str]) -> str | None:
    """`label` of `label = label.to(device)`, where that is filled."""
    match statement:
        case ast.Assign(targets=[ast.Name(name)], value=ast.Call(func=ast.Attribute(value=ast.Name(of), attr=method))):
            return name if name == of and name in filled and method in _MOVING else None
    return None
