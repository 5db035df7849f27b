"""Contexts that only measure what runs in them."""

from __future__ import annotations

import ast
import re

from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.patterns import Pattern

_MEASURING = Pattern(
    r"(^|[._])(record_function|nullcontext|(set_)?detect_anomaly|nvtx\.range|timers?|timeit|time_it|timed|timing|stopwatch|"
    r"measure|profile|profiler)$",
    re.IGNORECASE,
)


def last_called(context: ast.expr) -> str:
    """The last name of what makes a context: `timer` of `self.timer["step"]("forward")`."""
    while isinstance(context, ast.Call | ast.Subscript):
        context = context.func if isinstance(context, ast.Call) else context.value
    return last_of(path_of(context))


def measures(context: ast.expr) -> bool:
    """Whether a context only measures what runs in it: `record_function("backward")`, `timer("backward")`."""
    if isinstance(context, ast.IfExp):
        return measures(context.body) and measures(context.orelse)
    if isinstance(context, ast.Subscript):
        return measures(context.value)
    path = path_of(context.func if isinstance(context, ast.Call) else context)
    return path is not None and bool(_MEASURING.search(path))
