"""What calls of a file's functions leave behind; whether they train, draw random numbers or fetch batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.collectives import is_collective
from oomfix.rewrite.dataflow.effects import draws_random_numbers, fetches, is_drawing
from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad, trains
from oomfix.rewrite.dataflow.records import Records
from oomfix.rewrite.dataflow.shared_tensors import are_changed_in_place
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import is_remark, walk
from oomfix.script.syntax.parameters import name_of_object
from oomfix.script.syntax.patterns import Pattern

_MOST_ATTRIBUTES = 48  # the runtime takes objects with many more for data, and does not look for state in them
_LOADER = Pattern(r"loader\w*$", re.IGNORECASE)


class Effect(NamedTuple):
    """What calling functions of the file leaves behind.

    Attributes:
        told: in words.
        may_be_put_back: it is in attributes of the object whose method is called, and in plain containers there. The
            runtime finds such state, puts it back where a call starts again, and then runs batches whole.
        is_own: it is all in the object whose method is called.
    """

    told: str
    may_be_put_back: bool
    is_own: bool


class _Attributes(NamedTuple):
    """The attributes that a class assigns to its objects, and those of them that only ever hold plain containers."""

    names: set[str]
    plain_containers: set[str]


class Helpers:
    """The functions of a file by name, and whether calling one changes anything that outlives the call.

    Args:
        reading: the file.
        forwards: the calls that run a network. What they give is new each time: `net(x).cuda()` changes nothing else,
            whatever a method of that name does in a class of the file.

    Attributes:
        functions: the functions of the file.
    """

    def __init__(self, reading: Reading, forwards: Set[ast.AST]) -> None:
        nodes = reading.script.imports.nodes
        self._forwards = forwards
        self.functions, self._calls = reading.functions, reading.calls_run
        self._records = Records(self.functions, nodes)
        self._attributes: dict[int, _Attributes] = {}
        for owner in nodes.of(ast.ClassDef):
            values = _attributes_of(owner)
            plain = {name for name, given in values.items() if all(map(_is_plain_container, given))}
            if len(values) <= _MOST_ATTRIBUTES:
                known = _Attributes(set(values), plain)
                self._attributes.update((id(method), known) for method in owner.body)
        self._methods_of_plain_classes = {
            id(method)
            for owner in nodes.of(ast.ClassDef)
            if all(path_of(base) == "object" for base in owner.bases)
            for method in owner.body
        }
        self._known: dict[int, Effect | None] = {}

    def changed_paths(self, statement: ast.stmt) -> set[str]:
        """The access paths of what a statement may change, itself or by a function of the file that adds to it."""
        return changed_paths(statement) | self._records.added_to(statement)

    def records(self, node: ast.AST) -> set[str]:
        """The names of lists that functions of the file add to when a node runs."""
        return self._records.added_to(node)

    def draw_random_numbers(self, node: ast.AST) -> bool:
        """Whether a node is seen to draw random numbers, itself or in a function of the file."""
        return any(map(draws_random_numbers, self._calls.by(node)))

    def draw_from_torch(self, node: ast.AST) -> bool:
        """Whether a node is seen to draw random numbers other than from Python's or NumPy's generators."""
        drawing = (call for call in self._calls.by(node) if is_drawing(call))
        return any((path_of(call.func) or "").split(".")[0] not in ("random", "np", "numpy") for call in drawing)

    def call_plain_objects(self, node: ast.AST) -> bool:
        """Whether all functions of the file that a node itself calls are methods of classes without a base class."""
        called = (function for call in calls_in(node) for function in self.functions.by(call))
        return all(id(function) in self._methods_of_plain_classes for function in called)

    def train(self, node: ast.AST) -> bool:
        """Whether a node is seen to run a backward or a step, itself or in a function of the file."""
        return any(map(trains, self._calls.by(node)))

    def meet_other_processes(self, node: ast.AST) -> bool:
        """Whether a node is seen to wait for other processes, itself or in a function of the file."""
        return any(map(is_collective, self._calls.by(node)))

    def reset_gradients(self, node: ast.AST) -> bool:
        """Whether a node calls a function of the file that resets gradients."""
        return any(last_name(call) == "zero_grad" for call in self._calls.in_functions(list(calls_in(node))))

    def read_gradients(self, node: ast.AST) -> bool:
        """Whether a node clips, reads or adds to gradients, itself or in a function of the file."""
        return reads_gradients(node) or any(map(reads_gradients, self.functions.run_by(node)))

    def only_reset_gradients(self, statement: ast.stmt) -> bool:
        """Whether a statement resets gradients, itself or by a function of the file, and does nothing else."""
        if is_zero_grad(statement):
            return True
        call = statement.value if isinstance(statement, ast.Expr) else None
        function = self.functions.certain(call) if isinstance(call, ast.Call) else None
        if function is None or isinstance(function, ast.Lambda):
            return False
        done = [one for one in function.body if not is_remark(one)]
        return bool(done) and all(map(is_zero_grad, done))

    def fetch(self, node: ast.AST) -> bool:
        """Whether a node fetches a batch, itself or in a function of the file."""
        return fetches(node) or any(map(_goes_on, self._calls.in_functions(list(calls_in(node)))))

    def change_in_place(self, names: set[str], statements: list[ast.stmt], ahead: list[ast.stmt]) -> bool:
        """Whether statements may change tensors in place that names stand for, by names that those ahead gave them."""
        return are_changed_in_place(names, statements, self.functions, ahead)

    def lasting_effect(self, node: ast.AST) -> Effect | None:
        """What a call of the file's own functions leaves behind; None where nothing can be seen."""
        return _worst(self._effects(node, None))

    def _effects(self, node: ast.AST, caller: str | None) -> Iterator[Effect]:
        for call in calls_in(node):
            for function in self.functions.by(call):
                effect = self._effect_of(function)
                receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
                if effect is not None and not (effect.is_own and receiver in self._forwards):
                    owner = path_of(receiver) if receiver is not None else None
                    direct = owner is not None and (owner == caller if caller else owner.isidentifier())
                    own = effect.is_own and owner is not None and owner == caller
                    yield effect._replace(may_be_put_back=effect.may_be_put_back and direct, is_own=own)

    def _effect_of(self, function: FunctionNode) -> Effect | None:
        if id(function) in self._known:
            return self._known[id(function)]
        self._known[id(function)] = None
        own = name_of_object(function.args)
        known = self._attributes.get(id(function), _Attributes(set(), set()))
        found = [effect for statement in function.body for effect in _own_effects(statement, function.name, own, known)]
        found += [effect for statement in function.body for effect in self._effects(statement, own or "")]
        self._known[id(function)] = _worst(found)
        return self._known[id(function)]


def _goes_on(call: ast.Call) -> bool:
    """`next(batches)`, `next(iter(loader))`, but not `next(net.parameters())`, or the first of a list."""
    if path_of(call.func) != "next" or not call.args:
        return False
    source = call.args[0]
    if isinstance(source, ast.Call) and path_of(source.func) == "iter" and source.args:
        return bool(_LOADER.search(path_of(source.args[0]) or ""))
    return path_of(source) is not None


def _worst(effects: Iterable[Effect]) -> Effect | None:
    return min(effects, key=lambda effect: (effect.is_own, effect.may_be_put_back), default=None)


def _own_effects(statement: ast.stmt, function: str, own: str | None, known: _Attributes) -> Iterator[Effect]:
    """What a statement of a function changes that outlives its call.

    Args:
        own: the name of the object that it is a method of.
        known: its attributes, none where the runtime does not look for state in it.
    """
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield Effect(f"`{function}` writes {', '.join(node.names)} outside of it", False, False)
        elif isinstance(node, ast.AugAssign) and "." in (path_of(node.target) or ""):
            path = path_of(node.target) or ""
            owner, _, name = path.rpartition(".")
            yield Effect(f"`{function}` counts in {path}", owner == own and name in known.names, owner == own)
    if own is None:
        return
    kept = sorted(path for path in changed_paths(statement) if path.startswith(f"{own}."))
    if kept:
        names = {path.removeprefix(f"{own}.") for path in kept}
        yield Effect(f"`{function}` changes {kept[0]}", names <= known.plain_containers, True)


def _attributes_of(owner: ast.ClassDef) -> dict[str, list[ast.expr]]:
    """What a class assigns to each attribute of its objects."""
    values: dict[str, list[ast.expr]] = {}
    for node in walk(owner):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                elements = target.elts if isinstance(target, ast.Tuple) else [target]
                for element in elements:
                    if isinstance(element, ast.Attribute) and path_of(element.value) == "self":
                        values.setdefault(element.attr, []).append(node.value)
    return values


def _is_plain_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("list", "dict", "set")
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
