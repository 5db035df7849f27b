"""Following calls: what is called decides what happens."""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Inherited
from oomfix.script.facts.leaves import asks_for_gradients
from oomfix.script.facts.named_like import (
    looks_like_autoencoder,
    looks_like_forward,
    looks_like_loss,
    looks_like_metric,
    looks_like_module,
    looks_like_part,
    runs_network,
)
from oomfix.script.facts.trace import Event, Handed
from oomfix.script.facts.values import NONE, NUMBER, PLAIN_TENSOR, UNKNOWN, Given, Graph, Kind, Value, combine, flatten
from oomfix.script.interpreter.containers import STORING
from oomfix.script.interpreter.contexts import NULL
from oomfix.script.interpreter.externals import Externals, divisors_of, has_integers
from oomfix.script.interpreter.methods import SAME_MODULE
from oomfix.script.syntax.names import MOVES, last_of, path_of, path_of_each


class Calls(Externals):
    """Finds out what is called: something of the file, of torch, of another library, or out of sight."""

    def call(self, node: ast.Call) -> Value:
        """What a call gives, after recording what it does."""
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "backward":
                return self._backward(node)
            special = _BY_METHOD.get(node.func.attr)
            if special is not None and (result := special(self, node, node.func)) is not None:
                return result
        result = None
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            result = self.evaluate(node.func.value)
            function = self.attribute_of(result, node.func)
        else:
            function = self.evaluate(node.func)
        given = self._given(node)
        value = self._call_value(node, function, result, given)
        if self.is_for_effect(node) and value.graph and looks_like_loss(path_of(node.func) or ""):
            self._leave_on_object(node.func, value)  # `content_loss(features)`, asked for its `loss` later
        if asks_for_gradients(node) and value.kind in (Kind.TENSOR, Kind.UNKNOWN) and not value.graph:
            return Value(Kind.TENSOR, Graph.MAYBE)  # a loss may go back to it, through a frozen network too
        return value

    def _given(self, node: ast.Call) -> Given:
        """What a call is given; what `*` unpacks one by one, where it is known how many these are."""
        positional: list[Value] = []
        starred: int | None = None
        for argument in node.args:
            unpacked = self.evaluate(argument.value) if isinstance(argument, ast.Starred) else None
            if unpacked is None:
                positional.append(self._as_given(argument))
            elif unpacked.items:
                positional += unpacked.items
            else:
                starred = len(positional) if starred is None else starred
                positional.append(flatten(unpacked))
        keywords = {keyword.arg or "**": self._as_given(keyword.value) for keyword in node.keywords}
        return Given(positional, keywords, starred)

    def _as_given(self, argument: ast.expr) -> Value:
        """An argument; an object out of sight brings along what was left in its attributes: `batch.out = net(x)`."""
        value = self.evaluate(argument)
        if value.kind is not Kind.UNKNOWN or value.graph or not isinstance(argument, ast.Name):
            return value
        held = combine([binding.value for binding in self.state.names.attributes(argument.id)])
        return value.with_graph(Graph.MAYBE, held.origins) if held.graph else value

    def _call_value(
        self,
        node: ast.Call,
        function: Value,
        result: Value | None,
        given: Given,
    ) -> Value:
        """What a call gives; `result` is that of the call whose method is called: `a.f().g()` runs `a.f()` once."""
        path = path_of_each(node.func)
        if function.before is not None and function.kind in (Kind.EXTERNAL, Kind.LOSS):
            given = given.after(function.before.given)
        match function.kind:
            case Kind.EXTERNAL:
                return self._external(node, function.ref, path, given)
            case Kind.FUNCTION:
                return self._function(node, function, given)
            case Kind.CLASS:
                return self._instantiate(node, function.ref, given)
            case Kind.MODULE:
                return self._call_network(node, function, path, given)
            case Kind.LOSS:
                return self._judged(node, function, path, given)
            case Kind.CONTEXT:
                return self._decorate(function, given)
            case Kind.INSTANCE:
                instance = self.instance_of(function)
                own = instance.cls.find("__call__") if instance is not None else None
                if own is not None:
                    return self._function(node, Value(Kind.FUNCTION, ref=(own, function)), given)
                return self._method(node, function, "__call__", given)
        if (context := self._context_of_one(node, function.alternatives, given)) is not None:
            return context
        imported = [one.ref for one in function.alternatives if one.kind is Kind.EXTERNAL]
        if imported and (path or "").startswith("self."):  # `self.augment = None` before it is an imported function
            return self._external(node, imported[0], path, given)
        if isinstance(node.func, ast.Attribute):
            receiver = self.evaluate(node.func.value) if result is None else result
            return self._method(node, receiver, node.func.attr, given)
        return self._unknown(node, path, given)

    def _call_network(self, node: ast.Call, network: Value, path: str | None, given: Given) -> Value:
        """What the call of a network gives, or of what is named like one."""
        if self._takes_the_name_of(node, path):
            return network
        if self.hints.is_loss(path or "") and not self._is_network_and_loss(path or "", given):
            return self._through_loss(given.all)
        if (training := self._training_forward(network)) is not None:
            return self._function(node, Value(Kind.FUNCTION, ref=(training, network)), given)
        return self.forward(node, network, path, given, method=self._own(network, "forward"))

    def _decorate(self, context: Value, given: Given) -> Value:
        """`torch.no_grad()(evaluate)`: the function with the context around it; the context where it is given none."""
        decorated = given.positional[0] if given.positional else UNKNOWN
        if decorated.kind is not Kind.FUNCTION:
            return context
        decorated.ref[0].effects.append(context)
        return decorated

    def _judged(self, node: ast.Call, criterion: Value, path: str | None, given: Given) -> Value:
        """What a criterion gives, or a network that is named like one."""
        if path is not None and self._is_network_and_loss(path, given):
            return self.forward(node, Value(Kind.MODULE, ref=path), path, given)
        return self._of_criterion(node, criterion, given)

    def _method(self, node: ast.Call, receiver: Value, name: str, given: Given) -> Value:
        values = given.all
        path = path_of(node.func)
        if receiver.kind is not Kind.CONTAINER and self._is_given_terms(path or name, values):
            self.trace.backpropagated |= combine(values).origins
        if name in ("configure_optimizer", "configure_optimizers"):
            return UNKNOWN
        if name == "run" and isinstance(receiver.ref, Handed):
            receiver.ref.run(self.state.grad)
        match receiver.kind:
            case Kind.MODULE:
                return self._module_method(node, receiver, name, path, given)
            case Kind.SEQUENCE if name in torch_facts.REDUCTIONS:
                return self._tensor_method(name, flatten(receiver), values)  # `torch.min(first, second).mean()`
            case Kind.CONTAINER | Kind.SEQUENCE:
                return self._container_method(node, receiver, name, values)
            case Kind.ACCELERATOR:
                return self._accelerator_method(name, values)
            case Kind.OPTIMIZER | Kind.SCALER | Kind.CONTEXT | Kind.NUMBER if not receiver.graph:
                self._call_back(node, values)
                content = combine(values)
                if receiver.kind is Kind.NUMBER and content.graph and not isinstance(receiver.constant, str):
                    return content.with_graph(Graph.MAYBE)
                return NUMBER
            case Kind.MEMORY:
                return self._memory_method(node, name, given)
            case Kind.TRAINER if name in ("fit", "train"):
                self.trace.fits.append(Event(node, self.site(), self.trace.next_order()))
            case Kind.LOSS if name in SAME_MODULE:
                return receiver
            case Kind.LOSS if name in ("forward", "__call__") and isinstance(node.func, ast.Attribute):
                return self._judged(node, receiver, path_of(node.func.value), given)
            case Kind.CLASS if name == "load_from_checkpoint":
                return self._instantiate(node, receiver.ref, Given(keywords={"**": UNKNOWN}))
        if name == "get" and receiver.graph and len(values) > 1:
            # `parts.get("kl", 0.0)` of a loss in parts: perhaps numbers; for every key, the loss itself is among them
            return receiver.with_graph(Graph.MAYBE) if isinstance(values[0].constant, str) else receiver
        if receiver.kind is Kind.TENSOR or receiver.graph or divisors_of(name, values):
            return self._method_of_tensor(node, receiver, name, given)
        return self._method_of_unknown(node, receiver, name, path, given)

    def _method_of_tensor(self, node: ast.Call, receiver: Value, name: str, given: Given) -> Value:
        """What a method of a tensor gives; one that works in place changes what its name holds."""
        if name == "update" and self._takes_entries(node, receiver, given.all):
            return NONE
        if name == "sample" and self._is_distribution(node.func):
            return PLAIN_TENSOR
        result = self._tensor_method(name, receiver, given.all)
        if not isinstance(node.func, ast.Attribute):
            return result
        if name in ("div_", "mul_"):
            self.assign(node.func.value, result, self.statement)
        elif name in ("add_", "sub_") and given.positional:
            self._add_in_place(node, node.func.value, result, given.positional[0])
        elif self.is_for_effect(node) and receiver.origins <= self.trace.unseen and result.origins:
            # `loss.add_batch(out, y)` of an object that runs the backward itself
            self.assign(node.func.value, result, self.statement)
        return result

    def _is_distribution(self, sampled: ast.expr) -> bool:
        """Whether what a network gives is asked for log probabilities as well as for samples, which carry no graph."""
        holder = path_of(sampled.value) if isinstance(sampled, ast.Attribute) else None
        return f"{holder}.log_prob" in self.hints.called

    def _method_of_unknown(
        self,
        node: ast.Call,
        receiver: Value,
        name: str,
        path: str | None,
        given: Given,
    ) -> Value:
        """What a method gives, by its name and that of its object."""
        values = given.all
        if name == "__init__" and isinstance(receiver.ref, Inherited):
            self._construct_out_of_sight(node, receiver.ref, given)
        if name == "update" and self._takes_entries(node, receiver, values):
            return NONE
        if name in STORING:
            return self._store_unknown(node, receiver, name, values)
        moved = name in ("to", "cuda") or (name == "type" and bool(values))
        if not moved and (name in torch_facts.LEAVING_THE_GRAPH or name in torch_facts.INTEGER_RESULTS):
            return NUMBER if not combine(values).graph else UNKNOWN
        if not isinstance(node.func, ast.Attribute):
            return receiver if name in SAME_MODULE else self._unknown(node, path, given)
        holder = node.func.value
        base = path_of(holder)
        if node.func.attr in ("forward", "__call__") and (
            (result := self._forward_of_unknown(node, node.func.attr, base, given)) is not None
        ):
            return result
        if moved and self._makes_object(holder):
            return self._network_made(node)
        if receiver.kind is Kind.UNKNOWN and (network := self._asked_like_a_network(node, holder, name, given)):
            return self._module_method(node, Value(Kind.MODULE, ref=network), name, f"{network}.{name}", given)
        if name in SAME_MODULE and not values and base is not None and self.hints.is_module(base):
            return Value(Kind.MODULE, ref=base)
        return receiver if name in SAME_MODULE else self._unknown(node, path, given)

    def _forward_of_unknown(self, node: ast.Call, name: str, base: str | None, given: Given) -> Value | None:
        """What `base.forward(x)` gives; None for `base.__call__(x)` of what may be no network."""
        if self.hints.is_loss(base or ""):
            return self._through_loss(given.all)
        if self._adds_noise(node) or self._is_autograd_function(base):
            return self.computed(combine(given.all))
        if name == "forward" or self.hints.is_module(base or ""):
            return self.forward(node, Value(Kind.MODULE, ref=base), base, given)
        return None

    def _asked_like_a_network(self, node: ast.Call, holder: ast.expr, name: str, given: Given) -> str | None:
        """The path of what a method is called on, where that and the method are named or used as a network's are."""
        base = path_of(holder)
        if base is None:
            each = path_of_each(holder)
            return each if each is not None and looks_like_module(each) and looks_like_module(name) else None
        if name in SAME_MODULE:
            return None
        called = base in self.hints.called and looks_like_module(base)
        known = called or self.hints.is_module(base) or self.hints.is_autoencoder(base)
        known = known or (runs_network(name) and looks_like_autoencoder(base))
        part = bool(given.all) and looks_like_part(name) and not looks_like_forward(name)
        asked = part or path_of(node.func) in self.hints.graph_callees
        known = known or ((asked or name.startswith("forward_")) and looks_like_module(base))
        return base if known and not (looks_like_module(name) and self._is_method_of_an_object(node)) else None

    def _add_in_place(self, node: ast.Call, total: ast.expr, result: Value, value: Value) -> None:
        """`total.add_(loss)`."""
        path, binding = path_of(total), self.binding_of(total)
        if path is not None and binding is not None:
            value = self.computed(value)
            kept = self.keep(node, path, node.args[0], value, "add", binding.loops)
            grown = result.with_graph(result.graph, result.origins | kept)
            self.assign(total, grown, binding.statement, binding.loops)

    def _makes_object(self, node: ast.expr) -> bool:
        """`Searcher(encoder, decoder)`: a call of an imported class, of which only modules are moved to a device."""
        if not isinstance(node, ast.Call) or (path := path_of(node.func)) is None:
            return False
        value = self.evaluate(node.func)
        last = last_of(path)
        imported = value.kind is Kind.EXTERNAL and not str(value.ref).startswith(("torch.", "torchmetrics.", "numpy."))
        judges = looks_like_loss(last) or looks_like_metric(last)
        return imported and last[:1].isupper() and len(last) > 2 and not judges

    def _tensor_method(self, name: str, receiver: Value, values: list[Value]) -> Value:
        converts = name == "type" and bool(values)
        if not converts and (name in torch_facts.INTEGER_RESULTS or name in torch_facts.LEAVING_THE_GRAPH):
            return PLAIN_TENSOR
        if (converts or name == "to") and has_integers(values):
            return PLAIN_TENSOR
        content = combine([receiver] if name in MOVES else [receiver, *values])
        if name == "sample":  # of a distribution: torch's own draw without a graph
            if receiver.ref == torch_facts.DISTRIBUTION:
                return PLAIN_TENSOR
            return content.perhaps()
        if name.startswith("get_"):  # no method of a tensor: `loss.get_value()` of an object for losses may be a number
            return content.perhaps()
        if not name.endswith("_"):
            computed = self.computed(content)
            if name not in SAME_MODULE:
                content = computed
            elif computed is not content:  # `loss.cpu()` has no graph, or is the tensor, which lies there already
                content = content.with_graph(Graph.MAYBE)
        if name in torch_facts.INDEX_REDUCTIONS:
            return self._values_and_indices(content, 1 + len(values))
        return content._replace(
            divisors=receiver.divisors | divisors_of(name, values),
            scaled=receiver.scaled,
            is_tensor=(receiver.is_tensor and name not in torch_facts.SEVERAL)
            or name in torch_facts.REDUCTIONS
            or name in torch_facts.ACTIVATIONS,
        )

    def _accelerator_method(self, name: str, values: list[Value]) -> Value:
        if name == "prepare":
            return Value(Kind.SEQUENCE, items=tuple(values)) if len(values) > 1 else (values[0] if values else UNKNOWN)
        if name in ("autocast", "accumulate", "no_sync"):
            return NULL
        if name in ("unwrap_model", "setup_module", "setup"):
            return values[0] if values else UNKNOWN
        if name in ("clip_grad_norm_", "clip_grad_value_", "clip_gradients"):
            return NUMBER
        return combine(values)


_BY_METHOD: dict[str, Callable[[Calls, ast.Call, ast.Attribute], Value | None]] = {
    "manual_backward": Calls._manual_backward,
    "requires_grad_": Calls._requires_grad,
    "zero_grad": Calls._zero_grad,
    "step": Calls._step,
    "unscale_": Calls._unscale,
    "detach_": Calls._detach_in_place,
    "enter_context": Calls._enter_context,
    "__enter__": Calls._enter_by_hand,
    "__exit__": Calls._exit_by_hand,
    "scale": Calls._scale,
    "train": Calls._mode,
    "eval": Calls._mode,
}
