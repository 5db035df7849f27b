"""What is known at one point of a script: bindings, attributes, module modes, the state of the gradients."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import NamedTuple

from oomfix.script.definitions import Function, Instance
from oomfix.script.trace import Guard, Loop
from oomfix.script.values import NO_ORIGINS, Graph, Value, join


class Binding(NamedTuple):
    """What a path holds, and the loops around the statement that made it (accumulating keeps the first)."""

    value: Value
    loops: tuple[Loop, ...]
    statement: ast.stmt | None


class Names(dict[str, Binding]):
    """Bindings by path; rebinding a name forgets the paths that go through it."""

    __slots__ = ("derived",)

    def __init__(self, bindings: dict[str, Binding] | None = None) -> None:
        super().__init__(bindings or {})
        self.derived: dict[str, set[str]] = {}

    def copied(self) -> Names:
        names = Names(self)
        names.derived = {root: set(paths) for root, paths in self.derived.items()}
        return names

    def bind(self, path: str, binding: Binding) -> None:
        """Bind a path, and forget what was known of paths below it."""
        root = path
        for mark in ".[":
            root = root.split(mark, 1)[0]
        if root == path:
            for below in self.derived.pop(path, ()):
                self.pop(below, None)
        else:
            self.derived.setdefault(root, set()).add(path)
        self[path] = binding


@dataclass
class State:
    """One point on one way through the script."""

    names: Names = field(default_factory=Names)
    attributes: dict[tuple[int, str], Binding] = field(default_factory=dict)
    evaluating: dict[object, bool] = field(default_factory=dict)
    """Modules (by identity or path) that were switched by `eval()` (True) or `train()` (False)."""
    gradients: frozenset[str] = frozenset({"none"})
    """What `.grad` may hold: "none", "plain", "scaled" or "unscaled"."""
    spent: frozenset[int] = NO_ORIGINS
    """Forwards whose graph a backward has freed."""
    grad: Graph = Graph.YES
    """Whether gradients are recorded."""

    def copied(self) -> State:
        """A branch of this state."""
        return State(
            self.names.copied(), dict(self.attributes), dict(self.evaluating), self.gradients, self.spent, self.grad
        )

    def entering(self, names: Names) -> State:
        """The state at the start of a function called here."""
        return State(names, self.attributes, self.evaluating, self.gradients, self.spent, self.grad)

    def leave(self, callee: State) -> None:
        """Take over what a called function changed outside its own names."""
        self.attributes = callee.attributes
        self.evaluating = callee.evaluating
        self.gradients = callee.gradients
        self.spent = callee.spent


def _joined(first: dict, second: dict) -> None:  # type: ignore[type-arg]
    for key, binding in second.items():
        mine = first.get(key)
        if mine is None:
            first[key] = binding
        elif mine is not binding:
            loops = mine.loops if len(mine.loops) <= len(binding.loops) else binding.loops
            first[key] = Binding(join(mine.value, binding.value), loops, binding.statement)


def merge(first: State | None, second: State | None) -> State | None:
    """The state after two branches; None stands for a branch that does not come through."""
    if first is None or first is second:
        return second
    if second is None:
        return first
    _joined(first.names, second.names)
    for root, paths in second.names.derived.items():
        first.names.derived.setdefault(root, set()).update(paths)
    _joined(first.attributes, second.attributes)
    for module, evaluating in second.evaluating.items():
        first.evaluating[module] = first.evaluating.get(module, evaluating) and evaluating
    first.gradients |= second.gradients
    first.spent &= second.spent
    first.grad = first.grad if first.grad == second.grad else Graph.MAYBE
    return first


@dataclass(eq=False)
class Frame:
    """A running function (or the module itself)."""

    function: Function | None
    state: State | None
    closure: Frame | None = None
    caller: Frame | None = None
    call: ast.Call | None = None
    instance: Instance | None = None
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    exits: list[State] = field(default_factory=list)
    globals: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    guards: list[Guard] = field(default_factory=list)
