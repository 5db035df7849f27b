"""Following contexts that a call enters: by hand (`guard.__enter__()`), or on a stack of contexts."""

from __future__ import annotations

import ast

from oomfix.script.facts.values import UNKNOWN, Kind, Value
from oomfix.script.interpreter.training import Training
from oomfix.script.syntax.names import path_of


class ContextsByHand(Training):
    """Puts what a context does around everything behind the call that enters it."""

    def _enter_context(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """`stack.enter_context(torch.no_grad())`: from here on, until the stack's own block ends."""
        if not node.args:
            return UNKNOWN
        value = self.context_of(node.args[0], self.evaluate(node.args[0]))
        if value.kind is Kind.CONTEXT:
            self.enter_effects(value.ref)
        return value

    def _enter_by_hand(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """`guard.__enter__()`: from here on, until `guard.__exit__(None, None, None)`."""
        value = self.context_of(function.value, self.evaluate(function.value))
        if value.kind is not Kind.CONTEXT:
            return None
        path = path_of(function.value)
        if path is not None:
            self.outside[path] = self.state.grad, self.autocast, self.apex
        self.enter_effects(value.ref)
        return value

    def _exit_by_hand(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        outside = self.outside.get(path_of(function.value) or "")
        if outside is None:
            return None
        self.state.grad, self.autocast, self.apex = outside
        return UNKNOWN
