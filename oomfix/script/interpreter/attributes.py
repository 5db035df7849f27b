"""Following attributes: what a value has under a name."""

from __future__ import annotations

import ast

from oomfix.script.facts import torch_facts
from oomfix.script.facts.definitions import Function, Inherited
from oomfix.script.facts.named_like import is_likelihood, looks_like_loss
from oomfix.script.facts.values import NUMBER, PLAIN_TENSOR, UNKNOWN, Graph, Kind, Value, constant, flatten
from oomfix.script.interpreter.calls import Calls
from oomfix.script.syntax.names import left_by_methods, path_of


class Attributes(Calls):
    """Finds out what an attribute is: of an object of the file, a network, a module, or what a network gave."""

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
