"""Following calls of what is imported: torch's own functions, builtins, and other libraries."""

from __future__ import annotations

import ast
from functools import reduce

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Inherited
from oomfix.script.facts.named_like import looks_like_loss, looks_like_module
from oomfix.script.facts.trace import Clip
from oomfix.script.facts.values import (
    FRESH_TENSOR,
    LOADED,
    NONE,
    NUMBER,
    PLAIN_TENSOR,
    UNKNOWN,
    Beforehand,
    Given,
    Graph,
    Kind,
    Value,
    combine,
    constant,
    divided_alike,
    flatten,
    join,
)
from oomfix.script.interpreter.contexts import NULL, context_of_call
from oomfix.script.interpreter.methods import Methods
from oomfix.script.interpreter.state import Binding
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import walk


class Externals(Methods):
    """Knows what a call of something imported gives, by its qualified name."""

    def _context_of_one(self, node: ast.Call, functions: tuple[Value, ...], given: Given) -> Value | None:
        """What a call of one of several functions puts around its block, where an imported one makes a context."""
        made = [context_of_call(node, one.ref, given) for one in functions if one.kind is Kind.EXTERNAL]
        if not any(made):
            return None
        made += [self._function(node, one, given) for one in functions if one.kind is Kind.FUNCTION]
        contexts = [value for value in made if value is not None and value.kind is Kind.CONTEXT]
        effects = NULL.ref.union(*(context.ref for context in contexts))
        known = effects != NULL.ref or len(contexts) == len(functions)
        return Value(Kind.CONTEXT, ref=effects) if known else None

    def _external(self, node: ast.Call, name: str, path: str | None, given: Given) -> Value:
        if (context := context_of_call(node, name, given)) is not None:
            if last_of(name) == "set_grad_enabled":
                self._set_grad(context)
            return context
        if (known := self._of_one_name(node, name, given)) is not None:
            return known
        if "." not in name and (builtin := self._builtin(node, name, given.all)) is not None:
            return builtin
        if (known := self._of_a_library(node, name, given)) is not None:
            return known
        if (result := self._runs_what_it_is_given(node, name, given)) is not None:
            return result
        if (made := self._of_a_kind(node, name, path, given)) is not None:
            return made
        return self._computed_by_import(node, name, path, given)

    def _of_a_library(self, node: ast.Call, name: str, given: Given) -> Value | None:
        """What functions give that are known by a part of their name, and run no network."""
        last, values = last_of(name), given.all
        if last in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value"):
            self.trace.clips.append(Clip(node, self.site(), self.trace.next_order(), gradients=self.state.gradients))
            return NUMBER
        if name.startswith("torchmetrics."):
            return NUMBER
        if torch_facts.wraps_module(name):
            return self._wrapped(name, values)
        without_weights = name == "torch.nn.Sequential" and values and all(part.kind is Kind.LOSS for part in values)
        if torch_facts.has_no_weights(name) or without_weights:
            return Value(Kind.LOSS)  # as of a criterion, what it gives carries no graph but that of what goes in
        if name.startswith("numpy."):
            content = combine(values)
            self.trace.read_by_numpy |= content.origins
            if content.graph and self.is_made_to_be_backpropagated():
                return content.with_graph(Graph.MAYBE)  # an array of tensors, summed up
        if not torch_facts.is_plain(name):
            return None
        if name == "collections.OrderedDict":
            return self._passed("dict", values)
        if name.startswith("collections."):
            return Value(Kind.CONTAINER)
        return flatten(values[0]) if name.startswith("tqdm") and values else NUMBER

    def _runs_what_it_is_given(self, node: ast.Call, name: str, given: Given) -> Value | None:
        """What `checkpoint(block, x)` and `odeint(net, start, times)` give; None for what runs no argument."""
        if torch_facts.runs_module(last_of(name)) and node.args:
            return self.run_argument(node, given)
        if self.solves_equation_of_network(node, last_of(name), given):
            return self.run_argument(node, given, direct=False)
        if torch_facts.runs_what_it_is_given(name) and self._is_network_or_function(node, given):
            return self.run_argument(node, given)
        return None

    def _computed_by_import(self, node: ast.Call, name: str, path: str | None, given: Given) -> Value:
        """What torch computes, a method of an imported network, or what nothing but its name is known of."""
        last = last_of(name)
        if name.startswith("torch.") or torch_facts.is_functional_transform(name):
            computed = self.computed(self._torch_function(name, last, given))
            if looks_like_loss(last):
                self.trace.judged.add(computed.origins)
            return computed
        if isinstance(node.func, ast.Attribute) and (network := self._imported_network(node.func.value)) is not None:
            return self._module_method(node, network, last, path, given)
        if last in ("tqdm", "trange", "track", "prefetch"):
            return flatten(given.all[0]) if given.all else UNKNOWN
        if (path or "").startswith("self.") and not looks_like_module(last):
            path = last  # `self.augment = fgsm_attack`: in another class of the file `self.augment` may be a network
        unseen = self._unknown(node, path, given, imported=True)
        return Value(Kind.TRAINER) if torch_facts.is_trainer(name) else unseen

    def _imported_network(self, node: ast.expr) -> Value | None:
        """`vae` of `from project.models import vae`, which is asked for its parameters."""
        path = path_of(node)
        if f"{path}.parameters" not in self.hints.called or self.evaluate(node).kind is not Kind.EXTERNAL:
            return None
        return Value(Kind.MODULE, ref=path)

    def _is_network_or_function(self, node: ast.Call, given: Given) -> bool:
        """Whether the first argument is a network, or a function of the file."""
        if not node.args:
            return False
        called = given.positional[0]
        return called.kind is Kind.FUNCTION or self.is_network(node.args[0], called)

    def _of_one_name(self, node: ast.Call, name: str, given: Given) -> Value | None:
        """What a function that is known by its whole name gives."""
        arguments = given.positional
        match name:
            case "torch.nn.Parameter" | "torch.nn.parameter.Parameter":
                return Value(Kind.TENSOR, Graph.MAYBE)
            case "torch.autograd.grad" | "torch.autograd.backward":
                return self._functional_backward(node, name, given)
            case "torch.load":
                return LOADED
            case "torch.hub.load" if _loads_a_detector(given):
                return Value(Kind.LOSS)  # like a criterion, it is no network that a pass runs with gradients
            case "torch.cuda.empty_cache":
                self.note_call(name, node)
                return NONE
            case "deepspeed.initialize":
                return self._engine(node, given.keywords.get("model", UNKNOWN))
            case "higher.innerloop_ctx" if arguments:
                network = arguments[0] if arguments[0].kind is Kind.MODULE else Value(Kind.MODULE)
                return Value(Kind.SEQUENCE, items=(network, Value(ref=torch_facts.DIFFERENTIABLE_OPTIMIZER)))
            case "itertools.repeat" if arguments:
                return Value(Kind.SEQUENCE, items=(arguments[0],))
            case "functools.partial" if arguments and node.args:
                return self._partial(node, self.as_network(node.args[0], arguments[0]), given.rest)
            case "torch.vmap" | "torch.func.vmap" | "functorch.vmap" if arguments and node.args:
                called = self.as_network(node.args[0], arguments[0])
                return called if called.kind in (Kind.MODULE, Kind.FUNCTION) else UNKNOWN
            case "copy.deepcopy" | "torch.optim.swa_utils.AveragedModel" if (
                arguments and arguments[0].kind is Kind.MODULE
            ):
                return self.copied(arguments[0], self.number_of_made(node))
        return None

    def _of_a_kind(self, node: ast.Call, name: str, path: str | None, given: Given) -> Value | None:
        """An optimizer, a network, a criterion..., by what its name says."""
        kind = torch_facts.kind_of_call(name)
        if kind is Kind.LOSS and combine(given.all).graph:
            return self._through_loss(given.all)  # `Loss(out, y)`: a function under the name of a class
        elsewhere = path is not None and name.split(".")[0] != "torch"
        if kind is None or (kind is Kind.OPTIMIZER and elsewhere and not self._has_parameters(node)):
            return None
        made = Value(kind, ref=(name, self.number_of_made(node)), divisors=torch_facts.summed_by(given.keywords))
        if name == "torch.nn.Sequential" and self._are_frozen_parts(node.args):
            self.state.frozen[made.ref] = True
        return made

    def _are_frozen_parts(self, parts: list[ast.expr]) -> bool:
        """`*list(net.children())[:-1]` of a frozen network, and nothing else."""
        node = parts[0].value if len(parts) == 1 and isinstance(parts[0], ast.Starred) else None
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call) and path_of(node.func) in ("list", "tuple") and len(node.args) == 1:
            node = node.args[0]
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        network = node.func.value
        return node.func.attr in ("children", "modules") and self.is_frozen(self.evaluate(network), path_of(network))

    def _engine(self, node: ast.Call, model: Value) -> Value:
        """DeepSpeed's engine stands for the model; it comes with an optimizer, a loader and a scheduler."""
        engine = model if model.kind is Kind.MODULE else self._network_made(node)
        return Value(Kind.SEQUENCE, items=(engine, UNKNOWN, UNKNOWN, UNKNOWN))

    def _partial(self, node: ast.Call, function: Value, given: Given) -> Value | None:
        """What is given some of its arguments beforehand: a context is that context, a network stays itself."""
        carries_graph = combine(given.all).graph and given.starred is None
        if function.kind is Kind.EXTERNAL and not carries_graph:
            context = context_of_call(node, function.ref, given)
            return function if context is None else context
        if function.kind is Kind.MODULE or (function.kind is Kind.LOSS and not carries_graph):
            return function
        computing = function.kind in (Kind.FUNCTION, Kind.EXTERNAL, Kind.LOSS)
        if not computing or function.alternatives or given.starred is not None:
            return None
        earlier = given if function.before is None else given.after(function.before.given)
        return function._replace(before=Beforehand(earlier._replace(ahead=0)))

    def _has_parameters(self, node: ast.Call) -> bool:
        return any(
            isinstance(child, ast.Attribute) and child.attr in ("parameters", "named_parameters", "param_groups")
            for child in walk(*node.args[:1])
        ) or bool(node.args and path_of(node.args[0]) and "param" in (path_of(node.args[0]) or "").lower())

    def _set_grad(self, context: Value) -> None:
        effects: frozenset[str] = context.ref
        self.state.grad = Graph.MAYBE if len(effects) > 1 else (Graph.NO if "no_grad" in effects else Graph.YES)

    def _wrapped(self, name: str, values: list[Value]) -> Value:
        """`nn.DataParallel(x)`: what is wrapped like a network is one, unless more than a guess is known of it."""
        if not values:
            return UNKNOWN
        guessed = values[0].kind is Kind.TENSOR and name != "copy.deepcopy"
        return Value(Kind.MODULE) if guessed or values[0].kind is Kind.UNKNOWN else values[0]

    def _torch_function(self, name: str, last: str, given: Given) -> Value:
        values = given.all
        if last in torch_facts.FRESH:
            return PLAIN_TENSOR if has_integers(values) else FRESH_TENSOR
        if last in torch_facts.INTEGER_RESULTS or last in torch_facts.LEAVING_THE_GRAPH or last in torch_facts.COPIES:
            return PLAIN_TENSOR
        content = combine(values)
        if name == torch_facts.DRAWN and content.graph:
            return content._replace(is_tensor=True, ref=torch_facts.DRAWN)
        if last == "Variable" and values and values[0].is_tensor:
            return values[0]
        if content.graph is Graph.NO:
            known = last in torch_facts.TORCH_GRAPH_FREE or content.kind is not Kind.UNKNOWN
            return PLAIN_TENSOR if known else UNKNOWN
        if last in torch_facts.INDEX_REDUCTIONS:
            return content if _compares(last, values) else self._values_and_indices(content, len(values))
        if divisors_of(last, values[1:]):
            return content._replace(divisors=values[0].divisors | divisors_of(last, values[1:]))
        if name.startswith(("torch.distributed.", "torch.utils.", "torch.save", "torch.cuda.", "torch.optim.")):
            return content if "checkpoint" in name else UNKNOWN
        if name.startswith("torch.distributions.") and last[:1].isupper():
            return content._replace(is_tensor=False, ref=torch_facts.DISTRIBUTION)
        if last in torch_facts.PACKING:
            return content._replace(is_tensor=False, ref=torch_facts.PACKED)
        several = last in torch_facts.SEVERAL or name.startswith("torch.distributions.")
        divisors = torch_facts.summed_by(given.keywords)
        if last in torch_facts.ADDING_UP:
            divisors |= divided_alike(values)
        return content._replace(is_tensor=not several, divisors=divisors)

    def _values_and_indices(self, content: Value, number: int) -> Value:
        if number < 2:
            return content
        return Value(Kind.SEQUENCE, items=(content._replace(is_tensor=True), PLAIN_TENSOR))

    def _builtin(self, node: ast.Call, name: str, values: list[Value]) -> Value | None:
        if name == "isinstance" and len(node.args) == 2 and (listed := _is_list(values[0], node.args[1])) is not None:
            return constant(listed)
        if name in torch_facts.NUMBER_BUILTINS:
            return NUMBER
        if name in torch_facts.PASSING_BUILTINS:
            if name == "map" and (mapped := self._mapped(node, values)) is not None:
                return Value(Kind.CONTAINER, mapped.graph, mapped.origins, divisors=mapped.divisors)
            return self._passed(name, values)
        if name in torch_facts.REDUCING_BUILTINS:
            return combine(values)._replace(divisors=divided_alike(values))
        if name == "getattr" and len(values) > 2 and {values[0].kind, values[2].kind} == {Kind.MODULE}:
            return values[2]
        if name == "getattr" and len(node.args) > 1:
            return self._attribute_by_name(node, values)
        if name == "setattr" and len(node.args) == 3 and isinstance(values[1].constant, str):
            self.assign(ast.Attribute(node.args[0], values[1].constant, ast.Store()), values[2], self.statement)
            return NONE
        if name == "super":
            return self._inherited()
        return None

    def _mapped(self, node: ast.Call, values: list[Value]) -> Value | None:
        """What `map` makes of each element, where it calls a network or a function of the file."""
        if len(node.args) < 2 or len(values) != len(node.args):
            return None
        called = self.as_network(node.args[0], values[0])
        given = Given([self.element(value) for value in values[1:]])
        if called.kind is Kind.FUNCTION:
            return flatten(self._function(node, called, given))
        if called.kind is not Kind.MODULE:
            return None
        path, method = path_of(node.args[0]), self._own(called, "forward")
        return flatten(self.forward(node, called, path, given, method=method))

    def _attribute_by_name(self, node: ast.Call, values: list[Value]) -> Value:
        """`getattr(models, "resnet18")`, `getattr(self, f"step_{phase}")`: one of the methods of such a name."""
        base, name = values[0], values[1].constant
        if base.kind is Kind.EXTERNAL:
            return Value(Kind.EXTERNAL, ref=f"{base.ref}.{name}") if isinstance(name, str) else UNKNOWN
        instance = self.instance_of(base)
        if instance is None:
            return UNKNOWN
        names = [name] if isinstance(name, str) else instance.cls.methods_named_like(node.args[1])
        found = [self.attribute_of(base, ast.Attribute(node.args[0], one, ast.Load())) for one in names]
        return reduce(join, found) if found else UNKNOWN

    def _inherited(self) -> Value:
        """`super()`: the object at hand, as the class around sees those that it is built on."""
        function, held = self.frame.function, self.lookup("self")
        owner = function.owner if function is not None else None
        if owner is None:
            return Value(Kind.INSTANCE)
        if held is None:
            return UNKNOWN
        return Value(ref=Inherited(owner, held.value))

    def _construct_out_of_sight(self, node: ast.Call, inherited: Inherited, given: Given) -> None:
        """`super().__init__(model, loader)` of another file: it keeps `model` as `self.model`, if nobody else does."""
        instance = self.instance_of(inherited.receiver)
        if instance is None:
            return
        written = [(path_of(argument), value) for argument, value in zip(node.args, given.positional, strict=False)]
        for name, value in [*written, *given.keywords.items()]:
            known = value.kind in (Kind.MODULE, Kind.INSTANCE)
            if known and name is not None and name not in instance.cls.set_attributes:
                self.state.attributes[instance.number, name] = Binding(value, self.loops, self.statement)

    def _passed(self, name: str, values: list[Value]) -> Value:
        if not values:
            return Value(Kind.CONTAINER)
        if name == "zip":
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=tuple(self.element(v) for v in values)),))
        if name == "enumerate":
            return Value(Kind.SEQUENCE, items=(Value(Kind.SEQUENCE, items=(NUMBER, self.element(values[0]))),))
        if name in ("map", "filter"):
            content = combine(values[1:])
            return Value(Kind.CONTAINER, content.graph, content.origins)
        if name == "next":
            return self.element(values[0])
        if values[0].items is not None:
            return values[0]
        content, divisors = combine(values), divided_alike(values)
        return Value(
            Kind.CONTAINER, content.graph, content.origins, divisors=divisors, carried_from=content.carried_from
        )


def _loads_a_detector(given: Given) -> bool:
    """`torch.hub.load("ultralytics/yolov5", "yolov5s")`: its wrapper, `autoshape`, turns gradients off by itself."""
    wrapped = given.keywords.get("autoshape", UNKNOWN).constant is not False
    source = given.positional[0] if given.positional else given.keywords.get("repo_or_dir", UNKNOWN)
    return wrapped and str(source.constant).startswith("ultralytics/")


def _is_list(value: Value, kinds: ast.expr) -> bool | None:
    """What `isinstance(nets, list)` says of a network, or of several in a list; None where nobody knows."""
    asked = {path_of(kind) for kind in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds])}
    if not asked <= {"list", "tuple"}:
        return None
    if value.kind is Kind.MODULE:
        return False
    listed = value.items is not None and all(item.kind is Kind.MODULE for item in value.items)
    return True if listed and "list" in asked else None


def _compares(name: str, values: list[Value]) -> bool:
    """Whether `torch.min` or `torch.max` takes the smaller or larger of two tensors, and not along a dimension."""
    return name in ("min", "max") and len(values) > 1 and values[1].kind is Kind.TENSOR


def divisors_of(name: str, values: list[Value]) -> frozenset[str]:
    """What a function or method of a tensor divides it by: `loss.div(k)`, `loss.mul(1 / k)`."""
    if name in ("div", "div_", "true_divide", "divide"):
        return frozenset({name})
    if name in ("mul", "mul_", "multiply") and values:
        return values[0].divisors
    return frozenset()


def has_integers(values: list[Value]) -> bool:
    """Whether one of the arguments is a dtype of integers."""
    return any(value.kind is Kind.EXTERNAL and value.ref in torch_facts.INTEGER_DTYPES for value in values)
