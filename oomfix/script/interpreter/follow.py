"""Following a whole file: from its first line, then every function that was not reached from there."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cached_property, reduce

from oomfix.script.facts.definitions import Class, Function, called_on_self
from oomfix.script.facts.hints import read_hints
from oomfix.script.facts.named_like import looks_like_state
from oomfix.script.facts.torch_facts import DRAWN
from oomfix.script.facts.trace import Autocast, Trace
from oomfix.script.facts.values import NO_ORIGINS, NONE, UNKNOWN, Given, Graph, Kind, Value, combine, flatten, join
from oomfix.script.interpreter.detached_by_callers import always_taken_off
from oomfix.script.interpreter.flow import Flow
from oomfix.script.interpreter.state import Binding, Frame, Layer, Names, State
from oomfix.script.syntax.names import USUAL_NAMES, path_of, unpacked
from oomfix.script.syntax.nodes import Scope
from oomfix.script.syntax.parameters import named_parameters, placed_parameters
from oomfix.script.syntax.patterns import Pattern

_BUILTINS = frozenset(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
_SHORTEST_NAME = 3
_EDITION = Pattern(r"((py)?torch|v?\d+)$")
_OBJECTS = (Kind.MODULE, Kind.INSTANCE, Kind.LOSS, Kind.OPTIMIZER)
"""What an object is made with in sight, and may be made with elsewhere: settings may be others there."""


def _without_state(returned: Value, function: Function) -> Value:
    """`return action.item(), hidden`: what a policy is asked to do, and the state that it wants back the next time."""
    return returned.items[0] if function.acts and returned.items and _returns_a_state(function) else returned


def _returns_a_state(function: Function) -> bool:
    """Whether all that a function returns behind the first is named like a recurrent state."""
    results = [node.value for node in function.nodes if isinstance(node, ast.Return)]
    return bool(results) and all(
        isinstance(result, ast.Tuple)
        and all(looks_like_state(path_of(part) or "") for other in result.elts[1:] for part in unpacked(other))
        for result in results
    )


def _is_asked_from_elsewhere(function: Function) -> bool:
    """`translate`, and not `inference_forward`, a part of one, or `validation_step`, whose loop turns gradients off."""
    return function.evaluates and "forward" not in function.name and not function.name.endswith("_step")


def _adapts(function: Function) -> bool:
    """`grads = torch.autograd.grad(loss, weights)`, of which no graph is made: the steps of a meta-learner.

    With `grad_outputs` it is a product that a backward written by hand asks for, as that of an adjoint method.
    """
    calls = (node for node in function.nodes if isinstance(node, ast.Call))
    asked = [call for call in calls if (path_of(call.func) or "").endswith("autograd.grad")]
    keywords = [keyword for call in asked for keyword in call.keywords]
    if any(keyword.arg == "grad_outputs" for keyword in keywords):
        return False
    graphs = [keyword.value for keyword in keywords if keyword.arg == "create_graph"]
    return bool(asked) and all(isinstance(value, ast.Constant) and not value.value for value in graphs)


def _is_for(parameter: ast.arg, owner: Class) -> bool:
    """Whether a parameter takes objects of a class, by its annotation if it has one."""
    return parameter.annotation is None or ast.unparse(parameter.annotation).strip("'\"") == owner.name


def _called_on(name: str, function: Function) -> set[str]:
    """The methods that a function calls on a name."""
    called = [node.func for node in function.nodes if isinstance(node, ast.Call)]
    return {
        method.attr
        for method in called
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id == name
    }


class Follower(Flow):
    """Follows a module, and the functions of the file in it."""

    def __init__(self, tree: ast.Module, nodes: list[tuple[ast.AST, Scope]]) -> None:
        known = {name: name for name in _BUILTINS} | USUAL_NAMES
        names = Names(own={name: Binding(Value(Kind.EXTERNAL, ref=ref), (), None) for name, ref in known.items()})
        super().__init__(Frame(None, State(names)), Trace(), read_hints(nodes))
        self.tree = tree
        self._nodes = nodes
        self._instances: dict[Class, Value] = {}
        self._modes: dict[Class, dict[object, bool]] = {}
        self._called_under: dict[Function, set[tuple[Graph, Autocast | None]]] = {}
        """Whether gradients were recorded, and the autocast, where the functions of the file are called in it."""

    def follow(self) -> Trace:
        """Follow everything; returns what happened."""
        self.trace.module_level = [node for node, scope in self._nodes if scope is None]
        self._block(self.tree.body)
        if self.frame.state is None:
            self.frame.state = State(Names())
        entered: set[Function] = set()
        while functions := [function for function in self._callers_first() if function not in entered]:
            # Those that a function defines and hands out come to light when it has been entered.
            entered.update(functions)
            for function in functions:
                if not self._reached(function):
                    self._enter_unreached(function)
        return self.trace

    def _callers_first(self) -> list[Function]:
        """The functions, those first that no other function mentions: helpers are reached through their callers."""
        return sorted(self.functions, key=self._mentioned)

    def _mentioned(self, function: Function) -> int:
        """2 for a function that another one mentions, 1 where that may be something else (`self.model.train()`)."""
        hints, others = self.hints, {function.node, None}
        if hints.names.get(function.name, set()) - others or (function.name == "__call__" and "self" in hints.called):
            return 2
        of_an_object = bool(hints.attributes.get(function.name, set()) - others)
        if function.owner is None:
            return int(of_an_object)
        return 2 if of_an_object else int(function.name in hints.attributes_of_parts)

    def _reached(self, function: Function) -> bool:
        """Whether all of it was followed: other files may ask for a branch that no call of this file takes."""
        return all(id(statement) in self.visited for statement in self._statements.get(function.node, ()))

    @cached_property
    def _statements(self) -> dict[ast.AST | None, list[ast.stmt]]:
        """The statements of each function, without those of the functions that it defines."""
        found: dict[ast.AST | None, list[ast.stmt]] = {}
        for node, scope in self._nodes:
            if isinstance(node, ast.stmt):
                found.setdefault(scope, []).append(node)
        return found

    def _inherited_callers(self, function: Function) -> list[Function]:
        """The methods that a class inherits from the file which call one of its own: `self.validate_batch(batch)`."""
        owner = function.owner
        if owner is None or owner.is_module or owner.is_lightning:
            return []
        inherited = {name: method for base in owner.ancestors for name, method in base.methods.items()}
        return [
            method
            for name, method in inherited.items()
            if owner.find(name) is method and function.name in called_on_self(method.nodes)
        ]

    def _enter_inherited(self, method: Function, function: Function) -> None:
        """A method of a base class, as an object of the class of a function has it."""
        assert function.owner is not None
        receiver = self._instance_for(function.owner)
        outer, self.way = self.way, ("entry", id(method.node), id(function.node))
        self.run(self._frame_of_unseen_call(method, receiver), method, None)
        self.way = outer

    def _enter_unreached(self, function: Function) -> None:
        owner = function.owner
        for caller in self._inherited_callers(function):
            self._enter_inherited(caller, function)
        if self._reached(function):
            return
        if owner is not None and function.name == owner.step_of_a_framework:
            self._enter_step(function, owner)
            return
        if owner is not None and owner.is_lightning:
            return
        inside = owner is not None and owner.is_module and self._belongs_to_forward(function, owner)
        apart = inside and function.name != "forward"
        if apart and (function in self.ran or not _is_asked_from_elsewhere(function)):
            return
        inside = inside and not apart
        receiver = None if owner is None or function.is_static else self._instance_for(owner)
        if function.name == "__init__" and self._reached(function):
            return  # a second run would put other networks in the place of those that it has switched to `eval()`
        earlier = len(self.bound)
        frame, returned = self._run_unseen(function, receiver, inside)
        if owner is not None and owner.is_module and not inside and (apart or not owner.training_methods):
            # Whoever calls a method of a network may backpropagate what it returns, or leaves on it, with a graph;
            # what it returns beside a result without one is a state.
            result = returned.items[0] if returned.items and not apart else returned
            self.trace.backpropagated |= flatten(result).origins | self._left_on_objects(earlier)
        self._note_what_leaves(function, frame, returned, earlier)

    def _run_unseen(self, function: Function, receiver: Value | None, inside: bool) -> tuple[Frame, Value]:
        """The frame of a call out of sight, which a forward makes where it is `inside` of one, and what it gives."""
        owner = function.owner
        outer, self.way = self.way, ("entry", id(function.node))
        if inside:
            self.enclosing_forward, self.enclosing_depth = self.trace.number("inside", id(function.node)), 0
        if owner is not None and (modes := self._modes.get(owner)) and not owner.training_methods:
            self.left_by_constructor = modes
        frame = self._frame_of_unseen_call(function, receiver)
        autocasts = {autocast for _, autocast in self._called_under.get(function, ())} - {None}
        self.autocast = autocasts.pop() if autocasts else None
        returned = self.run(frame, function, None)
        self.left_by_constructor, self.autocast = {}, None
        self.way, self.enclosing_forward, self.enclosing_depth = outer, None, 1 << 30
        return frame, returned

    def _note_what_leaves(self, function: Function, frame: Frame, returned: Value, earlier: int) -> None:
        """Note which graphs a function hands out, in what it returns or leaves on what was bound since."""
        leaving = flatten(_without_state(returned, function)).origins
        if returned.ref == DRAWN or (leaving and function.name in self._always_taken_off):
            leaving = NO_ORIGINS
        left = self._left_on_arguments(frame, earlier)
        if function.acts:
            left |= self._left_on_objects(earlier, looks_like_state)  # the log probability of what was done
        leaving |= left
        for origin in flatten(returned).origins | left:
            if origin in self.trace.forwards:
                self.trace.forwards[origin].escaped |= origin in leaving
            elif origin in self.trace.keeps:
                self.trace.keeps[origin].returned = True

    @cached_property
    def _always_taken_off(self) -> frozenset[str]:
        return always_taken_off(self._nodes)

    def _left_on_objects(self, earlier: int, but: Callable[[str], bool] = lambda _: False) -> frozenset[int]:
        """Where the graphs come from that attributes hold which were bound since, but for those with such names."""
        slots = [key for key in self.bound[earlier:] if isinstance(key, tuple) and not but(key[-1])]
        held = [self.state.attributes.get(slot) for slot in slots]
        return combine([binding.value for binding in held if binding is not None]).origins

    def _left_on_arguments(self, frame: Frame, earlier: int) -> frozenset[int]:
        """As `_left_on_objects`, of those that a call out of sight gives: `trainer.loss += penalty`."""
        assert frame.function is not None and frame.state is not None
        given = frame.function.node.args
        parameters = {one.arg for one in named_parameters(given)}
        paths = (key for key in self.bound[earlier:] if isinstance(key, str) and key.partition(".")[0] in parameters)
        held = [frame.state.names.get(path) for path in paths if "." in path]
        return combine([binding.value for binding in held if binding is not None]).origins

    def _enter_step(self, function: Function, owner: Class) -> None:
        """A framework calls the step for every batch and runs the backward of what it returns."""
        node = function.node
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        batch = ast.Name("batch", ast.Store())
        loop = ast.For(batch, ast.Name("batches", ast.Load()), node.body, [], lineno=node.lineno)
        loop.end_lineno = node.end_lineno
        module = self._instance_for(owner)
        outer, self.way = self.way, ("entry", id(node))
        run = self.trace.number("run", id(loop), self.way)
        self.trace.framework_loops[loop] = run
        self.loops, self.runs, self.scopes = (loop,), (run,), [loop]
        returned = self.run(self._frame_of_unseen_call(function, module), function, None)
        self.loops, self.runs, self.scopes, self.way = (), (), [], outer
        self.trace.backpropagated |= flatten(returned).origins
        self.trace.freed |= flatten(returned).origins

    def _frame_of_unseen_call(self, function: Function, receiver: Value | None) -> Frame:
        """The frame of a call that is made out of sight, with arguments of which nobody knows more than their class."""
        frame = Frame(
            function=function,
            state=self.state.entering(Names()),
            closure=function.closure,
            caller=None,
            instance=self.instance_of(receiver) if receiver is not None else None,
        )
        arguments = {}
        parameters = function.node.args
        for index, parameter in enumerate(named_parameters(parameters)):
            value = receiver if index == 0 and receiver is not None else self._object_for(parameter, function)
            arguments[parameter.arg] = Binding(value, (), None)
        for extra in (parameters.vararg, parameters.kwarg):
            if extra is not None:
                arguments[extra.arg] = Binding(UNKNOWN, (), None)
        assert frame.state is not None
        frame.state.names = Names(own=arguments)
        # What is handed out, or called for each batch, runs under contexts that nobody sees.
        handed_out = function.is_handed_out and not function.is_whole_pass
        grads = {grad for grad, _ in self._called_under.get(function, ())} or {Graph.YES}
        alike = len(grads) == 1 and not (handed_out or function.is_hook)
        frame.state.grad = grads.pop() if alike else Graph.MAYBE
        frame.state.evaluating = Layer()
        return frame

    def _object_for(self, parameter: ast.arg, function: Function) -> Value:
        """`def run(env, agent)`: what is given for a parameter, known where it is an object that trains."""
        named = parameter.arg if parameter.annotation is None else ast.unparse(parameter.annotation).strip("'\"")
        alike = self._classes_by_ending.get(named.replace("_", "").lower(), ())
        fitting = [cls for cls in alike if cls is not function.owner and _is_for(parameter, cls)]
        if len(fitting) != 1 or not _called_on(parameter.arg, function) & fitting[0].training_methods:
            return UNKNOWN
        return self._instance_for(fitting[0])

    @cached_property
    def _classes_by_ending(self) -> dict[str, list[Class]]:
        """The classes of the file by each ending of their names of three letters and more: `DQNAgent` by `agent`.

        The library and the version are no part of a name: `TrainerPyTorch`, `DQNAgentV2`.
        """
        found: dict[str, list[Class]] = {}
        for owner in {method.owner: None for method in self.functions if method.owner is not None}:
            # A network or a Lightning module trains in other hands.
            if not (owner.is_module or owner.is_lightning):
                name = owner.name.replace("_", "").lower()
                for whole in dict.fromkeys((name, _EDITION.sub("", name))):
                    for start in range(len(whole) - _SHORTEST_NAME + 1):
                        found.setdefault(whole[start:], []).append(owner)
        return found

    def _belongs_to_forward(self, function: Function, owner: Class) -> bool:
        """A module's method that nothing calls: part of its forward, unless the class trains itself."""
        if function.name == "forward":
            return not self.trains_as_it_runs(owner)  # one that adapts what it holds to each batch trains
        if function.gives_arrays or _adapts(function):
            return False
        return self._is_part_of_forward(function) or not (owner.training_methods or function.evaluates)

    def _instance_for(self, owner: Class) -> Value:
        """An object of a class that is never made in sight: made here, with unknown arguments."""
        if owner not in self._instances:
            modes = self.state.evaluating
            self.state.evaluating = modes.over()
            self._instances[owner] = self._instantiate_unknown(owner)
            self._modes[owner] = self.state.evaluating.changes_over(modes)
            self.state.evaluating = modes
        return self._instances[owner]

    def _instantiate_unknown(self, owner: Class) -> Value:
        call = ast.Call(func=ast.Name(id=owner.name, ctx=ast.Load()), args=[], keywords=[])
        self.invented_calls.append(call)
        made = list(self.made_with.get(owner, {}).values())
        if len(made) == 1:
            return self._instantiate(call, owner, made[0].of_kinds(_OBJECTS))
        constructor = owner.find("__init__")
        arguments = [] if constructor is None else [UNKNOWN] * (len(placed_parameters(constructor.node.args)) - 1)
        return self._instantiate(call, owner, Given(arguments, {"**": UNKNOWN}))

    def run(self, frame: Frame, function: Function, call: ast.expr | None) -> Value:
        """Run a function's body in its frame; returns what it returns."""
        caller, way, autocast, apex = self.frame, self.way, self.autocast, self.apex
        guards, statement = self.scopes, self.statement
        state = frame.state
        assert state is not None
        if call is not None:
            self.way = (*way, id(call))
            self._called_under.setdefault(function, set()).add((state.grad, autocast))
        grad = state.grad
        self.frame = frame
        for effects in function.effects:
            self.enter_effects(effects.ref)
        body = function.node.body
        if isinstance(body, ast.expr):
            frame.returns.append(self.evaluate(body))
            frame.exits.append(self.state)
        else:
            self._block(body)
            if frame.state is not None:
                frame.exits.append(frame.state)
                frame.returns.append(NONE)
        frame.state = state.after(list(frame.exits)) or state
        self.frame, self.way, self.autocast, self.apex = caller, way, autocast, apex
        self.scopes, self.statement = guards, statement
        returned = self._returned(frame)
        if call is not None:
            self.state.leave(frame.state)
            self.state.grad = grad if function.effects else frame.state.grad
            self.trace.given_back[id(call)] = (
                self.trace.given_back.get(id(call), NO_ORIGINS) | flatten(returned).origins
            )
        return returned

    def _returned(self, frame: Frame) -> Value:
        if frame.yields:
            if all(value.items is not None for value in frame.yields):
                return Value(Kind.SEQUENCE, items=(frame.yields[0],))
            content = combine(frame.yields)
            return Value(Kind.CONTAINER, content.graph, content.origins)
        values = frame.returns
        if len(values) > 1 and values[-1].constant is None:
            values = [
                value for value in values if value.constant is not None or value.kind is not Kind.NUMBER
            ] or values
        if not values:
            return UNKNOWN
        return reduce(join, values)
