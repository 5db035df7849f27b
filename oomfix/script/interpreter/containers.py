"""Following what is put into lists, dicts and sets."""

from __future__ import annotations

import ast
import re
from functools import reduce

from oomfix.script.facts import torch_facts
from oomfix.script.facts.named_like import looks_like_logging, looks_like_loss, looks_like_metric
from oomfix.script.facts.trace import Loop
from oomfix.script.facts.values import (
    MISSING,
    MIXED,
    NONE,
    NUMBER,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    combine,
    each_of,
    entry_of,
    flatten,
    holds_called_alone,
    join,
    may_take_called,
    with_called,
    with_row,
)
from oomfix.script.interpreter.contexts_by_hand import ContextsByHand
from oomfix.script.syntax.names import last_name, last_of, left_by_methods, path_of
from oomfix.script.syntax.patterns import Pattern

STORING = frozenset(
    ["append", "add", "push", "store", "put", "insert", "remember", "record", "extend", "appendleft", "update"]
)
"""Methods that put their argument into the object."""


_LIST_CLASS = Pattern(r"List|Dict|Deque|Queue")

_REPLAY = Pattern(r"buffer|replay", re.IGNORECASE)
"""Names of what holds numbers for later updates."""


class Containers(ContextsByHand):
    """Keeps track of what a container holds, and of what is kept in it beyond an iteration."""

    def element(self, value: Value) -> Value:
        """What iterating over a value gives."""
        if value.items and value.kind is Kind.CONTAINER:
            return NUMBER  # the keys of a dict of networks
        if value.items:
            return reduce(join, value.items)
        if value.rows:
            return Value(Kind.SEQUENCE, items=value.rows)
        if value.graph:
            return Value(
                Kind.TENSOR, value.graph, value.origins, divisors=value.divisors, carried_from=value.carried_from
            )
        return value if torch_facts.holds_networks(value) else UNKNOWN

    def _container_method(self, node: ast.Call, receiver: Value, name: str, given: list[Value]) -> Value:
        assert isinstance(node.func, ast.Attribute)
        if name in STORING and node.args:
            self._put(node, node.func.value, receiver, given)
            return NONE
        if name == "values" and receiver.items:
            return Value(Kind.SEQUENCE, items=receiver.items)
        if (
            name in ("get", "pop")
            and receiver.items
            and given
            and (receiver.kind is Kind.CONTAINER or receiver.entries)
        ):
            return entry_of(receiver, given[0])
        if name in ("copy", "values", "keys", "union"):
            return receiver
        if name == "items" and (receiver.graph or receiver.items):
            held = each_of(receiver) if receiver.items else Value(Kind.TENSOR, receiver.graph, receiver.origins)
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=(NUMBER, held)),))
        if name == "clear":
            self._change(node.func.value, Value(Kind.CONTAINER), self.statement, self.loops)
            return NONE
        if receiver.graph:
            return self.element(receiver) if name in ("pop", "popleft", "get") else flatten(receiver)
        return UNKNOWN

    def _put(self, node: ast.Call, target: ast.expr, receiver: Value, given: list[Value]) -> None:
        content = combine(given)
        binding = self.binding_of(target)
        if not content.graph:
            if binding is not None and len(given) == 1 and may_take_called(receiver, given[0]):
                held = with_called(receiver, given[0], Kind.SEQUENCE)
                self._change(target, held, binding.statement, binding.loops)
            elif binding is not None and (_lists_constants(receiver) or holds_called_alone(receiver)):
                self.assign(target, Value(Kind.CONTAINER, ref=MIXED), binding.statement, binding.loops)
            return
        loops = binding.loops if binding is not None else self._loops_of_root(target)
        value = given[len(node.args) - 1]
        kept = self.keep(node, path_of(target) or ast.unparse(target), node.args[-1], value, "store", loops)
        if ast.unparse(target).startswith("self."):
            for forward in self.trace.forwards_of(content.origins):
                forward.stored = True
        base = flatten(receiver)
        rows = with_row(base, value, kept) if last_of(path_of(node.func)) == "append" else ()
        origins = base.origins | content.origins | kept
        grown = Value(Kind.CONTAINER, max(base.graph, content.graph), origins, rows=rows)
        if path_of(target) is not None:
            self._change(target, grown, binding.statement if binding else None, loops)
        elif isinstance(target, ast.Subscript | ast.Call):
            self._grow_root(target, grown)

    def _change(self, target: ast.expr, held: Value, statement: ast.stmt | None, loops: tuple[Loop, ...]) -> None:
        """What a container holds from here on, also for the function that made it: `saved.append(x)` of a global."""
        if isinstance(target, ast.Name):
            self.bind(target.id, held, loops, statement, in_place=True)
        else:
            self.assign(target, held, statement, loops)

    def _loops_of_root(self, target: ast.expr) -> tuple[Loop, ...]:
        """The loops around the making of what an attribute or entry belongs to."""
        while isinstance(target, ast.Attribute | ast.Subscript | ast.Call):
            target = target.func if isinstance(target, ast.Call) else target.value
            if (binding := self.binding_of(target)) is not None:
                return binding.loops
        return ()

    def _grow_root(self, target: ast.Subscript | ast.Call, content: Value) -> None:
        """`lists[name].append(x)`, `lists.setdefault(name, []).append(x)`: what `lists` holds carries the graph too."""
        root: ast.expr = target
        while isinstance(root, ast.Subscript) or (isinstance(root, ast.Call) and last_name(root) == "setdefault"):
            held = root.func if isinstance(root, ast.Call) else root
            assert isinstance(held, ast.Attribute | ast.Subscript)
            root = held.value
        binding = self.binding_of(root)
        if binding is not None and path_of(root) is not None:
            base = flatten(binding.value)
            grown = Value(Kind.CONTAINER, max(base.graph, content.graph), base.origins | content.origins)
            self._change(root, grown, binding.statement, binding.loops)

    def is_perhaps_for_a_log(self, held: ast.expr, key: str) -> bool:
        """`outputs["accuracy"]`, and `state["loss"]` of `loss, state = net(x)`, may be numbers, or have no graph."""
        binding = self.binding_of(held)
        statement = binding.statement if binding is not None else None
        beside = isinstance(statement, ast.Assign) and any(isinstance(one, ast.Tuple) for one in statement.targets)
        is_of_a_log = beside and looks_like_loss(key) and not looks_like_loss(path_of(held) or "")
        return looks_like_metric(key) or is_of_a_log

    def part_of_tensor(self, target: ast.Subscript) -> ast.Subscript:
        """`context[j]` of `context[j][0] = row`, where `context` is one tensor: the row goes into that."""
        while isinstance(target.value, ast.Subscript):
            whole = self.evaluate(target.value.value)
            if whole.kind is not Kind.TENSOR or not whole.is_tensor:
                break
            target = target.value
        return target

    def _store_unknown(self, node: ast.Call, receiver: Value, name: str, given: list[Value]) -> Value:
        assert isinstance(node.func, ast.Attribute)
        if name in ("append", "extend", "appendleft", "insert") and node.args and not self._is_object(node.func.value):
            self._put(node, node.func.value, receiver, given)
        else:
            content = combine(given)
            if not looks_like_metric(path_of(node.func.value) or ""):
                self.trace.let_escape(content.origins)
            self._leave_on(node, content)
        return NONE

    def _takes_entries(self, node: ast.Call, receiver: Value, given: list[Value]) -> bool:
        """`batch.update(net(x))`: what is no object of its own holds what another dict does."""
        content = flatten(given[0]) if len(given) == len(node.args) == 1 else UNKNOWN
        holder = node.func.value if isinstance(node.func, ast.Attribute) else None
        binding = self.binding_of(holder) if holder is not None else None
        known = receiver.kind is Kind.TENSOR and bool(receiver.graph) and not receiver.is_tensor
        if not (known or receiver.kind is Kind.UNKNOWN) or not content.graph or content.is_tensor:
            return False
        if holder is None or binding is None or not self.is_for_effect(node):
            return False
        if looks_like_metric(path_of(holder) or ""):
            return False
        graph = max(receiver.graph, content.graph) if known else Graph.MAYBE
        held = Value(receiver.kind, graph, receiver.origins | content.origins)
        self._change(holder, held, binding.statement, binding.loops)
        return True

    def _is_object(self, target: ast.expr) -> bool:
        """Whether something is of a class out of sight, which keeps what it likes: `meters = {"loss": Meter()}`."""
        if not isinstance(target, ast.Subscript):
            made = self._assigned(target)
            if not isinstance(made, ast.Subscript):
                return made is not None and _is_instance(made)
            target = made
        made = self._assigned(target.value)
        return isinstance(made, ast.Dict) and bool(made.values) and all(map(_is_instance, made.values))

    def _assigned(self, target: ast.expr) -> ast.expr | None:
        binding = self.binding_of(target)
        return binding.statement.value if binding is not None and isinstance(binding.statement, ast.Assign) else None

    def _leave_on(self, node: ast.Call, content: Value) -> None:
        """`terms.add(outputs, y)`: what a method of an object out of sight is given, the object may make a loss of."""
        if isinstance(node.func, ast.Attribute):
            self._leave_on_object(node.func.value, content)

    def _leave_on_object(self, holder: ast.expr, content: Value) -> None:
        owner = path_of(holder)
        if not content.graph or owner is None or owner == "self" or looks_like_logging(owner) or _REPLAY.search(owner):
            return
        before = self.binding_of(left_by_methods(holder))
        origins = content.origins if before is None else content.origins | before.value.origins
        self.assign(left_by_methods(holder), Value(Kind.TENSOR, Graph.MAYBE, origins), self.statement)

    def _left_on(self, node: ast.Call) -> Value:
        """What was given before to the object whose method is called."""
        place = left_by_methods(node.func.value) if isinstance(node.func, ast.Attribute) else None
        binding = self.binding_of(place) if place is not None else None
        return UNKNOWN if binding is None else binding.value


def _is_instance(node: ast.expr) -> bool:
    """`Meter()`, but not `UserList()`; a class is known by its capital, where only the name is in sight."""
    name = last_of(path_of(node.func)) if isinstance(node, ast.Call) else ""
    return name[:1].isupper() and not _LIST_CLASS.search(name)


def _lists_constants(value: Value) -> bool:
    """`["train", "val"]`, all of which is known as long as nothing is added."""
    return bool(value.items) and all(item.constant is not MISSING for item in value.items or ())
