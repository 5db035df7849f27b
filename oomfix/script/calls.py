"""Following calls: forwards, backwards, steps, and the functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from oomfix.script import torch_facts
from oomfix.script.contexts import NULL, context_of_call
from oomfix.script.core import Core
from oomfix.script.definitions import Class, Function, Instance
from oomfix.script.hints import looks_like_loss, looks_like_module, looks_like_optimizer, looks_like_scaler
from oomfix.script.names import path_of
from oomfix.script.state import Binding, Frame, Names
from oomfix.script.trace import Backward, Clip, Forward, Step
from oomfix.script.values import (
    NO_ORIGINS,
    NONE,
    NUMBER,
    PLAIN_TENSOR,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    combine,
    flatten,
    join,
)

_SAME_MODULE = frozenset("to cuda cpu half float double bfloat16 requires_grad_ train eval apply share_memory compile".split())
_MODULE_BOOKKEEPING = frozenset(
    "parameters named_parameters modules named_modules children named_children buffers named_buffers state_dict "
    "load_state_dict register_buffer register_parameter register_forward_hook add_module get_parameter zero_grad "
    "save_pretrained save resize_token_embeddings get_parameter_groups no_sync gradient_checkpointing_enable "
    "register_full_backward_hook register_backward_hook initialize init_weights set_input train_mode print_trainable_parameters "
    "set_grad_checkpointing enable_input_require_grads load num_parameters get_input_embeddings init_hidden "
    "initHidden reset_parameters update_learning_rate get_config tie_weights freeze unfreeze summary".split()
)
_STORING = frozenset("append add push store put insert remember record extend appendleft update".split())
_FRAMEWORK_BACKWARD = {Kind.ACCELERATOR: "accelerate"}
_MAX_DEPTH = 24
_MAX_CALLS_OF_ONE_FUNCTION = 24


class Calls(Core):
    """Evaluates calls; records what matters for training."""

    def call(self, node: ast.Call) -> Value:
        """What a call gives, after recording what it does."""
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "backward":
                return self._backward(node)
            special = _BY_METHOD.get(node.func.attr)
            if special is not None and (result := special(self, node, node.func)) is not None:
                return result
        function = self.evaluate(node.func)
        arguments = [self.evaluate(argument) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value) for keyword in node.keywords}
        return self._call_value(node, function, arguments, keywords)

    def _call_value(
        self, node: ast.Call, function: Value, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        path = path_of(node.func)
        match function.kind:
            case Kind.EXTERNAL:
                return self._external(node, function.ref, path, arguments, keywords)
            case Kind.FUNCTION:
                return self._function(node, function, arguments, keywords)
            case Kind.CLASS:
                return self._instantiate(node, function.ref, arguments, keywords)
            case Kind.MODULE:
                if looks_like_loss(path or ""):
                    return self._through_loss([*arguments, *keywords.values()])
                return self._forward(node, function, path, arguments, keywords, method=self._own(function, "forward"))
            case Kind.LOSS:
                return self._through_loss([*arguments, *keywords.values()])
            case Kind.CONTEXT:
                return function
            case Kind.INSTANCE:
                return self._method(node, function, "__call__", arguments, keywords)
        if isinstance(node.func, ast.Attribute):
            receiver = self.evaluate(node.func.value)
            return self._method(node, receiver, node.func.attr, arguments, keywords)
        return self._unknown(node, path, arguments, keywords)

    # Calls of imported and unknown functions

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
        if "." not in name and (builtin := self._builtin(node, name, given)) is not None:
            return builtin
        if name in ("torch.autograd.grad", "torch.autograd.backward"):
            return self._functional_backward(node, name, arguments, keywords)
        if last in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value"):
            self.trace.clips.append(
                Clip(node, self.site(), self.trace.next_order(), gradients=self.state.gradients)
            )
            return NUMBER
        if name == "torch.cuda.empty_cache":
            self.note_call(name, node)
            return NONE
        if torch_facts.wraps_module(name):
            return self._wrapped(given)
        if torch_facts.is_plain(name):
            if name.startswith("collections."):
                return Value(Kind.CONTAINER)
            return flatten(given[0]) if name.startswith("tqdm") and given else NUMBER
        kind = torch_facts.kind_of_call(name)
        if kind is Kind.OPTIMIZER and path is not None and name.split(".")[0] != "torch" and not self._has_parameters(node):
            kind = None
        if kind is not None:
            return Value(kind, ref=(name, self.trace.number("made", id(node), self.way)))
        if name.startswith("torch."):
            return self._torch_function(name, last, given, keywords)
        if last in ("tqdm", "trange", "track", "prefetch"):
            return flatten(given[0]) if given else UNKNOWN
        return self._unknown(node, path, arguments, keywords, imported=True)

    def _has_parameters(self, node: ast.Call) -> bool:
        return any(
            isinstance(child, ast.Attribute) and child.attr in ("parameters", "named_parameters", "param_groups")
            for argument in node.args[:1]
            for child in ast.walk(argument)
        ) or bool(node.args and path_of(node.args[0]) and "param" in (path_of(node.args[0]) or "").lower())

    def _set_grad(self, context: Value) -> None:
        effects: frozenset[str] = context.ref
        self.state.grad = (
            Graph.MAYBE if len(effects) > 1 else (Graph.NO if "no_grad" in effects else Graph.YES)
        )

    def _wrapped(self, given: list[Value]) -> Value:
        if given and given[0].kind in (Kind.MODULE, Kind.INSTANCE):
            return given[0]
        return Value(Kind.MODULE) if given and given[0].kind is Kind.UNKNOWN else (given[0] if given else UNKNOWN)

    def _torch_function(self, name: str, last: str, given: list[Value], keywords: dict[str, Value]) -> Value:
        if last in torch_facts.INTEGER_RESULTS or last in torch_facts.LEAVING_THE_GRAPH:
            return PLAIN_TENSOR
        content = combine(given)
        if content.graph is Graph.NO:
            known = last in torch_facts.TORCH_GRAPH_FREE or content.kind is not Kind.UNKNOWN
            return PLAIN_TENSOR if known else UNKNOWN
        if last in torch_facts.INDEX_REDUCTIONS:
            return self._values_and_indices(content, len(given))
        if name.startswith(("torch.distributed.", "torch.utils.", "torch.save", "torch.cuda.", "torch.optim.")):
            return content if "checkpoint" in name else UNKNOWN
        return content

    def _values_and_indices(self, content: Value, given: int) -> Value:
        if given < 2:
            return content
        return Value(Kind.SEQUENCE, items=(content, PLAIN_TENSOR))

    def _builtin(self, node: ast.Call, name: str, given: list[Value]) -> Value | None:
        if name in torch_facts.NUMBER_BUILTINS:
            return NUMBER
        if name in torch_facts.PASSING_BUILTINS:
            return self._passed(name, given)
        if name in torch_facts.REDUCING_BUILTINS:
            return combine([flatten(value) for value in given])
        if name == "getattr" and given:
            return UNKNOWN
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

    def _element(self, value: Value) -> Value:
        if value.items:
            result = value.items[0]
            for item in value.items[1:]:
                result = join(result, item)
            return result
        if value.graph:
            return Value(Kind.TENSOR, value.graph, value.origins, carried_from=value.carried_from)
        return UNKNOWN

    def _unknown(
        self,
        node: ast.Call,
        path: str | None,
        arguments: list[Value],
        keywords: dict[str, Value],
        imported: bool = False,
    ) -> Value:
        """A call of something out of sight: its uses and its name say what it is."""
        given = [*arguments, *keywords.values()]
        self._call_back(node, given)
        content = combine(given)
        last = (path or "").rsplit(".", 1)[-1]
        if path is not None:
            if self.hints.is_module(path) or (not imported and looks_like_module(path)):
                if not looks_like_loss(path):
                    return self._forward(node, Value(Kind.MODULE, ref=path), path, arguments, keywords)
            if torch_facts.kind_of_call(path) is Kind.LOSS and last[:1].isupper() and not content.graph:
                return Value(Kind.LOSS)
        returned = self._as_hinted(path, content)
        if returned is not None:
            return returned
        if content.graph:
            graph = content.graph if looks_like_loss(last) and last.islower() else Graph.MAYBE
            return Value(Kind.TENSOR, graph, content.origins, carried_from=content.carried_from)
        if self._made_to_be_module(node):
            return Value(Kind.MODULE, ref=self.trace.number("made", id(node), self.way))
        return UNKNOWN

    def _made_to_be_module(self, node: ast.Call) -> bool:
        """The call is assigned to a path that is used as a network."""
        statement = self.statement
        if not isinstance(statement, ast.Assign) or statement.value is not node or len(statement.targets) != 1:
            return False
        path = path_of(statement.targets[0])
        return path is not None and path in self.hints.modules and path in self.hints.called

    def _as_hinted(self, path: str | None, content: Value) -> Value | None:
        """What an unseen helper returns, when elsewhere in the file its result is backpropagated."""
        positions = self.hints.graph_callees.get(path or "")
        if positions is None or self.state.grad is Graph.NO:
            return None
        graph = self.state.grad
        if None in positions:
            return Value(Kind.TENSOR, graph, content.origins, carried_from=content.carried_from)
        size = max(position for position in positions if position is not None) + 1
        certain = Value(Kind.TENSOR, graph, content.origins)
        other = Value(Kind.TENSOR, Graph.MAYBE, content.origins)
        statement = self.statement
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            size = max(size, len(statement.targets[0].elts))
        return Value(Kind.SEQUENCE, items=tuple(certain if i in positions else other for i in range(size)))

    def _call_back(self, node: ast.Call, given: list[Value]) -> None:
        """A function of the file handed to something out of sight is called by it."""
        for value in given:
            if value.kind is Kind.FUNCTION:
                self._function(node, value, [], {})

    def _through_loss(self, given: list[Value]) -> Value:
        content = combine(given)
        graph = content.graph if self.state.grad is not Graph.NO else Graph.NO
        return Value(Kind.TENSOR, graph, content.origins if graph else NO_ORIGINS, carried_from=content.carried_from)

    # Forwards and backwards

    def _forward(
        self,
        node: ast.Call,
        module: Value,
        path: str | None,
        arguments: list[Value],
        keywords: dict[str, Value],
        direct: bool = True,
        method: Function | None = None,
    ) -> Value:
        """Record a forward; `method` is the module's own code for it, where that is in the file."""
        content = combine([*arguments, *keywords.values()])
        if self.enclosing_forward is not None and path not in ("self", "self.module"):
            return self._part_of_forward(content)
        origin = self.trace.number("forward", id(node), self.way)
        grad = self.state.grad
        self.trace.forwards[origin] = Forward(
            node=node,
            site=self.site(),
            order=self.trace.next_order(),
            origin=origin,
            path=path,
            evaluating=self.state.evaluating.get(self._identity(module, path), False),
            carried=content.carried_from,
            direct=direct,
        )
        for number in content.carried_from:
            self.trace.carries.setdefault(number, self._carrying[number])
        self.state.spent -= {origin}
        if grad is Graph.NO:
            return PLAIN_TENSOR
        whole = Value(Kind.TENSOR, grad, content.origins | {origin}, carried_from=content.carried_from)
        if method is None:
            return whole
        return _with_structure(self._inside(node, method, module, arguments, keywords, origin), whole)

    def _part_of_forward(self, content: Value) -> Value:
        assert self.enclosing_forward is not None
        if self.state.grad is Graph.NO:
            return PLAIN_TENSOR
        return Value(Kind.TENSOR, self.state.grad, content.origins | {self.enclosing_forward})

    def _inside(
        self,
        node: ast.Call,
        method: Function,
        module: Value,
        arguments: list[Value],
        keywords: dict[str, Value],
        origin: int,
    ) -> Value:
        """Follow a module's own code for what it returns and keeps; its calls are part of the one forward."""
        outer = self.enclosing_forward, self.enclosing_depth
        self.enclosing_forward, self.enclosing_depth = origin, len(self.loops)
        returned = self._follow_function(node, method, module, arguments, keywords)
        self.enclosing_forward, self.enclosing_depth = outer
        return returned

    _carrying: dict[int, tuple[ast.stmt, ast.For | ast.AsyncFor | ast.While]]

    def _own(self, module: Value, name: str) -> Function | None:
        """A module's own method, where its class is in the file and it does not train by itself."""
        instance = self.instance_of(module)
        method = instance.cls.find(name) if instance is not None else None
        return method if method is not None and self._is_part_of_forward(method) else None

    def _identity(self, module: Value, path: str | None) -> object:
        if isinstance(module.ref, Instance):
            return module.ref.number
        return module.ref if module.ref is not None else path

    def _backward(self, node: ast.Call) -> Value:
        assert isinstance(node.func, ast.Attribute)
        receiver = self.evaluate(node.func.value)
        arguments = [self.evaluate(argument) for argument in node.args]
        for keyword in node.keywords:
            self.evaluate(keyword.value)
        framework = self._backward_framework(node, receiver)
        method = receiver.ref.cls.find("backward") if isinstance(receiver.ref, Instance) else None
        if method is not None:
            return self._function(node, Value(Kind.FUNCTION, ref=(method, receiver)), arguments, {})
        takes_argument = bool(arguments) and (framework is not None or not receiver.graph)
        root_node = node.args[0] if takes_argument else node.func.value
        root = flatten(arguments[0] if takes_argument else receiver)
        self._record_backward(node, root_node, root, framework)
        path = path_of(root_node)
        if path is not None and (binding := self.binding_of(root_node)) is not None:
            value = binding.value
            if value.kind in (Kind.UNKNOWN, Kind.TENSOR) and value.graph is not Graph.YES:
                certain = Value(Kind.TENSOR, self.state.grad, value.origins)
                self.assign(root_node, certain, binding.statement, binding.loops)
        return NONE

    def _backward_framework(self, node: ast.Call, receiver: Value) -> str | None:
        assert isinstance(node.func, ast.Attribute)
        if receiver.kind is Kind.ACCELERATOR:
            return "accelerate" if "ccelerat" in str(receiver.ref[0] if receiver.ref else "") else "fabric"
        path = (path_of(node.func.value) or "").lower()
        if not node.args:
            return "apex" if self.apex else None
        for word, framework in (("accelerator", "accelerate"), ("fabric", "fabric"), ("engine", "deepspeed"),
                                ("memory", "oomfix")):
            if word in path.rsplit(".", 1)[-1]:
                return framework
        return "deepspeed" if receiver.kind is Kind.MODULE else None

    def _record_backward(self, node: ast.Call, root_node: ast.expr, root: Value, framework: str | None) -> None:
        retains = any(
            keyword.arg == "retain_graph"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is True
            for keyword in node.keywords
        )
        binding = self.binding_of(root_node) if path_of(root_node) is not None else None
        made_here = binding is None or binding.statement is not None
        self.trace.backwards.append(
            Backward(
                node=node,
                site=self.site(),
                order=self.trace.next_order(),
                origins=root.origins,
                divisors=root.divisors,
                scaled=root.scaled,
                retains=retains,
                carried=root.carried_from,
                framework=framework,
                made_here=made_here,
            )
        )
        self.trace.backpropagated |= root.origins
        if not retains:
            self.state.spent |= root.origins
        self.state.gradients = frozenset({"scaled" if root.scaled else "plain"})
        if framework not in (None, "oomfix"):
            self.trace.accelerated.update(self.loops[-1:])

    def _functional_backward(
        self, node: ast.Call, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        root = flatten(arguments[0] if arguments else keywords.get("outputs", keywords.get("tensors", UNKNOWN)))
        event = Backward(
            node=node, site=self.site(), order=self.trace.next_order(), origins=root.origins, divisors=root.divisors,
            scaled=root.scaled, retains=False, carried=root.carried_from, framework=None, made_here=True,
            is_grad_call=name.endswith(".grad"),
        )
        self.trace.backwards.append(event)
        if not event.is_grad_call:
            self.trace.backpropagated |= root.origins
            self.state.gradients = frozenset({"plain"})
            return NONE
        creates = keywords.get("create_graph", NUMBER).constant is True
        if creates:
            return root
        # A gradient taken without a graph of its own has served its purpose: the forward was differentiated.
        self.trace.backpropagated |= root.origins
        return PLAIN_TENSOR

    # Methods by name, whatever the receiver

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
        self.trace.steps.append(
            Step(node, self.site(), self.trace.next_order(), optimizer=optimizer, scaled=scaler)
        )
        return NUMBER

    def _is_optimizer(self, receiver: Value, path: str) -> bool:
        if receiver.kind is Kind.OPTIMIZER:
            return True
        return receiver.kind in (Kind.UNKNOWN, Kind.MODULE) and looks_like_optimizer(path)

    def _unscale(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        self.evaluate(function.value)
        if "scaled" in self.state.gradients:
            self.state.gradients = (self.state.gradients - {"scaled"}) | {"unscaled"}
        self.note_call("unscale_", node)
        return NONE

    def _scale(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        path = path_of(function.value) or ""
        if len(node.args) != 1 or not (receiver.kind is Kind.SCALER or looks_like_scaler(path)):
            return None
        return replace(flatten(self.evaluate(node.args[0])), scaled=True)

    def _mode(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        receiver = self.evaluate(function.value)
        path = path_of(function.value)
        if isinstance(receiver.ref, Instance) and receiver.ref.cls.find(function.attr) is not None:
            return None
        if receiver.kind not in (Kind.MODULE, Kind.UNKNOWN, Kind.INSTANCE) or len(node.args) > 1:
            return None
        evaluating = function.attr == "eval"
        if node.args:
            truth = self.evaluate(node.args[0]).constant
            evaluating = truth is False if function.attr == "train" else True
        self.state.evaluating[self._identity(receiver, path)] = evaluating
        return receiver

    # Methods by the kind of receiver

    def _method(
        self, node: ast.Call, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        given = [*arguments, *keywords.values()]
        path = path_of(node.func)
        match receiver.kind:
            case Kind.MODULE:
                return self._module_method(node, receiver, name, path, arguments, keywords)
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
            case Kind.TENSOR:
                return self._tensor_method(name, receiver, given)
        if receiver.graph:
            return self._tensor_method(name, receiver, given)
        if name in _STORING:
            return self._store_unknown(node, receiver, name, given)
        if name in torch_facts.LEAVING_THE_GRAPH or name in torch_facts.INTEGER_RESULTS:
            return NUMBER if not combine(given).graph else UNKNOWN
        if name == "forward" and isinstance(node.func, ast.Attribute):
            base = path_of(node.func.value)
            return self._forward(node, Value(Kind.MODULE, ref=base), base, arguments, keywords)
        base = path_of(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if name in ("to", "cuda") and isinstance(node.func, ast.Attribute) and self._makes_object(node.func.value):
            return Value(Kind.MODULE, ref=self.trace.number("made", id(node), self.way))
        if receiver.kind is Kind.UNKNOWN and base is not None and name not in _SAME_MODULE:
            if self.hints.is_module(base) or (base in self.hints.called and looks_like_module(base)):
                return self._module_method(node, Value(Kind.MODULE, ref=base), name, path, arguments, keywords)
        if name in _SAME_MODULE and not given and base is not None and self.hints.is_module(base):
            return Value(Kind.MODULE, ref=base)
        if name in _SAME_MODULE:
            return receiver
        return self._unknown(node, path, arguments, keywords)

    def _makes_object(self, node: ast.expr) -> bool:
        """`GreedySearch(encoder, decoder)`: a call of an imported class, of which only modules are moved to a device."""
        if not isinstance(node, ast.Call) or (path := path_of(node.func)) is None:
            return False
        value = self.evaluate(node.func)
        last = path.rsplit(".", 1)[-1]
        imported = value.kind is Kind.EXTERNAL and not str(value.ref).startswith(("torch.", "numpy."))
        return imported and last[:1].isupper() and not last.isupper() and not looks_like_loss(last)

    def _module_method(
        self, node: ast.Call, receiver: Value, name: str, path: str | None, arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        if name == "forward" and isinstance(node.func, ast.Attribute):
            method = self._own(receiver, "forward")
            return self._forward(node, receiver, path_of(node.func.value), arguments, keywords, method=method)
        if name in _SAME_MODULE:
            return receiver
        if name in _MODULE_BOOKKEEPING or name.startswith(("get_", "set_", "register_", "load_", "save_", "init_")):
            if name == "init_hidden" or name.startswith("get_"):
                return UNKNOWN
            return NUMBER
        content = combine([*arguments, *keywords.values()])
        if content.graph and looks_like_loss(name):
            return self._through_loss([*arguments, *keywords.values()])
        return self._forward(node, receiver, path, arguments, keywords, direct=looks_like_module(name))

    def _tensor_method(self, name: str, receiver: Value, given: list[Value]) -> Value:
        if name in torch_facts.INTEGER_RESULTS or name in torch_facts.LEAVING_THE_GRAPH:
            return PLAIN_TENSOR
        content = combine([receiver, *given])
        if name in torch_facts.INDEX_REDUCTIONS:
            return self._values_and_indices(content, 1 + len(given))
        divisors = receiver.divisors | ({"div"} if name in ("div", "div_", "true_divide") else set())
        return replace(content, divisors=divisors, scaled=receiver.scaled)

    def _container_method(self, node: ast.Call, receiver: Value, name: str, given: list[Value]) -> Value:
        assert isinstance(node.func, ast.Attribute)
        if name in _STORING and node.args:
            self._put(node, node.func.value, receiver, given)
            return NONE
        if name in ("copy", "values", "keys", "union"):
            return receiver
        if name == "items" and receiver.graph:
            entry = Value(Kind.TENSOR, receiver.graph, receiver.origins)
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=(NUMBER, entry)),))
        if name == "clear":
            self.assign(node.func.value, Value(Kind.CONTAINER), self.statement)
            return NONE
        if receiver.graph:
            return self._element(receiver) if name in ("pop", "popleft", "get") else flatten(receiver)
        return UNKNOWN

    def _put(self, node: ast.Call, target: ast.expr, receiver: Value, given: list[Value]) -> None:
        content = combine(given)
        if not content.graph:
            return
        binding = self.binding_of(target)
        loops = binding.loops if binding is not None else self._loops_of_root(target)
        kept = self.keep(node, path_of(target) or ast.unparse(target), node.args[-1], content, "store", loops)
        base = flatten(receiver)
        grown = Value(Kind.CONTAINER, max(base.graph, content.graph), base.origins | content.origins | kept)
        if path_of(target) is not None:
            self.assign(target, grown, binding.statement if binding else None, loops)
        elif isinstance(target, ast.Subscript):
            self._grow_root(target, grown)

    def _loops_of_root(self, target: ast.expr) -> tuple[ast.For | ast.AsyncFor | ast.While, ...]:
        """The loops around the making of what an attribute or entry belongs to."""
        while isinstance(target, ast.Attribute | ast.Subscript | ast.Call):
            target = target.func if isinstance(target, ast.Call) else target.value
            if (binding := self.binding_of(target)) is not None:
                return binding.loops
        return ()

    def _grow_root(self, target: ast.Subscript, content: Value) -> None:
        """`lists[name].append(x)`: what `lists` holds carries the graph too."""
        root: ast.expr = target
        while isinstance(root, ast.Subscript):
            root = root.value
        binding = self.binding_of(root)
        if binding is not None and path_of(root) is not None:
            base = flatten(binding.value)
            grown = Value(Kind.CONTAINER, max(base.graph, content.graph), base.origins | content.origins)
            self.assign(root, grown, binding.statement, binding.loops)

    def _store_unknown(self, node: ast.Call, receiver: Value, name: str, given: list[Value]) -> Value:
        assert isinstance(node.func, ast.Attribute)
        if name in ("append", "extend", "appendleft", "insert") and node.args:
            self._put(node, node.func.value, receiver, given)
        else:
            for forward in self.trace.forwards_of(combine(given).origins):
                forward.escaped = True
        return NONE

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

    def _memory_method(
        self, node: ast.Call, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        if name in ("forward_backward", "evaluate") and arguments and arguments[0].kind is Kind.FUNCTION:
            return self._memory_forward(node, name, arguments, keywords)
        if name == "prepare" and arguments:
            return arguments[0]
        if name == "accumulate" and arguments:
            return arguments[0]
        if name == "autocast":
            return Value(Kind.CONTEXT, ref=frozenset({"autocast:unknown"}))
        return UNKNOWN

    def _memory_forward(
        self, node: ast.Call, name: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        autocast, grad = self.autocast, self.state.grad
        self.autocast = "unknown"
        if name == "evaluate":
            self.state.grad = Graph.NO
        returned = self._function(node, arguments[0], arguments[1:], keywords)
        self.autocast, self.state.grad = autocast, grad
        if name == "forward_backward":
            loss = returned.items[0] if returned.items else returned
            self._record_backward(node, node.args[0], flatten(loss), "oomfix")
        if returned.items is not None:
            return Value(Kind.SEQUENCE, items=tuple(PLAIN_TENSOR for _ in returned.items))
        return PLAIN_TENSOR

    # Functions and classes of the file

    def _function(
        self, node: ast.Call, value: Value, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Follow a call into a function of the file."""
        function, bound = value.ref
        assert isinstance(function, Function)
        receiver: Value | None = bound
        if receiver is not None and not function.is_static:
            if receiver.kind is Kind.MODULE and self._is_part_of_forward(function):
                if self.enclosing_forward is None and not self._is_bare(function):
                    return self._forward(node, receiver, path_of(node.func), arguments, keywords, method=function)
            return self._follow_function(node, function, receiver, arguments, keywords)
        return self._follow_function(node, function, None, arguments, keywords)

    def _follow_function(
        self,
        node: ast.Call,
        function: Function,
        receiver: Value | None,
        arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        if receiver is not None:
            arguments = [receiver, *arguments]
        if self._too_deep(function):
            return UNKNOWN
        function.calls += 1
        frame = Frame(
            function=function,
            state=self.state.entering(self._arguments(function, arguments, keywords)),
            closure=function.closure,
            caller=self.frame,
            call=node,
            instance=self.instance_of(receiver) if receiver is not None else None,
        )
        return self._run(frame, function, node)

    def _is_part_of_forward(self, function: Function) -> bool:
        """A method of a module that is part of its forward: it trains nothing, and runs neither itself nor a loader."""
        whole = {"self", "self.module"} if function.name == "forward" else {"self", "self.module", "self.forward"}
        parameters = {argument.arg for argument in function.node.args.args[1:]}
        for child in ast.walk(function.node):
            if isinstance(child, ast.Call):
                if isinstance(child.func, ast.Attribute) and child.func.attr in ("backward", "zero_grad"):
                    return False
                if path_of(child.func) in whole:
                    return False
            elif isinstance(child, ast.For) and function.name != "forward":
                if any(isinstance(name, ast.Name) and name.id in parameters for name in ast.walk(child.iter)):
                    return False
        return True

    def _is_bare(self, function: Function) -> bool:
        """A method that calls nothing of its own module: bookkeeping, or a loss written as a method."""
        return not any(
            isinstance(child, ast.Call) and (path_of(child.func) or "").startswith("self.")
            for child in ast.walk(function.node)
        )

    def _too_deep(self, function: Function) -> bool:
        depth, frame = 0, self.frame
        while frame.caller is not None:
            if frame.function is function:
                return True
            depth, frame = depth + 1, frame.caller
        return depth > _MAX_DEPTH or function.calls > _MAX_CALLS_OF_ONE_FUNCTION

    def _arguments(self, function: Function, arguments: list[Value], keywords: dict[str, Value]) -> Names:
        names = Names()
        parameters = function.node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        defaults = dict(zip(reversed(positional), reversed(parameters.defaults), strict=False))
        defaults |= {
            parameter: default
            for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if default is not None
        }
        for parameter, value in zip(positional, arguments, strict=False):
            names.bind(parameter.arg, Binding(value, self.loops, None))
        for parameter in [*positional, *parameters.kwonlyargs]:
            if parameter.arg in keywords:
                names.bind(parameter.arg, Binding(keywords[parameter.arg], self.loops, None))
            elif parameter.arg not in names:
                default = defaults.get(parameter)
                literal = isinstance(default, ast.Constant) and "**" not in keywords
                value = self.evaluate(default) if literal and default is not None else UNKNOWN
                names.bind(parameter.arg, Binding(value, self.loops, None))
        rest = combine(arguments[len(positional):])
        if parameters.vararg is not None:
            value = Value(Kind.CONTAINER, rest.graph, rest.origins)
            names.bind(parameters.vararg.arg, Binding(value, self.loops, None))
        if parameters.kwarg is not None:
            names.bind(parameters.kwarg.arg, Binding(UNKNOWN, self.loops, None))
        return names

    def _run(self, frame: Frame, function: Function, node: ast.expr) -> Value:
        raise NotImplementedError

    def _instantiate(
        self, node: ast.Call, cls: Class, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        number = self.trace.number("made", id(node), self.way)
        instance = Instance(cls, number)
        kind = Kind.INSTANCE
        if cls.is_module:
            kind = Kind.LOSS if looks_like_loss(cls.name) else Kind.MODULE
        value = Value(kind, ref=instance)
        constructor = cls.find("__init__")
        if constructor is not None:
            self._function(node, Value(Kind.FUNCTION, ref=(constructor, value)), arguments, keywords) \
                if kind is Kind.INSTANCE else self._construct_module(node, constructor, value, arguments, keywords)
        if any("Namespace" in name or "NamedTuple" in name for name in cls.base_names):
            return UNKNOWN
        return value

    def _construct_module(
        self, node: ast.Call, constructor: Function, value: Value, arguments: list[Value], keywords: dict[str, Value]
    ) -> None:
        if self._too_deep(constructor):
            return
        frame = Frame(
            function=constructor,
            state=self.state.entering(self._arguments(constructor, [value, *arguments], keywords)),
            closure=constructor.closure,
            caller=self.frame,
            call=node,
            instance=self.instance_of(value),
        )
        self._run(frame, constructor, node)


_BY_METHOD: dict[str, Callable[[Calls, ast.Call, ast.Attribute], Value | None]] = {
    "zero_grad": Calls._zero_grad,
    "step": Calls._step,
    "unscale_": Calls._unscale,
    "scale": Calls._scale,
    "train": Calls._mode,
    "eval": Calls._mode,
}


def _with_structure(returned: Value, whole: Value) -> Value:
    """The result of a forward, item by item where its own code shows that some carry no graph."""
    if returned.items is not None:
        return Value(Kind.SEQUENCE, items=tuple(_with_structure(item, whole) for item in returned.items))
    if returned.kind is Kind.NUMBER or (returned.kind is Kind.TENSOR and returned.graph is Graph.NO):
        return returned
    return whole
