"""Chains of tests one of which always holds, although no `else` says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

from oomfix.script.syntax.nodes import names_in, walk


class _Chain(NamedTuple):
    """`if kind == "ce": loss = ...` and `elif kind == "mse": loss = ...`, without an `else`."""

    tests: tuple[str, ...]
    links: list[ast.If]
    following: list[ast.stmt]
    """What comes after it in the same block."""

    @property
    def start(self) -> int:
        return self.links[0].lineno


def ends_always_taken(root: ast.AST) -> set[ast.If]:
    """The last `elif` of each chain without an `else` of which one test must hold.

    One must hold where all branches bind a name that nothing has bound before, and which the next statements read: the
    script would stop there otherwise. The same tests, asked again of the same values, leave no way through either.

    Args:
        root: a function or module.
    """
    nodes = list(walk(root))
    bound = _bound_names(nodes)
    first_of: dict[tuple[str, ...], _Chain] = {}
    ends = set()
    for chain in sorted(_chains(nodes), key=lambda chain: chain.start):
        first = first_of.get(chain.tests)
        if _must_hold(chain, bound):
            first_of.setdefault(chain.tests, chain)
            ends.add(chain.links[-1])
        elif first is not None and not _may_change(first, chain, bound):
            ends.add(chain.links[-1])
    return ends


def _bound_names(nodes: list[ast.AST]) -> dict[str, list[int]]:
    """The lines on which each name is bound; 0 for those that come from outside."""
    bound: dict[str, list[int]] = {}
    for node in nodes:
        if _stores(node):
            bound.setdefault(node.id, []).append(node.lineno)
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append(0)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                bound.setdefault(name, []).append(0)
    return bound


def _chains(nodes: list[ast.AST]) -> Iterator[_Chain]:
    for node in nodes:
        for block in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None)):
            if not isinstance(block, list) or (isinstance(node, ast.If) and block is node.orelse and _is_elif(block)):
                continue
            for index, statement in enumerate(block):
                if isinstance(statement, ast.If) and _is_elif(statement.orelse):
                    links = [statement]
                    while _is_elif(orelse := links[-1].orelse):
                        links.append(orelse[0])
                    if not links[-1].orelse:
                        yield _Chain(tuple(ast.unparse(link.test) for link in links), links, block[index + 1 :])


def _is_elif(orelse: list[ast.stmt]) -> TypeGuard[list[ast.If]]:
    return len(orelse) == 1 and isinstance(orelse[0], ast.If)


def _must_hold(chain: _Chain, bound: dict[str, list[int]]) -> bool:
    assigned = set.intersection(*(_assigned(link.body) for link in chain.links))
    new = {name for name in assigned if min(bound[name]) >= chain.start}
    for statement in chain.following if new else ():
        if hasattr(statement, "body") or isinstance(statement, ast.Match):
            return False  # what is read in there may be read for one of the tests only
        if any(isinstance(part, ast.Name) and part.id in new and not _stores(part) for part in walk(statement)):
            return True
    return False


def _assigned(body: list[ast.stmt]) -> set[str]:
    targets = [target for statement in body if isinstance(statement, ast.Assign) for target in statement.targets]
    return {part.id for part in walk(*targets) if _stores(part)}


def _may_change(first: _Chain, chain: _Chain, bound: dict[str, list[int]]) -> bool:
    """Whether a name in the tests is bound anew from one chain to the other."""
    asked = {name for link in chain.links for name in names_in(link.test)}
    return any(first.start <= line <= chain.start for name in asked for line in bound.get(name, ()))


def _stores(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
