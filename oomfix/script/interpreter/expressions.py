"""Following expressions: what a value is and which graph it carries."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import reduce
from typing import Any

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Function, Inherited
from oomfix.script.facts.named_like import (
    is_likelihood,
    looks_like_loss,
    looks_like_module,
    looks_like_part,
)
from oomfix.script.facts.values import (
    MISSING,
    NONE,
    NUMBER,
    PLAIN_TENSOR,
    SLOTS,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    are_called_alike,
    combine,
    constant,
    entry_of,
    flatten,
    join,
)
from oomfix.script.interpreter.calls import Calls
from oomfix.script.interpreter.contexts import NULL, makes_context
from oomfix.script.syntax.names import left_by_methods, path_of
from oomfix.script.syntax.nodes import children

_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


_DISPLAYS = ast.Tuple | ast.List | ast.Set


def _constants(listed: Value) -> Any:
    """What a tuple or list holds, where all of it is known; MISSING where it is not."""
    held = [item.constant for item in listed.items or ()]
    return MISSING if not held or MISSING in held else held


Called = tuple[ast.Name, Value]
"""The name that a loop calls in each round, and the network that it is."""


class Expressions(Calls):
    """Evaluates expressions to `Value`s; one method per kind of node."""

    def evaluate(self, node: ast.expr) -> Value:
        """What an expression gives at this point."""
        method = _EVALUATORS.get(type(node))
        if method is None:
            return self._any(node)
        return method(self, node)

    def _any(self, node: ast.AST) -> Value:
        return combine([self.evaluate(child) for child in children(node) if isinstance(child, ast.expr)])

    def _constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _plain(self, node: ast.expr) -> Value:
        for child in children(node):
            if isinstance(child, ast.expr):
                self.evaluate(child)
        return NUMBER

    def _name(self, node: ast.Name) -> Value:
        value = self._bound_to(node)
        self.note_read(value)
        return value

    def _bound_to(self, node: ast.Name) -> Value:
        binding = self.lookup(node.id)
        if binding is None:
            return UNKNOWN
        value = binding.value
        if value.kind is Kind.CONTAINER or (value.kind is Kind.UNKNOWN and not value.graph):
            bound = [entry.value for entry in self.state.names.entries(node.id)]
            if not bound:
                return value
            if value.kind is Kind.CONTAINER:
                bound = [entry for entry in bound if entry.kind is Kind.TENSOR]  # not `log["loss"]`, a list of its own
            entries = combine(bound)
            if entries.graph:  # one of its entries was assigned a graph; which one is asked for is not known
                return value.with_graph(value.graph or Graph.MAYBE, value.origins | entries.origins)
        return value

    def _attribute(self, node: ast.Attribute) -> Value:
        value = self.attribute_of(self.evaluate(node.value), node)
        self.note_read(value)
        return value

    def attribute_of(self, base: Value, node: ast.Attribute) -> Value:
        """What an attribute of a value is, as written in `node`."""
        found = self._attribute_of_object(base, node)
        if found is None:
            found = self._attribute_assigned(base, node)
        if found is None:
            found = self._attribute_of_network(base, node)
        return self._attribute_of_result(base, node.attr) if found is None else found

    def _attribute_of_object(self, base: Value, node: ast.Attribute) -> Value | None:
        """What an object of the file, a module or a tensor has under a name."""
        instance = self.instance_of(base)
        own = None if instance is None else self.state.attributes.get((instance.number, node.attr))
        if own is not None:  # a list that a class calls `data` is no tensor without its graph
            return own.value
        if isinstance(base.ref, Inherited):
            method = base.ref.cls.find_inherited(node.attr)
            return UNKNOWN if method is None else Value(Kind.FUNCTION, ref=(method, base.ref.receiver))
        if node.attr == "data" and base.ref == torch_facts.PACKED:
            return base._replace(ref=None, is_tensor=True)
        if node.attr == "grad_fn":
            self.trace.backpropagated |= flatten(base).origins  # who looks at a graph needs one
        if base.kind is Kind.EXTERNAL:
            return Value(Kind.EXTERNAL, ref=f"{base.ref}.{node.attr}")
        if node.attr in torch_facts.PLAIN_ATTRIBUTES:
            return NUMBER if node.attr != "data" else Value(Kind.TENSOR)
        if instance is None:
            return None
        method, of = self._own_method(base, node.attr)
        if method is not None and not method.is_property:
            return Value(Kind.FUNCTION, ref=(method, of))
        shown = method.shown_attribute if method is not None else None
        return self.attribute_of(base, shown) if shown is not None and instance.cls.find(shown.attr) is None else None

    def _attribute_assigned(self, base: Value, node: ast.Attribute) -> Value | None:
        """What was assigned to a path, or to an attribute of what an object holds."""
        path = path_of(node)
        if path is not None and (binding := self.lookup(path)) is not None:
            return binding.value
        if base.kind is Kind.UNKNOWN and path is not None and isinstance(node.value, ast.Attribute):
            slot = self.slot_of(node)
            binding = self.state.attributes.get(slot) if slot is not None else None
            return None if binding is None else binding.value
        return None

    def _attribute_of_network(self, base: Value, node: ast.Attribute) -> Value | None:
        """What a network, a criterion or a class has under a name that says what it is."""
        if node.attr == "module" and base.kind in (Kind.MODULE, Kind.UNKNOWN) and self.is_network(node.value, base):
            return base if base.kind is Kind.MODULE else Value(Kind.MODULE, ref=path_of(node.value))
        if base.kind is Kind.MODULE and node.attr == "training":
            evaluating = self.state.evaluating.get(self._identity(base, path_of(node.value)))
            return NUMBER if evaluating is None else constant(not evaluating)
        differentiable = looks_like_loss(node.attr) or is_likelihood(node.attr)
        if base.kind in (Kind.MODULE, Kind.UNKNOWN, Kind.LOSS) and not base.graph and differentiable:
            left = self.binding_of(left_by_methods(node.value))
            return UNKNOWN if left is None else left.value
        if base.kind is Kind.MODULE:
            return UNKNOWN
        method = base.ref.find(node.attr) if base.kind is Kind.CLASS else None
        return None if method is None else Value(Kind.FUNCTION, ref=(method, None))

    def _attribute_of_result(self, base: Value, name: str) -> Value:
        """What a tensor, or what a network gives, has under a name."""
        if base.kind is Kind.SEQUENCE and len(base.items or ()) == 2 and name in ("values", "indices"):
            return (base.items or ())[name == "indices"]
        if base.kind is Kind.SEQUENCE and (held := flatten(base)).graph:
            return Value(Kind.TENSOR, Graph.MAYBE, held.origins)  # an item of a named tuple that a list has held
        if base.graph and name in torch_facts.DETACHED_OUTPUTS:
            return PLAIN_TENSOR
        if base.graph:
            transposed = base.is_tensor and name in ("T", "mT")
            is_tensor = name == "loss" or name.endswith("_loss") or transposed
            return Value(Kind.TENSOR, base.graph, base.origins, is_tensor=is_tensor, carried_from=base.carried_from)
        return base if base.kind is Kind.TENSOR else UNKNOWN

    def _own_method(self, base: Value, name: str) -> tuple[Function | None, Value]:
        """A method of an object, or of the first that it may be as well whose class has it."""
        for one in (base, *base.alternatives):
            instance = self.instance_of(one)
            method = instance.cls.find(name) if instance is not None else None
            if method is not None:
                return method, one._replace(alternatives=())
        return None, base

    def _subscript(self, node: ast.Subscript) -> Value:
        path = path_of(node)
        if path is not None and (binding := self.lookup(path)) is not None:
            return binding.value
        base = self.evaluate(node.value)
        index = self.evaluate(node.slice)
        if base.items is not None and (base.kind is Kind.CONTAINER or base.entries):
            return entry_of(base, index)
        if base.items is not None and isinstance(index.constant, int):
            if -len(base.items) <= index.constant < len(base.items):
                return base.items[index.constant]
        if base.items is not None:
            return self.element(base)
        if torch_facts.holds_networks(base):
            return base
        if isinstance(node.value, ast.Attribute) and looks_like_part(node.value.attr):
            network = self.evaluate(node.value.value)
            if network.kind is Kind.MODULE:
                return network  # `vgg.features[:20]`
        if isinstance(index.constant, str) and index.constant in (entries := dict(base.entries)):
            return entries[index.constant]
        if base.kind in (Kind.TENSOR, Kind.UNKNOWN, Kind.CONTAINER) and base.graph:
            if isinstance(index.constant, str) and self.is_perhaps_for_a_log(node.value, index.constant):
                return Value(Kind.TENSOR, Graph.MAYBE, base.origins)
            return Value(Kind.TENSOR, base.graph, base.origins, divisors=base.divisors, carried_from=base.carried_from)
        return base if base.kind in (Kind.NUMBER, Kind.TENSOR) else UNKNOWN

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        items = tuple(self.as_network(element, self.evaluate(element)) for element in node.elts)
        if not items or any(isinstance(element, ast.Starred) for element in node.elts):
            return Value(
                Kind.CONTAINER,
                max((item.graph for item in items), default=Graph.NO),
                frozenset().union(*(flatten(item).origins for item in items)),
            )
        return Value(Kind.SEQUENCE, items=items)

    def _dict(self, node: ast.Dict) -> Value:
        values = [self.as_network(value, self.evaluate(value)) for value in node.values]
        for key in node.keys:
            if key is not None:
                self.evaluate(key)
        pairs = [
            (key.value, value)
            for key, value in zip(node.keys, values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
        entries = tuple(pairs) if len(pairs) == len(values) else ()
        if any(value.kind in (Kind.CONTEXT, Kind.OPTIMIZER) or makes_context(value) for value in values):
            return Value(Kind.SEQUENCE, items=tuple(values), entries=entries)  # `contexts[precision]`: one of them
        if are_called_alike(values):
            return Value(Kind.CONTAINER, items=tuple(values), entries=entries)
        content = combine(values)
        return Value(Kind.CONTAINER, content.graph, content.origins, entries=entries if content.graph else ())

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Add) and Kind.CONTAINER in (left.kind, right.kind):
            content = combine([left, right])
            return Value(Kind.CONTAINER, content.graph, content.origins)
        if left.kind is Kind.NUMBER and left.graph is Graph.NO and isinstance(left.constant, str):
            return NUMBER
        if isinstance(node.op, ast.Mult) and Kind.SEQUENCE in (left.kind, right.kind):
            content = combine([left, right])
            return Value(Kind.CONTAINER, content.graph, content.origins, ref=SLOTS)
        result = self.computed(combine([left, right]))
        if result.graph:
            result = result._replace(is_tensor=not result.may_be_number)
        if isinstance(node.op, ast.Add | ast.Sub) and left.graph and right.graph:
            # What divides one term does not divide the loss.
            divisors = left.divisors & right.divisors
        else:
            divisors = left.divisors | right.divisors
        if isinstance(node.op, ast.Div | ast.FloorDiv) and not right.graph and not _is_mean(node):
            divisors |= {ast.unparse(node.right)}
        if divisors or left.scaled or right.scaled:
            result = result._replace(divisors=divisors, scaled=left.scaled or right.scaled)
        return result

    def _compare(self, node: ast.Compare) -> Value:
        left = self.evaluate(node.left)
        rights = [self.evaluate(comparator) for comparator in node.comparators]
        operation = _COMPARISONS.get(type(node.ops[0]))
        if operation is not None and len(rights) == 1:
            right = rights[0].constant
            if isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(node.comparators[0], _DISPLAYS):
                right = _constants(rights[0])
            if left.constant is not MISSING and right is not MISSING:
                try:
                    return constant(operation(left.constant, right))
                except TypeError:
                    return NUMBER
        return NUMBER

    def _boolean(self, node: ast.BoolOp) -> Value:
        values = [self.evaluate(value) for value in node.values]
        truths = [self.truth(value) for value in values]
        stopping = not isinstance(node.op, ast.And)
        if stopping in truths:
            return constant(stopping)
        if all(truth is (not stopping) for truth in truths):
            return constant(not stopping)
        return reduce(join, values)

    def _unary(self, node: ast.UnaryOp) -> Value:
        operand = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self.truth(operand)
            return NUMBER if truth is None else constant(not truth)
        if isinstance(node.op, ast.USub) and isinstance(operand.constant, int | float):
            return constant(-operand.constant)
        return operand

    def _conditional(self, node: ast.IfExp) -> Value:
        truth = self.truth(self.evaluate(node.test))
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse)
        body, orelse = (self.as_network(side, self.evaluate(side)) for side in (node.body, node.orelse))
        if Kind.CONTEXT in (body.kind, orelse.kind):
            body = body if body.kind is Kind.CONTEXT else NULL
            orelse = orelse if orelse.kind is Kind.CONTEXT else NULL
        for side, other in ((body, node.orelse), (orelse, node.body)):
            if side.graph and isinstance(other, ast.Constant):
                # `loss if loss > 0 else None`: the graph is there whenever anything is
                return side._replace(is_tensor=False, may_be_number=True)
        return join(body, orelse)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        for generator in node.generators:
            element = self.element(self.evaluate(generator.iter))
            self.assign(generator.target, element, None)
            if (network := self.network_called(generator, node, element)) is not None:
                self.assign(*network, None)
            for condition in generator.ifs:
                self.evaluate(condition)
        content = self.evaluate(node.value if isinstance(node, ast.DictComp) else node.elt)
        content_flat = flatten(content)
        if content.kind is Kind.OPTIMIZER or are_called_alike([content]):
            named = isinstance(node, ast.DictComp) and content.kind is not Kind.OPTIMIZER
            return Value(Kind.CONTAINER if named else Kind.SEQUENCE, items=(content,))
        return Value(Kind.CONTAINER, content_flat.graph, content_flat.origins, divisors=content_flat.divisors)

    def network_called(
        self, loop: ast.For | ast.AsyncFor | ast.comprehension, rounds: ast.AST, element: Value
    ) -> Called | None:
        """What every round calls of the layers of a network, or of several networks, as frozen as the whole is.

        Args:
            loop: what binds a name in each round.
            rounds: the loop or comprehension.
            element: what is known of what it goes through.
        """
        from oomfix.script.interpreter.layers_one_by_one import (
            layer_called,
            network_gone_through,
            networks_gone_through,
        )

        name = layer_called(loop.target, rounds, self.hints.called)
        if name is None:
            return None
        whole = network_gone_through(loop.iter, self.as_assigned)
        if whole is None or not self._is_of_network(whole):
            whole = networks_gone_through(loop.iter)
            if _last_part(element) != UNKNOWN or any(map(looks_like_module, self.hints.made_by.get(name.id, ()))):
                return None  # it makes networks: `for build in models: net = build(8)`
        if whole is None:
            return None
        network = Value(Kind.MODULE, ref=self.trace.number("layer", id(loop), self.way))
        if self.is_of_frozen(whole, self.evaluate(whole), path_of(whole)):
            self.state.frozen[network.ref] = True
        return name, network

    def _is_of_network(self, node: ast.expr) -> bool:
        """`net`, and `net.features`."""
        value = self.evaluate(node)
        if self.is_network(node, value) or (value.kind is Kind.UNKNOWN and looks_like_module(path_of(node) or "")):
            return True
        return isinstance(node, ast.Attribute) and looks_like_part(node.attr) and self._is_of_network(node.value)

    def as_assigned(self, node: ast.expr) -> ast.expr:
        """What a name was assigned, as it is written; everything else as it is."""
        binding = self.binding_of(node) if isinstance(node, ast.Name | ast.Attribute) else None
        statement = binding.statement if binding is not None else None
        if not isinstance(statement, ast.Assign):
            return node
        target, value = statement.targets[0], statement.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        return next((written for name, written in pairs if path_of(name) == path_of(node)), node)

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value(Kind.FUNCTION, ref=(Function(node, "<lambda>", self.frame), None))

    def _starred(self, node: ast.Starred) -> Value:
        return flatten(self.evaluate(node.value))

    def _walrus(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value, None)
        return value

    def _await(self, node: ast.Await | ast.YieldFrom) -> Value:
        return self.evaluate(node.value)

    def _yield(self, node: ast.Yield) -> Value:
        value = NONE if node.value is None else self.evaluate(node.value)
        self.frame.yields.append(value)
        self.trace.handed_on.append((self.trace.next_order() + 1, flatten(value).origins))
        return UNKNOWN

    def truth(self, value: Value) -> bool | None:
        """Whether a value is true; None where it is not known."""
        if value.constant is MISSING:
            return None
        return bool(value.constant)


def _last_part(value: Value) -> Value:
    """What is known of `net` of `for i, (name, net) in ...`."""
    while value.items:
        value = value.items[-1]
    return value


def _is_mean(node: ast.BinOp) -> bool:
    """`sum(terms) / len(terms)`, which divides by how many terms one loss has."""
    match node:
        case ast.BinOp(ast.Call(ast.Name("sum"), [terms]), ast.Div(), ast.Call(ast.Name("len"), [counted])):
            return ast.unparse(terms) == ast.unparse(counted)
    return False


_EVALUATORS: dict[type, Callable[[Any, Any], Value]] = {
    ast.Constant: Expressions._constant,
    ast.JoinedStr: Expressions._plain,
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.Subscript: Expressions._subscript,
    ast.Tuple: Expressions._sequence,
    ast.List: Expressions._sequence,
    ast.Set: Expressions._sequence,
    ast.Dict: Expressions._dict,
    ast.BinOp: Expressions._binary,
    ast.Compare: Expressions._compare,
    ast.BoolOp: Expressions._boolean,
    ast.UnaryOp: Expressions._unary,
    ast.IfExp: Expressions._conditional,
    ast.ListComp: Expressions._comprehension,
    ast.SetComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
    ast.DictComp: Expressions._comprehension,
    ast.Lambda: Expressions._lambda,
    ast.Starred: Expressions._starred,
    ast.NamedExpr: Expressions._walrus,
    ast.Await: Expressions._await,
    ast.YieldFrom: Expressions._await,
    ast.Yield: Expressions._yield,
    ast.Call: Expressions.call,
}
