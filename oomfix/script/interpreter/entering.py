"""Following what a `with` enters: contexts that are held, made out of sight, or by a generator or class of the file."""

from __future__ import annotations

import ast

from oomfix.script.facts.definitions import Function, Instance
from oomfix.script.facts.values import Given, Kind, Value
from oomfix.script.interpreter.contexts import context_of_call, held_elsewhere, makes_context
from oomfix.script.interpreter.statements import Statements
from oomfix.script.syntax.names import path_of


class Entering(Statements):
    """Finds the context that an expression stands for."""

    def context_of(self, node: ast.expr, value: Value) -> Value:
        """A context manager that is made out of sight, or by a generator of the file."""
        if value.kind is Kind.FUNCTION and isinstance(node, ast.Call):
            return value
        called = node.func if isinstance(node, ast.Call) else node
        path = path_of(called)
        if path == "amp.scale_loss" and value.kind is not Kind.CONTEXT and isinstance(node, ast.Call):
            # apex, imported in another function
            given = Given([self.evaluate(argument) for argument in node.args])
            return context_of_call(node, f"apex.{path}", given) or value
        if value.kind is Kind.CONTEXT:
            return value
        if value.kind is Kind.EXTERNAL and not isinstance(node, ast.Call) and makes_context(value):
            return context_of_call(ast.Call(node, [], []), value.ref, Given()) or value  # `with torch.no_grad:`
        binding = self.lookup(path) if path is not None else None
        function = binding.value.ref[0] if binding is not None and binding.value.kind is Kind.FUNCTION else None
        if isinstance(function, Function):
            effects = self.effects_around(function, lambda part: isinstance(part, ast.Yield))
            return Value(Kind.CONTEXT, ref=effects) if effects else value
        if value.kind is Kind.INSTANCE:
            return self._context_of_object(value)
        statement = binding.statement if binding is not None else None
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            path = path_of(statement.value.func) or path  # `c = autocast_for(config)`
        # a tensor is no context: what a call out of sight gives for a value with a graph was a guess
        held = held_elsewhere(path) if value.kind in (Kind.UNKNOWN, Kind.TENSOR) else None
        return value if held is None else Value(Kind.CONTEXT, ref=held)

    def _context_of_object(self, value: Value) -> Value:
        """An object of the file: what its `__enter__` is named to enter."""
        instance = self.instance_of(value)
        enter = instance.cls.find("__enter__") if instance is not None else None
        if instance is None or enter is None:
            return value
        calls = [path_of(node.func) for node in enter.nodes if isinstance(node, ast.Call)]
        effects = frozenset[str]().union(*(self._effects_of_entering(instance, path) for path in calls))
        return Value(Kind.CONTEXT, ref=effects) if effects else value

    def _effects_of_entering(self, instance: Instance, path: str | None) -> frozenset[str]:
        """What a call in an object's `__enter__` enters: `self.guard.__enter__()`, or a context by its name."""
        held = (path or "").removesuffix(".__enter__")
        binding = self.state.attributes.get((instance.number, held.removeprefix("self.")))
        if binding is not None and binding.value.kind is Kind.CONTEXT:
            return binding.value.ref  # type: ignore[no-any-return]
        return held_elsewhere(held) or frozenset()
