"""The ground of following a script: frames, names, and where an event happens."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator

from oomfix.script.facts.definitions import Function, Instance
from oomfix.script.facts.hints import Hints, scoped
from oomfix.script.facts.named_like import looks_like_module, looks_like_record
from oomfix.script.facts.torch_facts import holds_networks
from oomfix.script.facts.trace import (
    Autocast,
    Event,
    Guard,
    Keep,
    Loop,
    Manner,
    ModuleAttribute,
    Site,
    Trace,
    exclude_each_other,
)
from oomfix.script.facts.values import NO_ORIGINS, PLAIN_TENSOR, UNKNOWN, Graph, Kind, Value, flatten
from oomfix.script.interpreter.contexts import autocast_under, grad_under
from oomfix.script.interpreter.state import Binding, Frame, State
from oomfix.script.syntax.names import path_of, root_of
from oomfix.script.syntax.nodes import Scope

Path = str | tuple[int, str]
"""What is bound: a name or access path, or an attribute of an object by the object's number."""


class Core(ABC):
    """Names and events of the frame that is being followed."""

    def __init__(self, module_frame: Frame, trace: Trace, hints: Hints) -> None:
        self.module_frame = module_frame
        self.frame = module_frame
        self.trace = trace
        self.hints = hints
        self.bound: list[Path] = []
        """Everything that was bound, in order: a loop asks what its round has bound."""
        self.scopes: list[Loop | Guard] = []
        self.loops: tuple[Loop, ...] = ()
        self.runs: tuple[int, ...] = ()
        self.way: tuple[Hashable, ...] = ()
        self.autocast: Autocast | None = None
        self.apex = False
        self.outside: dict[str, tuple[Graph, Autocast | None, bool]] = {}
        """By the path of a context entered by hand: gradients, autocast and apex as they were before."""
        self.handling_exception = False
        self.rounds: tuple[int, ...] = ()
        self.enclosing_forward: int | None = None
        """The forward whose module's own code is being followed: what it calls is part of it."""
        self.enclosing_depth = 1 << 30
        """The loops around that forward: what the module collects in loops of its own goes with the forward."""
        self.parts_record: set[Graph] = set()
        self.unseen_parts_record: set[Graph] = set()
        """Whether gradients were recorded where the enclosing forward ran the parts of its network."""
        self.frozen_elements: set[str] = set()
        """Names of networks that were frozen one by one, in a loop over several of them."""
        self.left_by_constructor: dict[object, bool] = {}
        """The networks that the constructor of the object at hand has switched to `eval()` (True) or `train()`."""
        self.ran: set[Function] = set()
        """The methods of networks that are called somewhere, followed or not."""
        self.functions: list[Function] = []
        """The functions of the file that were defined so far."""
        self.statement: ast.stmt | None = None

    @property
    def state(self) -> State:
        """The state at this point."""
        assert self.frame.state is not None
        return self.frame.state

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value:
        """What an expression gives at this point (`Expressions`)."""

    @abstractmethod
    def attribute_of(self, base: Value, node: ast.Attribute) -> Value:
        """What an attribute of a value is, as written in `node` (`Expressions`)."""

    @abstractmethod
    def context_of(self, node: ast.expr, value: Value) -> Value:
        """The context that an expression stands for, made out of sight or here; `value` as it is (`Entering`)."""

    @abstractmethod
    def run(self, frame: Frame, function: Function, call: ast.expr | None) -> Value:
        """Run a function's body in its frame; what it returns (`Follower`)."""

    # Names

    def holder(self, root: str) -> Frame | None:
        """The frame in which a name is bound, seen from here."""
        frame: Frame | None = self.frame
        if root in self.frame.globals:
            frame = self.module_frame
        while frame is not None:
            if frame.state is not None and root in frame.state.names:
                return frame
            frame = frame.closure
        return None

    def lookup(self, path: str) -> Binding | None:
        """What a path is bound to, seen from here."""
        state = self.frame.state
        assert state is not None
        binding = state.names.get(path)
        if binding is not None:
            return binding
        root = root_of(path)
        if root != path:
            holder = self.holder(root)
            return holder.state.names.get(path) if holder is not None and holder.state is not None else None
        frame = self.module_frame if path in self.frame.globals else self.frame.closure
        while frame is not None:
            if frame.state is not None and (binding := frame.state.names.get(path)) is not None:
                return binding
            frame = frame.closure
        return None

    def note_read(self, value: Value) -> None:
        """A value is read by its name: what is made of it here carries its graph on."""
        if not value.graph or self.state.grad is Graph.NO:
            return
        function = self.frame.function
        for node in (*self.loops, *([] if function is None else [function.node])):
            self.trace.read_in.setdefault(node, set()).update(value.origins)

    def binding_of(self, node: ast.expr) -> Binding | None:
        """What a target (a name, an attribute, an entry) is bound to."""
        if isinstance(node, ast.Attribute):
            slot = self.slot_of(node)
            if slot is not None:
                return self.state.attributes.get(slot)
        path = path_of(node)
        return None if path is None else self.lookup(path)

    def is_for_effect(self, node: ast.Call) -> bool:
        """Whether a call is a statement of its own."""
        return isinstance(self.statement, ast.Expr) and self.statement.value is node

    def instance_of(self, value: Value) -> Instance | None:
        """The object behind a value, when its class is in the file."""
        return value.ref if isinstance(value.ref, Instance) else None

    def bind(
        self,
        path: str,
        value: Value,
        loops: tuple[Loop, ...],
        statement: ast.stmt | None,
        in_place: bool = False,
    ) -> None:
        """Bind a path in the frame its root belongs to; a list that grows `in_place` stays where it was made."""
        root = root_of(path)
        frame = self.frame
        if root in self.frame.globals:
            frame = self.module_frame
        elif in_place or root in self.frame.outer or root != path:
            frame = self.holder(root) or self.frame
        if frame.state is None:
            return
        if value.kind is Kind.MODULE and len(path) > 2:
            # What is a network under this name here is one where a parameter has the same name.
            self.hints.modules.add(path)
        elif value.kind is Kind.LOSS:
            self.hints.losses.add(path)
        self.bound.append(path)
        frame.state.names.bind(path, Binding(value, loops, statement))

    def slot_of(self, node: ast.Attribute) -> tuple[int, str] | None:
        """The object of the file that an attribute belongs to, and its name there.

        `self.buffer.rewards`, of a buffer out of sight, is one of `self`: every method sees the same.
        """
        name, owner = node.attr, node.value
        value = self.evaluate(owner)
        while (instance := self.instance_of(value)) is None:
            if not isinstance(owner, ast.Attribute):
                return None
            name, owner = f"{owner.attr}.{name}", owner.value
            value = self.evaluate(owner)
        return instance.number, name

    def assign(
        self, target: ast.expr, value: Value, statement: ast.stmt | None, loops: tuple[Loop, ...] | None = None
    ) -> None:
        """Bind what a target names to a value."""
        loops = self.loops if loops is None else loops
        if isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value, statement, loops)
        elif isinstance(target, ast.Starred):
            content = flatten(value)
            self.assign(target.value, Value(Kind.CONTAINER, content.graph, content.origins), statement, loops)
        else:
            self._assign_path(target, value, statement, loops)

    def _assign_path(self, target: ast.expr, value: Value, statement: ast.stmt | None, loops: tuple[Loop, ...]) -> None:
        path = path_of(target)
        value = self._as_backpropagated(path, value)
        if path is not None and value.origins and scoped(path, self._scope) in self.hints.terms:
            self.trace.judged.add(value.origins)
        if isinstance(target, ast.Attribute):
            slot = self.slot_of(target)
            if slot is not None:
                self.bound.append(slot)
                self.state.attributes[slot] = Binding(value, loops, statement)
                self._note_module_attribute(target, value, statement)
                return
        if path is not None:
            self.bind(path, value, loops, statement)

    def _note_module_attribute(self, target: ast.Attribute, value: Value, statement: ast.stmt | None) -> None:
        if self.enclosing_forward is None or not isinstance(statement, ast.Assign):
            return
        if flatten(value).graph is Graph.YES:
            alone = statement.targets == [target]
            self.trace.module_attributes[target] = ModuleAttribute(
                target,
                target.attr,
                detachable=statement.value if alone and value.is_tensor else None,
                shared=len(statement.targets) > 1,
            )

    def _as_backpropagated(self, path: str | None, value: Value) -> Value:
        """A name on which a backward runs holds a graph, even where its maker is out of sight."""
        known = value.graph is Graph.YES or value.kind not in (Kind.UNKNOWN, Kind.TENSOR)
        if known or path is None or self.state.grad is not Graph.YES:
            return value
        if not self._is_backwarded(path) or self._is_made_of_itself(path) or self.is_bound_anew(path):
            return value
        if value.kind is Kind.TENSOR and value.graph is Graph.NO:
            return value
        return Value(
            Kind.TENSOR,
            Graph.YES,
            value.origins or self.unseen_forward(path),
            is_tensor=True,
            divisors=value.divisors,
            scaled=value.scaled,
            carried_from=value.carried_from,
        )

    def _is_made_of_itself(self, path: str) -> bool:
        """`loss = scalar(loss)`, which may stand behind the backward and make a number of it."""
        match self.statement:
            case ast.Assign(value=ast.Call(args=arguments)):
                return path in map(path_of, arguments)
        return False

    def is_bound_anew(self, path: str | None) -> bool:
        """`loss = meter.average`, behind the last backward on what this round has bound the name to."""
        binding = self.lookup(path) if path is not None else None
        if path is None or binding is None or not binding.value.origins:
            return False
        last = self.hints.last_backward.get(scoped(path, self._scope))
        if last is None or self.statement is None or self.statement.lineno <= last:
            return False
        here = self.site()
        return any(
            (backward.origins | backward.unseen) & binding.value.origins
            and backward.site.loops == binding.loops
            and backward.site.shares_round(here)
            and not exclude_each_other(backward.site.guards, here.guards)
            for backward in self.trace.backwards
        )

    def _is_backwarded(self, path: str) -> bool:
        """Whether a backward runs on a name of this function, or on what it is summed into."""
        return scoped(path, self._scope) in self.hints.backwarded

    def is_made_to_be_backpropagated(self) -> bool:
        """Whether this statement assigns to a name on which a backward runs."""
        targets = self.statement.targets if isinstance(self.statement, ast.Assign) else []
        return any(self._is_backwarded(path) for path in map(path_of, targets) if path is not None)

    def unseen_forward(self, path: str) -> frozenset[int]:
        """The origin of a graph that was made out of sight, by the path of what holds or makes it."""
        number = self.trace.number("unseen", path, self.way)
        self.trace.unseen.add(number)
        return frozenset({number})

    def _unpack(
        self, targets: list[ast.expr], value: Value, statement: ast.stmt | None, loops: tuple[Loop, ...]
    ) -> None:
        items = value.items
        if items is not None and len(items) == len(targets):
            for target, item in zip(targets, items, strict=True):
                self.assign(target, item, statement, loops)
            return
        content = flatten(value)
        single = UNKNOWN
        if content.graph:
            single = Value(
                Kind.TENSOR,
                content.graph,
                content.origins,
                divisors=content.divisors,
                carried_from=content.carried_from,
            )
        networks = []
        if content.kind is Kind.MODULE:
            networks = [target for target in targets if self._is_network(target, content)] or targets[:1]
        perhaps = single.perhaps()
        for target in targets:
            one = perhaps if self._is_perhaps_a_number(path_of(target) or "") else single
            self.assign(target, content if target in networks else one, statement, loops)

    def _is_perhaps_a_number(self, path: str) -> bool:
        """Whether what comes beside a loss is named like a record, or declared as numbers."""
        return looks_like_record(path) or (self._scope, path) in self.hints.numbers

    @property
    def _scope(self) -> Scope:
        node = self.frame.function.node if self.frame.function is not None else None
        return None if isinstance(node, ast.Lambda) else node

    def _is_network(self, target: ast.expr, source: Value) -> bool:
        """Whether what comes with a network is one as well, as the tokenizer of `net, tokenizer = load()` is not."""
        path = path_of(target)
        return holds_networks(source) or (path is not None and (self.hints.is_module(path) or looks_like_module(path)))

    def computed(self, value: Value) -> Value:
        """What an operation gives here: under `no_grad` a tensor without a graph, whatever goes in."""
        return PLAIN_TENSOR if value.graph and self.state.grad is Graph.NO else value

    # Events

    def site(self) -> Site:
        """Where we are."""
        return Site(
            functions=tuple(self._functions()),
            loops=self.loops,
            runs=self.runs,
            scopes=tuple(self.scopes),
            grad=self.state.grad,
            autocast=self.autocast,
            apex=self.apex,
            handling_exception=self.handling_exception,
            rounds=self.rounds,
            way=self.way,
        )

    def _functions(self) -> Iterator[Function]:
        frame: Frame | None = self.frame
        while frame is not None:
            if frame.function is not None:
                yield frame.function
            frame = frame.caller

    def enter_effects(self, effects: frozenset[str]) -> None:
        """Put what a context does around what follows."""
        self.state.grad = grad_under(effects, self.state.grad)
        self.autocast = autocast_under(effects, self.autocast)
        self.apex = self.apex or "apex" in effects

    def number_of_made(self, node: ast.Call) -> int:
        """What tells the object that a call makes here from others."""
        return self.trace.number("made", id(node), self.way)

    def note_call(self, name: str, node: ast.Call) -> None:
        """Record a call of a function of interest."""
        self.trace.calls.setdefault(name, []).append(Event(node, self.site(), self.trace.next_order()))

    def keep(
        self,
        node: ast.expr,
        target: str,
        value_node: ast.expr,
        value: Value,
        manner: Manner,
        loops: tuple[Loop, ...],
        alone: bool = True,
    ) -> frozenset[int]:
        """Record that a value is kept by something made under `loops`; returns the origin that stands for it.

        `alone` says that nothing else with a graph goes in with it.
        """
        content = flatten(value)
        crossed = self.loops[len(loops) :] if self.loops[: len(loops)] == loops else ()
        if not content.graph or not (crossed or self._outlives_this_call(target)) or len(loops) >= self.enclosing_depth:
            return NO_ORIGINS
        shared = isinstance(self.statement, ast.Assign) and len(self.statement.targets) > 1
        detachable = value_node if value.is_tensor and alone and not shared else None
        meter = self._meter_around(content)
        if meter is not None:
            assert meter.call is not None
            node, manner, shared, detachable = meter.call, "meter", False, _handed_over(meter, content)
        number = self.trace.number("keep", id(node), self.way)
        self.trace.keeps[number] = Keep(
            node=node,
            site=self.site(),
            target=target,
            value=value_node,
            manner=manner,
            certain=content.graph is Graph.YES,
            detachable=detachable,
            shared=shared,
            crossed=crossed,
            origins=content.origins,
            statement=self.statement,
        )
        return frozenset({number})

    def _outlives_this_call(self, target: str) -> bool:
        """`self.losses`, in a method that no loop in sight calls."""
        if self.loops or self.frame.instance is None or not target.startswith("self."):
            return False
        return (self.frame.instance.number, target.removeprefix("self.")) in self.state.attributes

    def _meter_around(self, content: Value) -> Frame | None:
        """A meter keeps the tensor inside its own method: what counts is the call that hands it over."""
        found, frame = None, self.frame
        made_in = {
            function for forward in self.trace.forwards_of(content.origins) for function in forward.site.functions
        }
        while frame.instance is not None and frame.caller is not None and frame.call is not None:
            if frame.caller.instance is frame.instance or frame.instance.cls.is_module or frame.function in made_in:
                break
            found, frame = frame, frame.caller
        return found


def _handed_over(meter: Frame, content: Value) -> ast.expr | None:
    """The argument of a call by which a tensor comes to a meter; None where it is not seen to be one tensor alone."""
    carrying = [(node, value) for node, value in meter.given if flatten(value).graph]
    if len(carrying) != 1:
        return None
    node, value = carrying[0]
    return node if value.is_tensor and content.origins <= value.origins else None
