"""Lines of a slice that print: they do so in each of its runs, of which a batch may take several."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from oomfix.rewrite.effects import called_name, calls_in
from oomfix.rewrite.lift import Lift
from oomfix.script.nodes import blocks, walk

_PRINTING = ("print", "pprint")
_ENDING = ("exit", "_exit", "quit", "abort")


def why_printed_again(lifts: Iterable[Lift]) -> str | None:
    """What the summary says of slices that print; None where none does, but for what ends the run."""
    lines = sorted({call.lineno for lift in lifts for call in _prints(lift.lifted)})
    if not lines:
        return None
    named = ", ".join(f"line {line}" for line in lines)
    verb = "prints" if len(lines) == 1 else "print"
    runs = "once for each micro-batch, and for each check whether the batch may be split"
    return f"{named} {verb} where the loss is computed: {runs}"


def _prints(lifted: list[ast.stmt]) -> Iterator[ast.Call]:
    for block in (lifted, *(block for statement in lifted for block in blocks(walk(statement)))):
        last = block[-1] if block else None
        if isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and called_name(last.value) in _ENDING):
            continue
        for statement in block:
            if isinstance(statement, ast.Expr) and called_name(statement.value) in _PRINTING:
                yield from (call for call in calls_in(statement) if call is statement.value)
