"""Following calls into the functions and classes of the file."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from oomfix.script.facts.definitions import Class, Function, Instance
from oomfix.script.facts.hints import Hints
from oomfix.script.facts.named_like import goes_backwards, looks_like_forward, looks_like_logging, looks_like_loss
from oomfix.script.facts.torch_facts import runs_nothing
from oomfix.script.facts.trace import Guard, Trace
from oomfix.script.facts.values import UNKNOWN, Given, Graph, Kind, Value, combine, join
from oomfix.script.facts.weights import has_no_weights, is_bare, makes_layers
from oomfix.script.interpreter.core import Core
from oomfix.script.interpreter.state import Binding, Frame, Names
from oomfix.script.syntax.names import last_of, owner_of, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import bind_call, defaults_of, first_unpacked, named_parameters

_MAX_DEPTH = 24
_WHOLE = frozenset({"self", "self.module", "self.forward"})
"""What a method of a network calls to run all of it."""
_DIFFERENTIATING = frozenset({"torch.autograd.grad", "autograd.grad"})
"""What a method other than `forward` calls to make a penalty of gradients."""
_MAX_CALLS_OF_ONE_FUNCTION = 24


class Functions(Core):
    """Runs a function of the file with the arguments it is called with."""

    def __init__(self, module_frame: Frame, trace: Trace, hints: Hints) -> None:
        super().__init__(module_frame, trace, hints)
        self._parts_of_forwards: dict[Function, bool] = {}
        self.made_with: dict[Class, dict[ast.Call, Given]] = {}
        """What each call that makes an object of a class of the file gives it."""
        self.invented_calls: list[ast.Call] = []
        """Calls that are in no file are kept, so that no other node takes over their identity."""

    @abstractmethod
    def forward(
        self,
        node: ast.Call,
        module: Value,
        path: str | None,
        given: Given,
        direct: bool = True,
        method: Function | None = None,
    ) -> Value:
        """Record a forward (`Forwards`); `method` is the module's own code for it, where that is in the file."""

    def _function(self, node: ast.Call, value: Value, given: Given) -> Value:
        """Follow a call into a function of the file, and into each that may stand in its place."""
        if value.alternatives:
            return reduce(join, list(self._each_alternative(node, value, given)))
        if value.before is not None:
            return self._function(node, value._replace(before=None), given.after(value.before.given))
        function, bound = value.ref
        assert isinstance(function, Function)
        receiver: Value | None = None if function.is_static else bound
        if receiver is not None and given.all and _is_open_forward(function, receiver):
            return self.forward(node, receiver, "self", given)
        if receiver is not None and self._runs_network(node, function, receiver):
            return self.forward(node, receiver, path_of(node.func), given, method=function)
        return self._follow_function(node, function, receiver, given)

    def registered_by(self, decorator: ast.expr, value: Value, function: Function) -> None:
        """`@register("hinge")`: a decorator of the file that puts the function into a table is followed."""
        if value.kind is not Kind.FUNCTION or value.alternatives or not _puts_into_table(value.ref[0]):
            return
        call = ast.copy_location(ast.Call(decorator, [ast.Name(function.name, ast.Load())], []), decorator)
        self.invented_calls.append(call)
        self._function(call, value, Given([Value(Kind.FUNCTION, ref=(function, None))]))

    def _runs_network(self, node: ast.Call, function: Function, receiver: Value) -> bool:
        """Whether a call of a method is a forward of its network, and not part of one."""
        if receiver.kind is not Kind.MODULE or self.enclosing_forward is not None:
            return False
        if _runs_itself(function) or _asks_one_network(function):
            return self._is_for_training(node)
        if is_bare(function) or _hands_on(function) or not self._is_part_of_forward(function):
            return False
        own, for_effect = (path_of(node.func) or "").startswith("self."), self.is_for_effect(node)
        own_pass = own and (looks_like_loss(function.name) or (function.evaluates and for_effect))
        own_pass = own_pass or (own and self._is_asked_by_its_training(function))
        if own_pass or runs_nothing(function.name) or goes_backwards(function.name):
            return False  # the forwards are those that stand in it, if any
        for_a_log = for_effect and looks_like_logging(function.name)
        if function.name in ("train", "eval") and not node.args:
            return False  # it switches its parts, as `nn.Module` would
        return not for_a_log and not self._is_in_constructor_of(receiver)

    def _is_asked_by_its_training(self, function: Function) -> bool:
        """`self.run_batch(x)` in the training of a class that has no forward and no layers: its parts are networks."""
        owner = function.owner
        if owner is None or looks_like_forward(function.name) or owner.find("forward") is not None:
            return False
        if makes_layers(owner):
            return False
        return any(around.owner is owner and around.name in owner.training_methods for around in self._functions())

    def _is_for_training(self, node: ast.Call) -> bool:
        """Whether a backward follows in the function that calls a method of an object other than its own."""
        holder = owner_of(node)
        if holder is None or holder == "self":
            return False
        function = self.frame.function
        around = function.nodes if function is not None else walk(self.loops[0]) if self.loops else ()
        return any(
            isinstance(call, ast.Call) and last_of(path_of(call.func)) == "backward" and call.lineno > node.lineno
            for call in around
        )

    def _each_alternative(self, node: ast.Call, value: Value, given: Given) -> Iterator[Value]:
        """One of them runs, so that what happens in one excludes what happens in the first."""
        for index, function in enumerate([value._replace(alternatives=()), *value.alternatives]):
            self.scopes.append(Guard(node, node.func, index == 0))
            yield self._function(node, function, given)
            self.scopes.pop()

    def _follow_function(
        self,
        node: ast.Call,
        function: Function,
        receiver: Value | None,
        given: Given,
    ) -> Value:
        if self._too_deep(function):
            return self._not_followed_again(given)
        function.calls += 1
        (self.trace.left_open if function.is_left_open else self.trace.followed).add(node)
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        written = [*zip(node.args[: first_unpacked(node)], given.positional[given.ahead :], strict=False)]
        written += [(named[name], value) for name, value in given.keywords.items() if name in named]
        receivers = [] if receiver is None else [receiver]
        if function.takes_class:
            receivers = [Value(Kind.CLASS, ref=function.owner)]
        frame = Frame(
            function=function,
            state=self.state.entering(self._arguments(function, given, receivers)),
            closure=function.closure,
            caller=self.frame,
            call=node,
            given=tuple(written),
            instance=self.instance_of(receiver) if receiver is not None else None,
        )
        if not given.ahead:
            self._keep_age(frame, function, node, bool(receivers))
        returned = self.run(frame, function, node)
        return self._filled_elsewhere(given) if function.is_left_open else returned

    def _filled_elsewhere(self, given: Given) -> Value:
        """What a method gives that classes of other files fill: made of what it is given, as far as anybody knows."""
        content = self.computed(combine(given.all))
        return Value(Kind.TENSOR, Graph.MAYBE, content.origins) if content.graph else UNKNOWN

    def _not_followed_again(self, given: Given) -> Value:
        """What a call gives that was followed often enough: a graph that goes in may come out, or be trained inside."""
        content = self.computed(combine(given.all))
        if not content.graph:
            return UNKNOWN
        self.trace.let_escape(content.origins)
        return Value(Kind.TENSOR, Graph.MAYBE, content.origins)

    def _keep_age(self, frame: Frame, function: Function, node: ast.Call, of_object: bool) -> None:
        """A list handed to a function is as old there as it was here."""
        assert frame.state is not None
        for parameter, argument in bind_call(node, function.node.args, of_object=of_object).all:
            binding = self.binding_of(argument) if isinstance(argument, ast.Name | ast.Attribute) else None
            bound = frame.state.names.get(parameter.arg)
            if binding is not None and bound is not None and binding.value.kind is bound.value.kind is Kind.CONTAINER:
                frame.state.names[parameter.arg] = bound._replace(loops=binding.loops)

    def effects_around(self, function: Function, wanted: Callable[[ast.AST], bool]) -> frozenset[str]:
        """What a function puts around the parts of it that are wanted: the `yield` of a context manager."""
        effects: frozenset[str] = frozenset()
        for statement in function.nodes:
            if isinstance(statement, ast.With) and any(wanted(part) for part in walk(statement)):
                for item in statement.items:
                    value = self.evaluate(item.context_expr)
                    if value.kind is Kind.CONTEXT:
                        effects |= value.ref
        return effects

    def _is_part_of_forward(self, function: Function) -> bool:
        """A method of a module that is part of its forward: it trains nothing, and runs neither itself nor a loader."""
        known = self._parts_of_forwards.get(function)
        if known is None:
            known = self._parts_of_forwards[function] = self._reads_as_part_of_forward(function)
        return known

    def _reads_as_part_of_forward(self, function: Function) -> bool:
        owner = function.owner
        if owner is not None and function.name in owner.training_methods | owner.running_methods:
            return False
        whole = _WHOLE - {"self.forward"} if function.name == "forward" else _WHOLE | _DIFFERENTIATING
        parameters = {argument.arg for argument in named_parameters(function.node.args)[1:]}
        parameters |= {name for name, source in _shown(function) if source in parameters}
        for child in function.nodes:
            if isinstance(child, ast.Call):
                if isinstance(child.func, ast.Attribute) and child.func.attr in ("backward", "zero_grad"):
                    return False
                if path_of(child.func) in whole:
                    return False
            elif isinstance(child, ast.For) and function.name != "forward":
                if any(isinstance(name, ast.Name) and name.id in parameters for name in walk(child.iter)):
                    return False
        return True

    def trains_as_it_runs(self, cls: Class) -> bool:
        """Whether the `forward` of a network trains what it holds; one that steps nothing only asks for gradients."""
        return "forward" in cls.training_methods and self.hints.steps

    def _is_in_constructor_of(self, receiver: Value) -> bool:
        """Whether an object's own constructor is running: what it calls sets the object up."""
        instance, frame = self.instance_of(receiver), self.frame
        while instance is not None and frame.function is not None and frame.caller is not None:
            if frame.function.name == "__init__" and frame.instance is instance:
                return True
            frame = frame.caller
        return False

    def _too_deep(self, function: Function) -> bool:
        depth, frame = 0, self.frame
        while frame.caller is not None:
            if frame.function is function:
                return True
            depth, frame = depth + 1, frame.caller
        return depth > _MAX_DEPTH or function.calls > _MAX_CALLS_OF_ONE_FUNCTION

    def _arguments(self, function: Function, given: Given, receivers: Sequence[Value]) -> Names:
        """The names of a function's parameters, with what a call gives them."""
        names, parameters = Names(), function.node.args
        bound = given.to(parameters, receivers)
        certain, defaults = dict(bound.given), defaults_of(parameters)
        perhaps: dict[ast.arg, list[Value]] = {}
        for parameter, value in bound.perhaps:
            perhaps.setdefault(parameter, []).append(value)
        for parameter in named_parameters(parameters):
            if parameter in certain:
                value = certain[parameter]
            elif parameter in perhaps:
                value = self._perhaps(perhaps[parameter])
            else:
                value = self._default(defaults.get(parameter))
            names.bind(parameter.arg, Binding(value, self.loops, None))
        for rest in (parameters.vararg, parameters.kwarg):
            if rest is not None:
                held = combine([value for parameter, value in bound.all if parameter is rest])
                known = rest is parameters.vararg or held.graph
                value = Value(Kind.CONTAINER, held.graph, held.origins) if known else UNKNOWN
                names.bind(rest.arg, Binding(value, self.loops, None))
        return names

    @staticmethod
    def _perhaps(values: list[Value]) -> Value:
        """What a parameter is that may be given one of several values, or its default."""
        content = combine(values)
        return content.with_graph(Graph.MAYBE) if content.graph else UNKNOWN

    def _default(self, default: ast.expr | None) -> Value:
        """What a parameter is that nothing is given for: known where it is written down, or one of several cases."""
        label = isinstance(default, ast.Name) and default.id in self.hints.labels
        literal = isinstance(default, ast.Constant) or label
        return self.evaluate(default) if literal and default is not None else UNKNOWN

    def _instantiate(self, node: ast.Call, cls: Class, given: Given) -> Value:
        instance = Instance(cls, self.number_of_made(node))
        self.made_with.setdefault(cls, {})[node] = given
        kind = Kind.INSTANCE
        if cls.is_module:
            named = looks_like_loss(cls.name) and not cls.name.startswith(("Model", "Net"))
            kind = Kind.LOSS if named or has_no_weights(cls) else Kind.MODULE
        value = Value(kind, ref=instance)
        constructor = cls.find("__init__")
        if constructor is not None:
            if kind is Kind.INSTANCE:
                self._function(node, Value(Kind.FUNCTION, ref=(constructor, value)), given)
            else:
                self._construct_module(node, constructor, value, given)
        elif kind is Kind.INSTANCE:
            held = dict([*zip(cls.fields, given.positional, strict=False), *given.keywords.items()])
            for name in held.keys() & cls.fields:
                self.state.attributes[instance.number, name] = Binding(held[name], self.loops, None)
            if cls.is_named_tuple and given.starred is None and cls.fields:
                items = tuple(held.get(name, UNKNOWN) for name in cls.fields)
                return Value(Kind.SEQUENCE, items=items, ref=instance)
        if any("Namespace" in name or "NamedTuple" in name for name in cls.base_names):
            return UNKNOWN
        return value

    def _construct_module(self, node: ast.Call, constructor: Function, value: Value, given: Given) -> None:
        if self._too_deep(constructor):
            return
        frame = Frame(
            function=constructor,
            state=self.state.entering(self._arguments(constructor, given, [value])),
            closure=constructor.closure,
            caller=self.frame,
            call=node,
            instance=self.instance_of(value),
        )
        self.run(frame, constructor, node)


def _puts_into_table(decorator: Function) -> bool:
    """Whether a function puts what it is given under a key: `table[name] = function`."""
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in decorator.parameters
        for node in decorator.nodes
    )


def _is_open_forward(function: Function, receiver: Value) -> bool:
    """`def forward(self, x): raise NotImplementedError` of a network, which classes built on it fill."""
    return receiver.kind is Kind.MODULE and function.name == "forward" and function.is_left_open


def _asks_one_network(function: Function) -> bool:
    """`def act(self, state): return self.policy(state).argmax()`: the forward is that of the one network it calls."""
    asked = [path for path in _asked_of_self(function) if "." not in path]
    own = [None if function.owner is None else function.owner.find(path) for path in asked]
    return function.evaluates and own.count(None) == 1 and all(method is None or is_bare(method) for method in own)


def _runs_itself(function: Function) -> bool:
    """`def sample(self, state): mean, std = self(state)`: it runs the network that it belongs to, once."""
    calls = [path_of(node.func) or "" for node in function.nodes if isinstance(node, ast.Call)]
    others = (last_of(path) in ("backward", "zero_grad", "grad") for path in calls)
    return sum(path in _WHOLE for path in calls) == 1 and not any(others)


def _hands_on(function: Function) -> bool:
    """`def act(self, state): return self.policy.act(state)`: that one says whether a network runs, and how."""
    asked = _asked_of_self(function)
    handed = len(asked) == 1 and "." in asked[0] and last_of(asked[0]) == function.name
    return handed and not looks_like_forward(function.name)


def _asked_of_self(function: Function) -> list[str]:
    """What a method calls of its object: `policy` in `self.policy(state)`."""
    called = (path_of(node.func) or "" for node in function.nodes if isinstance(node, ast.Call))
    return [path.removeprefix("self.") for path in called if path.startswith("self.")]


def _shown(function: Function) -> Iterator[tuple[str, str | None]]:
    """`bar = tqdm(loader)`: the name of a loader that shows its progress, and that of the loader."""
    for node in function.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            if node.value.args and "tqdm" in (path_of(node.value.func) or ""):
                yield node.targets[0].id, path_of(node.value.args[0])
