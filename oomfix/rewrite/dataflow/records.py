"""What a function adds to and did not make, lists and sums: each part of a batch would add to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.bindings import bindings_of
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import object_changed
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, names_bound_by_target, nodes_of_scope
from oomfix.script.syntax.nodes import Nodes, arguments_of
from oomfix.script.syntax.parameters import name_of_object

_ADDING = frozenset({"append", "appendleft", "extend", "insert", "update", "add"})
_CONTAINERS = frozenset({"dict", "list", "defaultdict", "Counter", "OrderedDict", "deque"})
_ONLY_READING = frozenset("torch torchvision numpy math random collections itertools functools typing json".split())
"""Packages whose functions add to nothing that they are given."""


class Records:
    """Which lists, sums and meters the calls of a node add to.

    The runtime takes what only grows for a record of what went by, not for state.

    A function of another file is not seen to add to anything; but what is made empty and given to one in a loss is
    there to be filled: `calc_loss(outputs, labels, metrics)`.

    Args:
        functions: those of the file.
        nodes: all nodes of the file.
    """

    def __init__(self, functions: FunctionsCalled, nodes: Nodes) -> None:
        self._functions = functions
        self._made_empty = _made_empty(nodes)
        self._imported = _imported(nodes) if self._made_empty else set()
        self._known: dict[int, set[str]] = {}

    def added_to(self, node: ast.AST) -> set[str]:
        """The names, where a node stands, of what the functions called there add to."""
        found: set[str] = set()
        for call in calls_in(node):
            if functions := self._functions.by(call):
                found.update(name for function in functions for name in self._as_given(call, function))
            elif object_changed(call.func).split(".")[0] in self._imported:
                given = arguments_of(call)
                found.update(one.id for one in given if isinstance(one, ast.Name) and one.id in self._made_empty)
        return found

    def _as_given(self, call: ast.Call, function: FunctionNode) -> Iterator[str]:
        added, bound = self._added_by(function), self._functions.bound(call, function)
        yield from added.difference(parameter.arg for parameter, _ in bound.all)
        for parameter, value in bound.all:
            if parameter.arg in added and (root := object_changed(value).split(".")[0]):
                yield root

    def _added_by(self, function: FunctionNode) -> set[str]:
        """The names of a function for what it adds to: its parameters, and those of scopes around it."""
        if id(function) not in self._known:
            self._known[id(function)] = set()
            nodes = list(nodes_of_scope(*function.body))
            calls = (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            direct = (call.func for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING)
            found = {object_changed(method.value).split(".")[0] for method in direct}
            sums = (node.target for node in nodes if isinstance(node, ast.AugAssign))
            found |= {object_changed(item).split(".")[0] for item in sums if isinstance(item, ast.Subscript)}
            found |= _only_written(nodes)
            found |= {name for statement in function.body for name in self.added_to(statement)}
            made = names_bound(*function.body)
            self._known[id(function)] = found - made - {name_of_object(function.args), ""}
        return self._known[id(function)]


def _only_written(nodes: list[ast.AST]) -> set[str]:
    """The names of what only items are put into, under names of their own: `logs["loss"] = loss.item()`."""
    stores = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    named = [
        node.value for node in stores if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    ]
    written = {id(name) for name in named}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in written}
    return {name.id for name in named if isinstance(name, ast.Name)} - read


def _made_empty(nodes: Nodes) -> set[str]:
    """The names that are only ever bound to empty containers: `metrics = defaultdict(float)`."""
    empty: set[str] = set()
    other: set[str] = set()
    for target, value in bindings_of(nodes):
        (empty if _is_empty(value) else other).update(names_bound_by_target(target))
    return empty - other


def _is_empty(value: ast.expr) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(ast.Name("defaultdict") | ast.Attribute(attr="defaultdict")):
            return True
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), [], []):
            return name in _CONTAINERS
    return False


def _imported(nodes: Nodes) -> set[str]:
    """The names of what is imported from packages that may add to what they are given."""
    given = [(node.module or "", alias) for node in nodes.of(ast.ImportFrom) for alias in node.names]
    given += [(alias.name, alias) for node in nodes.of(ast.Import) for alias in node.names]
    kept = (alias for package, alias in given if package.split(".")[0] not in _ONLY_READING)
    return {alias.asname or alias.name.split(".")[0] for alias in kept}
