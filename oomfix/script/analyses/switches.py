"""Switches of a file: constants at its top, or in a class of settings, that nothing in it changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
        match test:
            case ast.Name() | ast.Attribute():
                return self._set.get(path_of(test) or "")
            case ast.UnaryOp(ast.Not(), operand):
                outcome = self.outcome(operand)
                return None if outcome is None else not outcome
            case ast.BoolOp(operator, parts):
                outcomes = [self.outcome(part) for part in parts]
                decides = isinstance(operator, ast.Or)
                if decides in outcomes:
                    return decides
                return None if None in outcomes else not decides
        return None

    @cached_property
    def _set(self) -> dict[str, bool]:
        """The switches, and whether each is on: `AMP = False`, and `CFG.amp` of `class CFG: amp = False`."""
        bound = [path for path in self._bound() if path is not None]
        return {path: value for path, value in self._written() if bound.count(path) == 1}

    def _written(self) -> Iterator[tuple[str, bool]]:
        """The constants that are assigned at the top, and in the classes there."""
        yield from _constants(self._tree.body)
        for statement in self._tree.body:
            if isinstance(statement, ast.ClassDef):
                yield from ((f"{statement.name}.{name}", value) for name, value in _constants(statement.body))

    def _bound(self) -> Iterator[str | None]:
        """Everything that is bound anywhere in the file, as often as it is; a constant of a class with that as well."""
        names: list[ast.Name | ast.Attribute] = [*self._nodes.of(ast.Name), *self._nodes.of(ast.Attribute)]
        for name in names:
            if not isinstance(name.ctx, ast.Load):
                yield path_of(name)
        for parameter in self._nodes.of(ast.arg):
            yield parameter.arg
        shared: list[ast.Global | ast.Nonlocal] = [*self._nodes.of(ast.Global), *self._nodes.of(ast.Nonlocal)]
        for statement in shared:
            yield from statement.names
        imports: list[ast.Import | ast.ImportFrom] = [*self._nodes.of(ast.Import), *self._nodes.of(ast.ImportFrom)]
        for imported in imports:
            yield from (alias.asname or alias.name for alias in imported.names)
        for cls in self._nodes.of(ast.ClassDef):
            yield from (f"{cls.name}.{name}" for name, _ in _constants(cls.body))


def _constants(block: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    for statement in block:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(bool() | None as value)):
                yield name, bool(value)
            case ast.AnnAssign(ast.Name(name), _, ast.Constant(bool() | None as value)):
                yield name, bool(value)
