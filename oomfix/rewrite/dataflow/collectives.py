"""Calls for which every process of a training has to come as often."""

from __future__ import annotations

import ast

from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.patterns import Pattern

_COLLECTIVES = frozenset(
    "all_reduce reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter all_to_all broadcast "
    "barrier".split()
)

_PROCESSES = Pattern(r"(^|[._])i?dist(ributed)?(\.|$)")


def is_collective(call: ast.Call) -> bool:
    """Whether a call is a collective operation, for which every process has to come as often.

    `dist.all_reduce(x)`, but not `einops.reduce(x)`.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _COLLECTIVES:
        return False
    return bool(_PROCESSES.search(path_of(call.func.value) or ""))
