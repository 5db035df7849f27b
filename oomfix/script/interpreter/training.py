"""Following what trains: backwards, steps, scaling, and the calls of the manager of `oomfix.runtime`."""

from __future__ import annotations

import ast
from itertools import islice

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Instance
from oomfix.script.facts.named_like import looks_like_loss, looks_like_optimizer, looks_like_sampling, looks_like_scaler
from oomfix.script.facts.trace import Backward, Forward, Guard, Step
from oomfix.script.facts.values import (
    NO_ORIGINS,
    NONE,
    NUMBER,
    PLAIN_TENSOR,
    UNKNOWN,
    Given,
    Graph,
    Kind,
    Value,
    flatten,
)
from oomfix.script.interpreter.contexts import context
from oomfix.script.interpreter.forwards import Forwards
from oomfix.script.interpreter.state import as_test
from oomfix.script.syntax.names import last_of, path_of


class Training(Forwards):
    """Records backwards and steps, and what they leave behind."""

    def _backward(self, node: ast.Call) -> Value:
        assert isinstance(node.func, ast.Attribute)
        receiver = self.evaluate(node.func.value)
        arguments = [self.evaluate(argument) for argument in node.args]
        for keyword in node.keywords:
            self.evaluate(keyword.value)
        framework = self._backward_framework(node, receiver)
        method = receiver.ref.cls.find("backward") if isinstance(receiver.ref, Instance) else None
        if method is not None:
            return self._function(node, Value(Kind.FUNCTION, ref=(method, receiver)), Given(arguments))
        if self._inverts_network(node, receiver):
            return UNKNOWN
        takes_argument = bool(arguments) and (framework is not None or not receiver.graph)
        root_node = node.args[0] if takes_argument else node.func.value
        root = flatten(arguments[0] if takes_argument else receiver)
        network = path_of(node.func.value)
        is_network = receiver.kind is Kind.MODULE or self.hints.is_module(network or "")
        if is_network and not (node.args or receiver.graph):
            root = Value(Kind.TENSOR, Graph.YES, self._run_in_this_round(network))
        self._record_backward(node, root_node, root, framework, by_an_object=takes_argument and framework is None)
        path = path_of(root_node)
        if path is not None and (binding := self.binding_of(root_node)) is not None:
            value = binding.value
            if value.kind in (Kind.UNKNOWN, Kind.TENSOR) and value.graph is not Graph.YES:
                certain = Value(Kind.TENSOR, self.state.grad, value.origins, is_tensor=True)
                self.assign(root_node, certain, binding.statement, binding.loops)
        return NONE

    def _run_in_this_round(self, network: str | None) -> frozenset[int]:
        """The forwards of a network that `network.backward()` goes back through: those of the iteration around it."""
        return frozenset(
            forward.origin
            for forward in self.trace.forwards.values()
            if forward.path == network and forward.site.runs == self.runs and forward.records_graph
        )

    def _inverts_network(self, node: ast.Call, receiver: Value) -> bool:
        """`z = layer.backward(z)`, which differentiates nothing, as `loss = engine.backward(loss)` does.

        What networks of the file have such a method may give it another name.
        """
        if not node.args or self.is_for_effect(node) or receiver.graph or receiver.is_tensor:
            return False
        path, statement = path_of(node.args[0]), self.statement
        if isinstance(statement, ast.Assign) and [path] == list(map(path_of, statement.targets)):
            return path is not None and not looks_like_loss(path)
        own = [function.owner for function in self.functions if function.name == "backward"]
        return any(owner is not None and owner.is_module for owner in own)

    def _manual_backward(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """Lightning's `self.manual_backward(loss)`."""
        if not node.args:
            return None
        self._record_backward(node, node.args[0], flatten(self.evaluate(node.args[0])), "lightning")
        return NONE

    def _is_backward_out_of_sight(self, path: str | None, given: Given) -> bool:
        """`loss_scaler(loss, optimizer, ...)`: a scaler that is handed a loss and an optimizer runs both."""
        if path is None or not looks_like_scaler(path) or len(given.positional) < 2:
            return False
        if last_of(path)[:1].isupper():
            return False  # `DataScaler(mean, deviation)` makes one
        return bool(flatten(given.positional[0]).graph) or "parameters" in given.keywords

    def _backward_out_of_sight(self, node: ast.Call, given: Given) -> Value:
        loss = flatten(given.positional[0])._replace(scaled=True)
        self._record_backward(node, node.args[0], loss, None)
        optimizer = path_of(node.args[1]) or ast.unparse(node.args[1])
        self.trace.steps.append(Step(node, self.site(), self.trace.next_order(), optimizer=optimizer, scaled=True))
        self.state.gradients = frozenset({"none"})
        return NUMBER

    def _backward_framework(self, node: ast.Call, receiver: Value) -> str | None:
        assert isinstance(node.func, ast.Attribute)
        if receiver.kind is Kind.ACCELERATOR:
            return "accelerate" if "ccelerat" in str(receiver.ref[0] if receiver.ref else "") else "fabric"
        last = last_of(path_of(node.func.value)).lower()
        if not node.args:
            return "apex" if self.apex else None
        for word, framework in (
            ("accelerator", "accelerate"),
            ("fabric", "fabric"),
            ("engine", "deepspeed"),
            ("memory", "oomfix"),
        ):
            if word in last:
                return framework
        if isinstance(receiver.ref, Instance) and receiver.ref.cls.is_fabric:
            return "fabric"
        return "deepspeed" if receiver.kind is Kind.MODULE else None

    def _record_backward(
        self, node: ast.Call, root_node: ast.expr, root: Value, framework: str | None, by_an_object: bool = False
    ) -> None:
        retains = any(
            keyword.arg == "retain_graph" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
        binding = self.binding_of(root_node) if path_of(root_node) is not None else None
        followed = binding is None or binding.statement is not None or self.frame.call is not None
        event = self._note_backward(node, root)
        event.retains, event.framework, event.by_an_object = retains, framework, by_an_object
        event.made_here = followed and bool(root.origins)
        self.trace.backpropagated |= root.origins
        if not retains:
            self.trace.freed |= root.origins
        self.state.gradients = frozenset({"scaled" if root.scaled else "plain"})
        guards = [scope for scope in self.scopes if isinstance(scope, Guard)] if root.scaled else []
        self.state.scaled_when = frozenset(as_test(guard.test, guard.value) for guard in guards)

    def _note_backward(self, node: ast.Call, root: Value) -> Backward:
        """A backward through the graph of a value, with what the value says of it."""
        event = Backward(
            node=node,
            site=self.site(),
            order=self.trace.next_order(),
            origins=root.origins - self.trace.unseen,
            divisors=root.divisors,
            scaled=root.scaled,
            carried=root.carried_from,
            unseen=root.origins & self.trace.unseen,
        )
        self.trace.backwards.append(event)
        return event

    def _functional_backward(self, node: ast.Call, name: str, given: Given) -> Value:
        keywords = given.keywords
        root = flatten(given.argument("outputs" if "outputs" in keywords else "tensors"))
        event = self._note_backward(node, root)
        event.is_grad_call = name.endswith(".grad")
        keeps_graph = any(keywords.get(name, NUMBER).constant is True for name in ("create_graph", "retain_graph"))
        if not keeps_graph:
            self.trace.freed |= root.origins
        if not event.is_grad_call:
            self.trace.backpropagated |= root.origins
            self.state.gradients = frozenset({"plain"})
            return NONE
        if keywords.get("create_graph", NUMBER).constant is True:
            return root
        # A gradient taken without a graph of its own has served its purpose: the forward was differentiated.
        self.trace.backpropagated |= root.origins
        return PLAIN_TENSOR

    def _zero_grad(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        if isinstance(receiver.ref, Instance) and receiver.ref.cls.find("zero_grad") is not None:
            return None
        for keyword in node.keywords:
            self.evaluate(keyword.value)
        self.note_call("zero_grad", node)
        self.state.gradients = frozenset({"none"})
        return NONE

    def _step(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        if isinstance(receiver.ref, Instance) and receiver.ref.cls.find("step") is not None:
            return None
        if receiver.ref == torch_facts.DIFFERENTIABLE_OPTIMIZER and node.args:
            self.trace.backpropagated |= flatten(self.evaluate(node.args[0])).origins
            return NONE
        path = path_of(function.value) or ast.unparse(function.value)
        scaler = receiver.kind is Kind.SCALER or (bool(node.args) and looks_like_scaler(path))
        memory = receiver.kind is Kind.MEMORY
        if not (scaler or memory) and not self._is_optimizer(receiver, path):
            return None
        arguments = [self.evaluate(argument) for argument in node.args]
        self._call_back(node, arguments)
        optimizer = (path_of(node.args[0]) or ast.unparse(node.args[0])) if scaler and node.args else path
        if memory and node.args:
            optimizer = path_of(node.args[0]) or ast.unparse(node.args[0])
        self.trace.steps.append(Step(node, self.site(), self.trace.next_order(), optimizer=optimizer, scaled=scaler))
        return NUMBER

    def _is_optimizer(self, receiver: Value, path: str) -> bool:
        if receiver.kind is Kind.OPTIMIZER or path in self.hints.optimizers:
            return True
        # a function out of sight that is given parameters may give a tensor, which would have no `step`
        return receiver.kind in (Kind.UNKNOWN, Kind.MODULE, Kind.TENSOR) and looks_like_optimizer(path)

    def _unscale(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        self.evaluate(function.value)
        if "scaled" in self.state.gradients:
            self.state.gradients = (self.state.gradients - {"scaled"}) | {"unscaled"}
        self.note_call("unscale_", node)
        return NONE

    def _detach_in_place(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """`hidden[0].detach_()`, `for h in hidden: h.detach_()`: what it belongs to loses its graph."""
        value = self.evaluate(function.value)
        root: ast.expr = function.value
        while isinstance(root, ast.Subscript):
            root = root.value
        self._take_graph_off(root)
        loop = self.loops[-1] if self.loops else None
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and path_of(root) == loop.target.id:
            self._take_graph_off(loop.iter)
        return value.with_graph(Graph.NO, NO_ORIGINS) if value.items is None else PLAIN_TENSOR

    def _take_graph_off(self, target: ast.expr) -> None:
        binding = self.binding_of(target) if path_of(target) is not None else None
        if binding is not None and flatten(binding.value).graph:
            kind = Kind.CONTAINER if binding.value.kind in (Kind.CONTAINER, Kind.SEQUENCE) else Kind.TENSOR
            self.assign(target, Value(kind), binding.statement, binding.loops)

    def _scale(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        path = path_of(function.value) or ""
        if len(node.args) != 1 or not (receiver.kind is Kind.SCALER or looks_like_scaler(path)):
            return None
        return flatten(self.evaluate(node.args[0]))._replace(scaled=True)

    def _call_back(self, node: ast.Call, values: list[Value]) -> tuple[Forward, ...]:
        """A function of the file handed to something out of sight is called by it, which takes what it returns.

        Returns the forwards in it that record a graph.
        """
        functions = [value for value in values if value.kind is Kind.FUNCTION]
        if not functions:
            return ()  # `islice` below goes through all earlier forwards
        earlier, grad = len(self.trace.forwards), self.state.grad
        if looks_like_sampling(path_of(node.func) or ""):
            self.state.grad = min(grad, Graph.MAYBE)  # samplers turn gradients off themselves, most of them
        for function in functions:
            returned = flatten(self._function(node, function, Given()))
            self.trace.let_escape(returned.origins)
        self.state.grad = grad
        called = islice(self.trace.forwards.values(), earlier, None)
        return tuple(forward for forward in called if forward.records_graph)

    def _memory_method(self, node: ast.Call, name: str, given: Given) -> Value:
        arguments = given.positional
        if name in ("forward_backward", "loss", "evaluate") and arguments and arguments[0].kind is Kind.FUNCTION:
            return self._memory_forward(node, name, given)
        if name == "forward" and arguments:
            return self._memory_call(node, given)
        if name == "evaluate":
            return PLAIN_TENSOR
        if name in ("prepare", "accumulate") and arguments:
            return arguments[0]
        if name == "autocast":
            return context("autocast:unknown")
        return UNKNOWN

    def _memory_call(self, node: ast.Call, given: Given) -> Value:
        """`memory.forward(model, x)`: the model's own call, in the preset's precision."""
        autocast, self.autocast = self.autocast, "unknown"
        result = self.run_argument(node, given)
        self.autocast = autocast
        return result

    def run_argument(self, node: ast.Call, given: Given, direct: bool = True) -> Value:
        """`data_parallel(model, x)`: the first argument is called with the others."""
        path, called = path_of(node.args[0]), given.positional[0]
        if called.kind is Kind.FUNCTION:
            return self._function(node, called, given.rest)
        module = called if called.kind in (Kind.MODULE, Kind.INSTANCE) else Value(Kind.MODULE, ref=path)
        return self.forward(node, module, path, given.rest, direct, method=self._own(called, "forward"))

    def _memory_forward(self, node: ast.Call, name: str, given: Given) -> Value:
        autocast, grad = self.autocast, self.state.grad
        if name != "loss":
            self.autocast = "unknown"
        if name == "evaluate":
            self.state.grad = Graph.NO
        returned = self._function(node, given.positional[0], given.rest)
        self.autocast, self.state.grad = autocast, grad
        loss = flatten(returned.items[0] if returned.items else returned)
        if name == "forward_backward":
            self._record_backward(node, node.args[0], loss, "oomfix")
        given_back = loss if name == "loss" else PLAIN_TENSOR
        if returned.items is not None:
            others = (PLAIN_TENSOR for _ in returned.items[1:])
            return Value(Kind.SEQUENCE, items=(given_back, *others))
        return given_back
