"""Networks and optimizers that are handed to what is out of sight, between a backward and its step."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import Scope
from oomfix.rewrite.dataflow.on_gradients import CLIPPING
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.script.facts.named_like import looks_like_optimizer
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, walk
from oomfix.script.syntax.patterns import Pattern

_BLIND_TO_GRADIENTS = Pattern(
    r"lr|learning_?rate|warm_?up|sched|anneal|momentum|log|print|report|summary|eval|valid|test|infer|predict|sampl|"
    r"generat|save|checkpoint|ckpt|load|state_dict|ema|copy|param|^(optimizer_)?step$",
    re.IGNORECASE,
)
"""What functions say in their names that ask a network for outputs or weights, or an optimizer for its rate."""

_OF_PARAMETERS = ("parameters", "named_parameters")


class HandedNetworks:
    """Says what is out of sight and may look at gradients before they are unscaled.

    Args:
        reading: the script.
    """

    def __init__(self, reading: Reading) -> None:
        self._script = reading.script
        self._blocks = reading.blocks
        self._functions = reading.functions

    def why_seen(self, verdict: Verdict) -> str | None:
        """What is handed a network of a loop, or its optimizer, where its gradients are there, or None.

        A script that scales its loss has seen to that itself.
        """
        if verdict.scaled:
            return None
        networks = {forward.path for forward in verdict.loop.forwards} - {None}
        for scope in {self._blocks.scope_of(event.node): None for event in (*verdict.backwards, *verdict.steps)}:
            for call in self._behind_backward(scope, verdict):
                for given in map(_without_method, arguments_of(call)):
                    path = path_of(given)
                    if path is not None and (path in networks or looks_like_optimizer(path)):
                        function = ast.unparse(call.func)
                        return f"line {call.lineno} hands `{path}` to `{function}`, which may look at gradients"
        return None

    def _behind_backward(self, scope: Scope | None, verdict: Verdict) -> Iterator[ast.Call]:
        """The calls of a function that nobody sees, behind its backward and ahead of its step."""
        scope_of = self._blocks.scope_of
        backwards = [event.node.lineno for event in verdict.backwards if scope_of(event.node) is scope]
        steps = [step.node.lineno for step in verdict.steps if scope_of(step.node) is scope]
        if scope is None or not backwards:
            return
        last = max(steps, default=scope.body[-1].end_lineno if isinstance(scope.body, list) else 0) or 0
        for call in (node for node in walk(scope) if isinstance(node, ast.Call)):
            if min(backwards) < call.lineno < last and scope_of(call) is scope and not self._is_known(call):
                yield call

    def _is_known(self, call: ast.Call) -> bool:
        """Whether a call is of the file or a library, unscaled for as a clip, or named for something else."""
        name = last_name(call)
        names = self._script.imports.qualified(call.func)
        return (
            bool(self._functions.by(call))
            or any(one.split(".")[0] in ("torch", "copy") for one in names)
            or name in dir(builtins)
            or bool(CLIPPING.search(name) or _BLIND_TO_GRADIENTS.search(name))
        )


def _without_method(node: ast.expr) -> ast.expr:
    """`model` for `model.named_parameters()`."""
    method = node.func if isinstance(node, ast.Call) else None
    return method.value if isinstance(method, ast.Attribute) and method.attr in _OF_PARAMETERS else node
