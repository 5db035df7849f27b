"""Which `DataLoader` a loop goes over: through the names, containers, parameters and functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope_body
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.scopes import Scopes

_LOADERS = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})
_HANDING_ON = frozenset("enumerate tqdm zip track iter".split())
"""What gives the batches of a loader one by one."""
_KEEPING = frozenset("list tuple set sorted cycle tee".split())
_ANY = "*"
"""A key that is computed: any of those that a container has."""
_MOST_KEYS = 3

_Part = tuple[ast.expr, tuple[Any, ...]]
"""A value, and the keys under which a part of it is meant: `(make_loaders(), (0,))`."""


class Loaders:
    """The loaders of a script.

    Where one may be gone over is told by names: it is what an argument is of use for, and decides nothing else.

    Args:
        reading: the file.
        scopes: its variables.
    """

    def __init__(self, reading: Reading, scopes: Scopes) -> None:
        self._script = script = reading.script
        self._scopes = scopes
        self._functions = reading.functions
        self._attributes: dict[str, list[ast.expr]] = {}
        for statement in script.imports.nodes.of(ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Attribute):
                    self._attributes.setdefault(target.attr, []).append(statement.value)

    def of(self, loop: ast.For) -> list[ast.Call]:
        """The calls of `DataLoader` that may make what a loop goes over."""
        return self._behind(loop.iter)

    @cached_property
    def kept(self) -> set[ast.Call]:
        """The calls that make a loader whose batches are all kept somewhere, as by `list(loader)`."""
        found: set[ast.Call] = set()
        for call in self._script.imports.nodes.of(ast.Call):
            if last_name(call) in _KEEPING:
                found.update(*map(self._behind, call.args))
        for clause in self._script.imports.nodes.of(ast.comprehension):
            found.update(self._behind(clause.iter))
        return found

    def _behind(self, node: ast.expr) -> list[ast.Call]:
        """The calls that make the loaders which a value is, or whose batches it gives."""
        found: list[ast.Call] = []
        waiting: list[_Part] = [(node, ())]
        for value, keys in waiting:
            if isinstance(value, ast.Call) and self._script.imports.qualified(value.func) & _LOADERS:
                found.append(value)
            elif len(keys) <= _MOST_KEYS:
                waiting += [part for part in self._values(value, keys) if part not in waiting]
        return list(dict.fromkeys(found))

    def _values(self, node: ast.expr, keys: tuple[Any, ...]) -> Iterator[_Part]:
        """What a value may be, or give the batches of."""
        match node:
            case ast.Name(ctx=ast.Load()):
                variable = self._scopes.variable(node)
                for binding in () if variable is None else variable.bindings:
                    yield from ((value, (*place, *keys)) for value, place in self._bound(binding))
            case ast.Attribute():
                yield from ((value, keys) for value in self._attributes.get(node.attr, ()))
            case ast.Call() if last_name(node) in _HANDING_ON:
                yield from ((argument, ()) for argument in node.args)
            case ast.Call():
                inside = (one for function in self._functions.by(node) for one in nodes_of_scope_body(function))
                yield from ((one.value, keys) for one in inside if isinstance(one, ast.Return) and one.value)
            case ast.IfExp():
                yield from ((node.body, keys), (node.orelse, keys))
            case ast.Subscript():
                yield node.value, (_key(node.slice), *keys)
            case ast.Dict() | ast.Tuple() | ast.List() if keys:
                named = map(_key, node.keys) if isinstance(node, ast.Dict) else range(len(node.elts))
                values = node.values if isinstance(node, ast.Dict) else node.elts
                wanted, *rest = keys
                yield from (
                    (value, tuple(rest))
                    for key, value in zip(named, values, strict=True)
                    if _ANY in (key, wanted) or key == wanted
                )

    def _bound(self, binding: ast.AST) -> Iterator[_Part]:
        """What an assignment binds a name to, or what calls give for a parameter."""
        if isinstance(binding, ast.arg):
            yield from ((value, ()) for value in self._given_for(binding))
        elif (assigned := self._scopes.assigned(binding)) is not None:
            value, place = assigned
            yield value, () if place is None else (place,)

    def _given_for(self, parameter: ast.arg) -> Iterator[ast.expr]:
        function = self._scopes.bound_by(parameter).scope.node
        if not isinstance(function, FunctionNode):
            return
        for call in self._functions.calls_of(function):
            yield from self._functions.bound(call, function).arguments(parameter.arg)


def _key(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else _ANY
