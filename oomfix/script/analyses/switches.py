"""Switches of a file: constants at its top, or in a class of settings, that nothing in it changes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property

from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import Nodes


class Switches:
    """What the tests come to that ask only for switches.

    Args:
        tree: the file.
        nodes: all of its nodes.
    """

    def __init__(self, tree: ast.Module, nodes: Nodes) -> None:
        self._tree = tree
        self._nodes = nodes

    def outcome(self, test: ast.expr) -> bool | None:
        """How a test comes out; None where more than switches decides."""
        return outcome_of(test, lambda part: self._set.get(path_of(part) or ""))

    @cached_property
    def _set(self) -> dict[str, bool]:
        """The switches, and whether each is on: `AMP = False`, and `CFG.amp` of `class CFG: amp = False`."""
        bound = list(bindings(self._nodes))
        return {path: value for path, value in self._written() if bound.count(path) == 1}

    def _written(self) -> Iterator[tuple[str, bool]]:
        """The constants that are assigned at the top, and in the classes there."""
        yield from _constants(self._tree.body)
        for statement in self._tree.body:
            if isinstance(statement, ast.ClassDef):
                yield from ((f"{statement.name}.{name}", value) for name, value in _constants(statement.body))


def outcome_of(test: ast.expr, known: Callable[[ast.expr], bool | None]) -> bool | None:
    """How a test comes out, by what is known of its parts; None where that does not decide it."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            outcome = outcome_of(operand, known)
            return None if outcome is None else not outcome
        case ast.BoolOp(operator, parts):
            outcomes = [outcome_of(part, known) for part in parts]
            decides = isinstance(operator, ast.Or)
            if decides in outcomes:
                return decides
            return None if None in outcomes else not decides
    return known(test)


def bindings(nodes: Nodes) -> Iterator[str]:
    """Everything that is bound anywhere in a file, as often as it is; a constant of a class with that as well."""
    names: list[ast.Name | ast.Attribute] = [*nodes.of(ast.Name), *nodes.of(ast.Attribute)]
    for name in names:
        if not isinstance(name.ctx, ast.Load) and (path := path_of(name)) is not None:
            yield path
    for parameter in nodes.of(ast.arg):
        yield parameter.arg
    shared: list[ast.Global | ast.Nonlocal] = [*nodes.of(ast.Global), *nodes.of(ast.Nonlocal)]
    for statement in shared:
        yield from statement.names
    imports: list[ast.Import | ast.ImportFrom] = [*nodes.of(ast.Import), *nodes.of(ast.ImportFrom)]
    for imported in imports:
        yield from (alias.asname or alias.name for alias in imported.names)
    for cls in nodes.of(ast.ClassDef):
        yield from (f"{cls.name}.{name}" for name, _ in _constants(cls.body))


def _constants(block: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    for statement in block:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(bool() | None as value)):
                yield name, bool(value)
            case ast.AnnAssign(ast.Name(name), _, ast.Constant(bool() | None as value)):
                yield name, bool(value)
