"""Following calls: what is called decides what happens."""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomfix.script import torch_facts
from oomfix.script.containers import STORING
from oomfix.script.contexts import NULL, context_of_call
from oomfix.script.hints import (
    looks_like_loss,
    looks_like_module,
    looks_like_training,
)
from oomfix.script.methods import SAME_MODULE, Methods
from oomfix.script.names import MOVES, path_of
from oomfix.script.nodes import walk
from oomfix.script.trace import Clip, Handed
from oomfix.script.values import (
    FRESH_TENSOR,
    LOADED,
    NONE,
    NUMBER,
    PLAIN_TENSOR,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    combine,
    flatten,
)


class Calls(Methods):
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
        arguments = [self.evaluate(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value) for keyword in node.keywords}
        return self._call_value(node, function, result, arguments, keywords)

    def _call_value(
        self,
        node: ast.Call,
        function: Value,
        result: Value | None,
        arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        """What a call gives; `result` is that of the call whose method is called: `a.f().g()` runs `a.f()` once."""
        path = path_of(node.func)
        if path is None and isinstance(node.func, ast.Subscript) and (holder := path_of(node.func.value)) is not None:
            path = f"{holder}[*]"  # `self.encoders[name](x)`: the name of what holds them speaks for each
        match function.kind:
            case Kind.EXTERNAL:
                return self._external(node, function.ref, path, arguments, keywords)
            case Kind.FUNCTION:
                return self._function(node, function, arguments, keywords)
            case Kind.CLASS:
                return self._instantiate(node, function.ref, arguments, keywords)
            case Kind.MODULE:
                if self._takes_the_name_of(node, path):
                    return function
                if self.hints.is_loss(path or ""):
                    return self._through_loss([*arguments, *keywords.values()])
                return self.forward(node, function, path, arguments, keywords, method=self._own(function, "forward"))
            case Kind.LOSS:
                loss = self._through_loss([*arguments, *keywords.values()])
                return loss._replace(divisors=function.divisors)
            case Kind.CONTEXT:
                if arguments and arguments[0].kind is Kind.FUNCTION:
                    arguments[0].ref[0].effects.append(function)
                    return arguments[0]
                return function
            case Kind.INSTANCE:
                instance = self.instance_of(function)
                own = instance.cls.find("__call__") if instance is not None else None
                if own is not None:
                    return self._function(node, Value(Kind.FUNCTION, ref=(own, function)), arguments, keywords)
                return self._method(node, function, "__call__", arguments, keywords)
        if (context := self._context_of_one(node, function.alternatives, arguments, keywords)) is not None:
            return context
        if isinstance(node.func, ast.Attribute):
            receiver = self.evaluate(node.func.value) if result is None else result
            return self._method(node, receiver, node.func.attr, arguments, keywords)
        return self._unknown(node, path, arguments, keywords)

    def _context_of_one(
        self, node: ast.Call, functions: tuple[Value, ...], arguments: list[Value], keywords: dict[str, Value]
    ) -> Value | None:
        """What a call of one of several functions puts around its block, where an imported one makes a context."""
        made = [context_of_call(one.ref, arguments, keywords) for one in functions if one.kind is Kind.EXTERNAL]
        if not any(made):
            return None
        made += [self._function(node, one, arguments, keywords) for one in functions if one.kind is Kind.FUNCTION]
        contexts = [value for value in made if value is not None and value.kind is Kind.CONTEXT]
        effects = NULL.ref.union(*(context.ref for context in contexts))
        known = effects != NULL.ref or len(contexts) == len(functions)
        return Value(Kind.CONTEXT, ref=effects) if known else None

    def _external(
        self, node: ast.Call, name: str, path: str | None, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        last = name.rsplit(".", 1)[-1]
        given = [*arguments, *keywords.values()]
        if (context := context_of_call(name, arguments, keywords)) is not None:
            if last == "set_grad_enabled":
                self._set_grad(context)
            return context
        if name in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
            return Value(Kind.TENSOR, Graph.MAYBE)
        if name == "itertools.repeat" and arguments:
            return Value(Kind.SEQUENCE, items=(arguments[0],))
        if name == "deepspeed.initialize":
            return self._engine(node, keywords.get("model", UNKNOWN))
        if name == "functools.partial" and arguments and arguments[0].kind is Kind.EXTERNAL:
            return self._partial(arguments[0], arguments[1:], keywords)
        if "." not in name and (builtin := self._builtin(node, name, given)) is not None:
            return builtin
        if name in ("torch.autograd.grad", "torch.autograd.backward"):
            return self._functional_backward(node, name, arguments, keywords)
        if last in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value"):
            self.trace.clips.append(Clip(node, self.site(), self.trace.next_order(), gradients=self.state.gradients))
            return NUMBER
        if name == "torch.load":
            return LOADED
        if name == "torch.cuda.empty_cache":
            self.note_call(name, node)
            return NONE
        if name.startswith("torchmetrics."):
            return NUMBER
        if torch_facts.wraps_module(name):
            return self._wrapped(name, given)
        if torch_facts.is_plain(name):
            if name.startswith("collections."):
                return Value(Kind.CONTAINER)
            return flatten(given[0]) if name.startswith("tqdm") and given else NUMBER
        if torch_facts.runs_module(last) and node.args:
            return self.run_argument(node, arguments, keywords)
        kind = torch_facts.kind_of_call(name)
        if kind is Kind.LOSS and combine(given).graph:
            return self._through_loss(given)  # `Loss(out, y)`: a function under the name of a class
        if (
            kind is Kind.OPTIMIZER
            and path is not None
            and name.split(".")[0] != "torch"
            and not self._has_parameters(node)
        ):
            kind = None
        if kind is not None:
            made = self.trace.number("made", id(node), self.way)
            return Value(kind, ref=(name, made), divisors=torch_facts.summed_by(keywords))
        if name.startswith("torch."):
            return self.computed(self._torch_function(name, last, given, keywords))
        if last in ("tqdm", "trange", "track", "prefetch"):
            return flatten(given[0]) if given else UNKNOWN
        return self._unknown(node, path, arguments, keywords, imported=True)

    def _engine(self, node: ast.Call, model: Value) -> Value:
        """DeepSpeed's engine stands for the model; it comes with an optimizer, a loader and a scheduler."""
        made = Value(Kind.MODULE, ref=self.trace.number("made", id(node), self.way))
        return Value(Kind.SEQUENCE, items=(model if model.kind is Kind.MODULE else made, UNKNOWN, UNKNOWN, UNKNOWN))

    def _partial(self, function: Value, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        """A context whose arguments are given beforehand is that context; any other function stays itself."""
        context = context_of_call(function.ref, arguments, keywords)
        return function if context is None else context

    def _has_parameters(self, node: ast.Call) -> bool:
        return any(
            isinstance(child, ast.Attribute) and child.attr in ("parameters", "named_parameters", "param_groups")
            for argument in node.args[:1]
            for child in walk(argument)
        ) or bool(node.args and path_of(node.args[0]) and "param" in (path_of(node.args[0]) or "").lower())

    def _set_grad(self, context: Value) -> None:
        effects: frozenset[str] = context.ref
        self.state.grad = Graph.MAYBE if len(effects) > 1 else (Graph.NO if "no_grad" in effects else Graph.YES)

    def _wrapped(self, name: str, given: list[Value]) -> Value:
        """`nn.DataParallel(x)`: what is wrapped like a network is one, unless more than a guess is known of it."""
        if not given:
            return UNKNOWN
        guessed = given[0].kind is Kind.TENSOR and name != "copy.deepcopy"
        return Value(Kind.MODULE) if guessed or given[0].kind is Kind.UNKNOWN else given[0]

    def _torch_function(self, name: str, last: str, given: list[Value], keywords: dict[str, Value]) -> Value:
        if last in torch_facts.FRESH:
            return PLAIN_TENSOR if _has_integers(given) else FRESH_TENSOR
        if last in torch_facts.INTEGER_RESULTS or last in torch_facts.LEAVING_THE_GRAPH or last in torch_facts.COPIES:
            return PLAIN_TENSOR
        content = combine(given)
        if last == "Variable" and given and given[0].is_tensor:
            return given[0]
        if content.graph is Graph.NO:
            known = last in torch_facts.TORCH_GRAPH_FREE or content.kind is not Kind.UNKNOWN
            return PLAIN_TENSOR if known else UNKNOWN
        if last in torch_facts.INDEX_REDUCTIONS:
            return content if _compares(last, given) else self._values_and_indices(content, len(given))
        if _divisors(last, given[1:]):
            return content._replace(divisors=given[0].divisors | _divisors(last, given[1:]))
        if name.startswith(("torch.distributed.", "torch.utils.", "torch.save", "torch.cuda.", "torch.optim.")):
            return content if "checkpoint" in name else UNKNOWN
        several = last in torch_facts.SEVERAL or name.startswith("torch.distributions.")
        return content._replace(is_tensor=not several, divisors=torch_facts.summed_by(keywords))

    def _values_and_indices(self, content: Value, given: int) -> Value:
        if given < 2:
            return content
        return Value(Kind.SEQUENCE, items=(content._replace(is_tensor=True), PLAIN_TENSOR))

    def _builtin(self, node: ast.Call, name: str, given: list[Value]) -> Value | None:
        if name in torch_facts.NUMBER_BUILTINS:
            return NUMBER
        if name in torch_facts.PASSING_BUILTINS:
            if name == "map" and given and given[0].kind is Kind.FUNCTION:
                content = flatten(self._function(node, given[0], [self._element(value) for value in given[1:]], {}))
                return Value(Kind.CONTAINER, content.graph, content.origins)
            return self._passed(name, given)
        if name in torch_facts.REDUCING_BUILTINS:
            return combine([flatten(value) for value in given])
        if name == "getattr" and given:
            external = given[0].kind is Kind.EXTERNAL and len(given) > 1 and isinstance(given[1].constant, str)
            return Value(Kind.EXTERNAL, ref=f"{given[0].ref}.{given[1].constant}") if external else UNKNOWN
        if name == "super":
            owner = self.frame.function.owner if self.frame.function else None
            return Value(Kind.INSTANCE, ref=None) if owner is None else UNKNOWN
        return None

    def _passed(self, name: str, given: list[Value]) -> Value:
        if not given:
            return Value(Kind.CONTAINER)
        if name == "zip":
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=tuple(self._element(v) for v in given)),))
        if name == "enumerate":
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=(NUMBER, self._element(given[0]))),))
        if name in ("map", "filter"):
            content = combine(given[1:])
            return Value(Kind.CONTAINER, content.graph, content.origins)
        if name == "next":
            return self._element(given[0])
        if given[0].items is not None:
            return given[0]
        content = combine(given)
        return Value(Kind.CONTAINER, content.graph, content.origins, carried_from=content.carried_from)

    def _method(
        self, node: ast.Call, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        given = [*arguments, *keywords.values()]
        path = path_of(node.func)
        if looks_like_training(name) and any(value.kind is Kind.CONTAINER and value.graph for value in given):
            # `agent.update(log_probs, values)`: lists of graphs are terms of a loss out of sight.
            self.trace.backpropagated |= combine(given).origins
        if name in ("configure_optimizer", "configure_optimizers"):
            return UNKNOWN
        if name == "run" and isinstance(receiver.ref, Handed):
            receiver.ref.run(self.state.grad)
        match receiver.kind:
            case Kind.MODULE:
                return self._module_method(node, receiver, name, path, arguments, keywords)
            case Kind.SEQUENCE if name in torch_facts.REDUCTIONS:
                return self._tensor_method(name, flatten(receiver), given)  # `torch.min(first, second).mean()`
            case Kind.CONTAINER | Kind.SEQUENCE:
                return self._container_method(node, receiver, name, given)
            case Kind.ACCELERATOR:
                return self._accelerator_method(node, name, given)
            case Kind.OPTIMIZER | Kind.SCALER | Kind.CONTEXT | Kind.NUMBER if not receiver.graph:
                self._call_back(node, given)
                content = combine(given)
                if receiver.kind is Kind.NUMBER and content.graph:
                    return content.with_graph(Graph.MAYBE)
                return NUMBER
            case Kind.MEMORY:
                return self._memory_method(node, name, arguments, keywords)
        if receiver.kind is Kind.TENSOR or receiver.graph or _divisors(name, given):
            result = self._tensor_method(name, receiver, given)
            if name in ("div_", "mul_") and isinstance(node.func, ast.Attribute):
                self.assign(node.func.value, result, self.statement)
            elif name in ("add_", "sub_") and isinstance(node.func, ast.Attribute) and arguments:
                self._add_in_place(node, node.func.value, result, arguments[0])
            elif self.is_for_effect(node) and receiver.origins <= self.trace.unseen and result.origins:
                # `loss.add_batch(out, y)` of an object that runs the backward itself
                self.assign(node.func.value, result, self.statement)  # type: ignore[attr-defined]
            return result
        if name in STORING:
            return self._store_unknown(node, receiver, name, given)
        moved = name in ("to", "cuda") or (name == "type" and bool(given))
        if not moved and (name in torch_facts.LEAVING_THE_GRAPH or name in torch_facts.INTEGER_RESULTS):
            return NUMBER if not combine(given).graph else UNKNOWN
        if name == "forward" and isinstance(node.func, ast.Attribute):
            base = path_of(node.func.value)
            if self.hints.is_loss(base or ""):
                return self._through_loss(given)
            return self.forward(node, Value(Kind.MODULE, ref=base), base, arguments, keywords)
        base = path_of(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if moved and isinstance(node.func, ast.Attribute) and self._makes_object(node.func.value):
            return Value(Kind.MODULE, ref=self.trace.number("made", id(node), self.way))
        if receiver.kind is Kind.UNKNOWN and base is not None and name not in SAME_MODULE:
            if self.hints.is_module(base) or (base in self.hints.called and looks_like_module(base)):
                return self._module_method(node, Value(Kind.MODULE, ref=base), name, path, arguments, keywords)
        if name in SAME_MODULE and not given and base is not None and self.hints.is_module(base):
            return Value(Kind.MODULE, ref=base)
        if name in SAME_MODULE:
            return receiver
        return self._unknown(node, path, arguments, keywords)

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
        last = path.rsplit(".", 1)[-1]
        imported = value.kind is Kind.EXTERNAL and not str(value.ref).startswith(("torch.", "torchmetrics.", "numpy."))
        return imported and last[:1].isupper() and len(last) > 2 and not looks_like_loss(last)

    def _tensor_method(self, name: str, receiver: Value, given: list[Value]) -> Value:
        converts = name == "type" and bool(given)
        if not converts and (name in torch_facts.INTEGER_RESULTS or name in torch_facts.LEAVING_THE_GRAPH):
            return PLAIN_TENSOR
        if (converts or name == "to") and _has_integers(given):
            return PLAIN_TENSOR
        content = combine([receiver] if name in MOVES else [receiver, *given])
        if name == "sample":  # of a distribution: torch's own draw without a graph
            return content.with_graph(min(content.graph, Graph.MAYBE))
        if not name.endswith("_") and name not in SAME_MODULE:
            content = self.computed(content)
        if name in torch_facts.INDEX_REDUCTIONS:
            return self._values_and_indices(content, 1 + len(given))
        return content._replace(
            divisors=receiver.divisors | _divisors(name, given),
            scaled=receiver.scaled,
            is_tensor=(receiver.is_tensor and name not in torch_facts.SEVERAL) or name in torch_facts.REDUCTIONS,
        )

    def _accelerator_method(self, node: ast.Call, name: str, given: list[Value]) -> Value:
        if name == "prepare":
            return Value(Kind.SEQUENCE, items=tuple(given)) if len(given) > 1 else (given[0] if given else UNKNOWN)
        if name in ("autocast", "accumulate", "no_sync"):
            return NULL
        if name in ("unwrap_model", "setup_module", "setup"):
            return given[0] if given else UNKNOWN
        if name in ("clip_grad_norm_", "clip_grad_value_", "clip_gradients"):
            return NUMBER
        return combine(given)


_BY_METHOD: dict[str, Callable[[Calls, ast.Call, ast.Attribute], Value | None]] = {
    "manual_backward": Calls._manual_backward,
    "requires_grad_": Calls._requires_grad,
    "zero_grad": Calls._zero_grad,
    "step": Calls._step,
    "unscale_": Calls._unscale,
    "detach_": Calls._detach_in_place,
    "enter_context": Calls._enter_context,
    "scale": Calls._scale,
    "train": Calls._mode,
    "eval": Calls._mode,
}


def _compares(name: str, given: list[Value]) -> bool:
    """Whether `torch.min` or `torch.max` takes the smaller or larger of two tensors, and not along a dimension."""
    return name in ("min", "max") and len(given) > 1 and given[1].kind is Kind.TENSOR


def _divisors(name: str, given: list[Value]) -> frozenset[str]:
    """What a function or method of a tensor divides it by: `loss.div(k)`, `loss.mul(1 / k)`."""
    if name in ("div", "div_", "true_divide", "divide"):
        return frozenset({name})
    if name in ("mul", "mul_", "multiply") and given:
        return given[0].divisors
    return frozenset()


def _has_integers(given: list[Value]) -> bool:
    """Whether one of the arguments is a dtype of integers."""
    return any(value.kind is Kind.EXTERNAL and value.ref in torch_facts.INTEGER_DTYPES for value in given)
