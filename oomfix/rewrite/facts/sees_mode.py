"""Whether code looks at the mode of a network that was switched before: `critic.train()` ahead of its loss."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.shared_parameters import SharedParameters
from oomfix.rewrite.facts.events import Run
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.names import last_name, path_of

_BLIND = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div softmax log_softmax sigmoid mean sum pow square sqrt abs exp log clamp "
    "min max minimum maximum cat stack squeeze unsqueeze view reshape detach float long to item gather size len".split()
)
"""Functions and methods of tensors, which no mode of a network has a part in."""


class SeesMode:
    """Whether nodes may look at the mode of the network that a statement switches.

    Args:
        reading: the script.
        forwards: those of the script.
    """

    def __init__(self, reading: Reading, forwards: Sequence[Run]) -> None:
        self._reading = reading
        self._networks: dict[ast.AST, set[str | None]] = {}
        for forward in forwards:
            path = None if forward.path is None else forward.path.removesuffix(".forward")
            self._networks.setdefault(forward.node, set()).add(path)

    def __call__(self, switch: ast.stmt, nodes: Iterable[ast.AST]) -> bool:
        """Whether nodes do more than to run other networks, and to compute with what networks give."""
        call = switch.value if isinstance(switch, ast.Expr) else None
        method = call.func if isinstance(call, ast.Call) else None
        switched = path_of(method.value) if isinstance(method, ast.Attribute) else None
        return switched is None or any(self._may_look(call, switched) for call in calls_in(*nodes))

    def _may_look(self, call: ast.Call, switched: str) -> bool:
        if call in self._networks:
            shared = SharedParameters(self._reading.script)
            return any(path is None or shared.may_have_parts_in_common(path, switched) for path in self._networks[call])
        return last_name(call) not in _BLIND or bool(self._reading.functions.by(call))
