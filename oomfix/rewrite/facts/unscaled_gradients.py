"""Gradients that the manager's loss scale is not in: its step would divide them by the scale all the same."""

from __future__ import annotations

import ast
from functools import cached_property

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.script.facts.trace import Backward, Step
from oomfix.script.syntax.names import last_name, path_of

_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})


class UnscaledGradients:
    """Finds gradients that a script makes where the manager does not see it.

    Args:
        reading: the script.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading, self._script = reading, reading.script

    def why_stepped(self, verdict: Verdict) -> str | None:
        """What the steps of a loop would take for scaled gradients, or None."""
        if verdict.scaled:
            return None
        if self._given:
            line, target = self._given[0]
            return f"line {line} gives `{target}` a value that is not scaled"
        if (step := _ahead_of_all_backwards(verdict)) is not None:
            return f"line {step.node.lineno} steps on gradients of no backward in sight"
        ended = max(event.order for event in verdict.loop.backwards)
        for step in verdict.steps:
            for backward in self._backwards_in_no_loop if step in verdict.loop.later_steps else ():
                if ended < backward.order < step.order:
                    own = f"the backward of line {backward.node.lineno}, which is in no loop"
                    return f"line {step.node.lineno} steps on {own}"
        return None

    @cached_property
    def _given(self) -> list[tuple[int, str]]:
        """The lines that set gradients to something other than zero or gradients, with the paths that they set."""
        return [
            (node.lineno, path_of(target) or ast.unparse(target))
            for node in self._script.imports.nodes.of(ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and target.attr in ("grad", "_grad") and not _has_any_scale(node.value)
        ]

    @cached_property
    def _backwards_in_no_loop(self) -> list[Backward]:
        """The backwards that stay as they are."""
        rewritten = {event.node for loop in self._reading.loops for event in loop.backwards}
        return [
            event
            for event in self._script.trace.backwards
            if not event.site.loops and not event.is_grad_call and event.node not in rewritten
        ]


def _ahead_of_all_backwards(verdict: Verdict) -> Step | None:
    """A step ahead of every backward of its loop, of an optimizer that makes no other: gradients come from elsewhere.

    `alpha_optim.zero_grad(); architect.unrolled_backward(...); alpha_optim.step()`, and then the weights' own turn.
    """

    def is_ahead(step: Step) -> bool:
        return all(
            step.site.loop is event.site.loop
            and step.site.function is event.site.function
            and step.node.lineno < event.node.lineno
            for event in verdict.loop.backwards
        )

    others = {step.optimizer for step in verdict.steps if not is_ahead(step)}
    return next((step for step in verdict.steps if is_ahead(step) and step.optimizer not in others), None)


def _has_any_scale(value: ast.expr) -> bool:
    """Whether a value is none, zero, or made of gradients, which bring their scale along."""
    if isinstance(value, ast.Constant):
        return value.value is None
    return reads_gradients(value) or (isinstance(value, ast.Call) and last_name(value) in _ZEROS)
