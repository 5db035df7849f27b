"""What is known at one point of a script: bindings, attributes, module modes, the state of the gradients."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from oomfix.script.facts.definitions import Function, Instance
from oomfix.script.facts.trace import Loop
from oomfix.script.facts.values import Graph, Value, join
from oomfix.script.syntax.names import root_of


class Binding(NamedTuple):
    """What a path holds, and the loops around the statement that made it (accumulating keeps the first)."""

    value: Value
    loops: tuple[Loop, ...]
    statement: ast.stmt | None


Key = TypeVar("Key")
Held = TypeVar("Held")
_ABSENT = object()


class Layer(Generic[Key, Held]):
    """A mapping over another one: a branch writes into a layer of its own, at the cost of what it writes."""

    __slots__ = ("_own", "_parent")

    def __init__(self, parent: Layer[Key, Held] | None = None, own: dict[Key, Any] | None = None) -> None:
        self._parent = parent
        self._own: dict[Key, Any] = own if own is not None else {}

    def get(self, key: Key) -> Held | None:
        """What the key holds, or None."""
        layer: Layer[Key, Held] | None = self
        while layer is not None:
            held = layer._own.get(key)
            if held is not None:
                return None if held is _ABSENT else held  # type: ignore[no-any-return]
            layer = layer._parent
        return None

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def __setitem__(self, key: Key, held: Held) -> None:
        self._own[key] = held

    def forget(self, key: Key) -> None:
        """Take a key away, here and in what is read through this layer."""
        self._own[key] = _ABSENT

    def over(self) -> Layer[Key, Held]:
        """A new layer over this one."""
        return type(self)(self)

    def changes_over(self, base: Layer[Key, Held]) -> dict[Key, Any]:
        """What this layer and those below it changed since `base`."""
        changes: dict[Key, Any] = {}
        layer: Layer[Key, Held] | None = self
        while layer is not None and layer is not base:
            changes = layer._own | changes
            layer = layer._parent
        return changes

    def take(self, branches: list[Layer[Key, Held]], joined: Callable[[Held, Held], Held]) -> None:
        """Write into this layer what its branches agree on, and the join of what they do not."""
        changes = [branch.changes_over(self) for branch in branches]
        if not any(changes):
            return
        for key in dict.fromkeys(key for change in changes for key in change):
            result: Any = None
            for change in changes:
                held = change[key] if key in change else self.get(key)
                if held is not None and held is not _ABSENT:
                    result = held if result is None else joined(result, held)
            self._own[key] = _ABSENT if result is None else result


class Names(Layer[str, Binding]):
    """Bindings by path; rebinding a name forgets the paths that go through it."""

    __slots__ = ("_derived",)

    def __init__(self, parent: Names | None = None, own: dict[str, Any] | None = None) -> None:
        super().__init__(parent, own)
        self._derived: dict[str, set[str]] = {}

    def bind(self, path: str, binding: Binding) -> None:
        """Bind a path, and forget what was known of paths below it."""
        root = root_of(path)
        if root == path:
            layer: Any = self
            while layer is not None:
                for below in layer._derived.get(path, ()):
                    self.forget(below)
                layer = layer._parent
        else:
            self._derived.setdefault(root, set()).add(path)
        self[path] = binding

    def entries(self, name: str) -> Iterator[Binding]:
        """What the entries of a name hold that were bound one by one: `batch["loss"]`."""
        return self._below(f"{name}[", name)

    def attributes(self, name: str) -> Iterator[Binding]:
        """What the attributes of a name hold that were bound one by one: `batch.loss`."""
        return self._below(f"{name}.", name)

    def _below(self, beginning: str, name: str) -> Iterator[Binding]:
        layer: Any = self
        while layer is not None:
            for below in layer._derived.get(name, ()):
                if below.startswith(beginning) and (binding := self.get(below)) is not None:
                    yield binding
            layer = layer._parent

    def take(self, branches: list[Layer[str, Binding]], joined: Callable[[Binding, Binding], Binding]) -> None:
        super().take(branches, joined)
        for branch in branches:
            layer: Any = branch
            while layer is not None and layer is not self:
                for root, paths in layer._derived.items():
                    self._derived.setdefault(root, set()).update(paths)
                layer = layer._parent


@dataclass(eq=False)
class State:
    """One point on one way through the script."""

    names: Names = field(default_factory=Names)
    attributes: Layer[tuple[int, str], Binding] = field(default_factory=Layer)
    evaluating: Layer[object, bool] = field(default_factory=Layer)
    """Modules (by identity or path) that were switched by `eval()` (True) or `train()` (False)."""
    frozen: Layer[object, bool] = field(default_factory=Layer)
    """Networks whose parameters were all frozen (True) or thawed (False)."""
    gradients: frozenset[str] = frozenset({"none"})
    """What `.grad` may hold: "none", "plain", "scaled" or "unscaled"."""
    scaled_when: frozenset[tuple[str, bool]] = frozenset()
    """Tests, as written, and how they came out wherever `.grad` was scaled (`scaler is not None`)."""
    grad: Graph = Graph.YES
    """Whether gradients are recorded."""

    def branch(self) -> State:
        """A way that starts here; what it changes stays its own until `after` takes it."""
        names = self.names.over()
        assert isinstance(names, Names)
        layers = self.attributes.over(), self.evaluating.over(), self.frozen.over()
        return State(names, *layers, self.gradients, self.scaled_when, self.grad)

    def after(self, ends: list[State | None]) -> State | None:
        """This state when the ways that started here have ended; None where none of them comes through."""
        through = [end for end in ends if end is not None]
        if not through:
            return None
        self.names.take([end.names for end in through], _joined_bindings)
        self.attributes.take([end.attributes for end in through], _joined_bindings)
        self.evaluating.take([end.evaluating for end in through], _both)
        self.frozen.take([end.frozen for end in through], _both)
        self.gradients = frozenset().union(*(end.gradients for end in through))
        scaled = [end.scaled_when for end in through if "scaled" in end.gradients]
        self.scaled_when = frozenset.intersection(*scaled) if scaled else frozenset()
        grads = {end.grad for end in through}
        self.grad = grads.pop() if len(grads) == 1 else Graph.MAYBE
        return self

    def entering(self, names: Names) -> State:
        """The state at the start of a function called here."""
        return State(names, self.attributes, self.evaluating, self.frozen, self.gradients, self.scaled_when, self.grad)

    def leave(self, callee: State) -> None:
        """Take over what a called function changed outside its own names."""
        self.gradients = callee.gradients
        self.scaled_when = callee.scaled_when

    def take_side(self, test: ast.expr, value: bool) -> None:
        """Gradients that are scaled only where a test comes out one way are not where it comes out the other."""
        if self.scaled_when and "scaled" in self.gradients and (as_test(test, not value) in self.scaled_when):
            self.gradients = (self.gradients - {"scaled"}) or frozenset({"plain"})


def as_test(test: ast.expr, value: bool) -> tuple[str, bool]:
    """A test and how it came out, alike for `x`, `not x` and comparisons with None."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, value = test.operand, not value
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        if isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None:
            return ast.unparse(test.left), value is isinstance(test.ops[0], ast.IsNot)
    return ast.unparse(test), value


def _joined_bindings(first: Binding, second: Binding) -> Binding:
    if first is second:
        return first
    loops = first.loops if len(first.loops) <= len(second.loops) else second.loops
    return Binding(join(first.value, second.value), loops, second.statement)


def _both(first: bool, second: bool) -> bool:
    return first and second


class Side(NamedTuple):
    """What the names and attributes hold that one side of a decision has bound."""

    asked: list[Binding | None]
    """The bindings that the test asks."""
    held: dict[str | tuple[int, str], tuple[Binding | None, Binding]]
    """Each with what it holds after both sides, and what it held at the end of this one."""


@dataclass(eq=False)
class Frame:
    """A running function (or the module itself)."""

    function: Function | None
    state: State | None
    closure: Frame | None = None
    caller: Frame | None = None
    call: ast.Call | None = None
    given: tuple[tuple[ast.expr, Value], ...] = ()
    """The arguments as they are written in the call, and what they are."""
    instance: Instance | None = None
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    exits: list[State] = field(default_factory=list)
    globals: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    sides: dict[tuple[str, bool], Side] = field(default_factory=dict)
    """By the test as it is written, and how it came out."""
