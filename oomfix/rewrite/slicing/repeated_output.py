"""Lines of a slice that print or log: they do so in each of its runs, of which a batch may take several."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from oomfix.rewrite.dataflow.calls import called_name, calls_in
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.rewrite.facts.lift import Lift
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import blocks, walk
from oomfix.script.syntax.patterns import Pattern

_PRINTING = ("print", "pprint")
_LOGGING = Pattern(
    r"(scalars?|histogram|images?|figure|text|metrics?)(_summary)?$|log(_\w+)?$|(info|debug|warning|error)$"
)
_LOGS = Pattern(r"(^|[._])(writer|summary_?writer|logger|logging|log|wandb|tb|tensorboard|mlflow|neptune)$", re.I)
_BARS = Pattern(r"^set_(postfix|description)(_str)?$")
_ENDING = ("exit", "_exit", "quit", "abort")


def why_said_again(lifts: Iterable[Lift], functions: FunctionsCalled) -> str | None:
    """What the summary says of slices that print or log; None where none does, but for what ends the run.

    Args:
        lifts: the slices.
        functions: those of the file, which the slices may call.
    """
    found = {call.lineno: called_name(call) for lift in lifts for call in _said(lift, functions)}
    if not found:
        return None
    lines = sorted(found)
    prints = {name in _PRINTING for name in found.values()}
    verb = "print or log" if len(prints) == 2 else "print" if prints == {True} else "log"
    named = ", ".join(f"line {line}" for line in lines) + f" {verb}{'s' if len(lines) == 1 else ''}"
    runs = "once for each micro-batch, and for each check whether the batch may be split"
    return f"{named} where the loss is computed: {runs}"


def _said(lift: Lift, functions: FunctionsCalled) -> Iterator[ast.Call]:
    """The calls that print or log in a slice and in the functions that are certain to be those it calls."""
    waiting, reached = [[*lift.lifted, ast.Expr(lift.site.root)]], set[FunctionNode]()
    for statements in waiting:
        yield from _said_in(statements)
        for call in calls_in(*statements):
            called = functions.by(call) if _names_a_function(call) else []
            if len(called) == 1 and called[0] not in reached:
                reached.add(called[0])
                waiting.append(called[0].body)


def _said_in(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    for block in (statements, *(block for statement in statements for block in blocks(walk(statement)))):
        last = block[-1] if block else None
        if isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and called_name(last.value) in _ENDING):
            continue
        for statement in block:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and (called_name(call) in _PRINTING or _logs(call)):
                yield from (inner for inner in calls_in(statement) if inner is call)


def _logs(call: ast.Call) -> bool:
    """`writer.add_scalar("loss", loss, step)`, `self.logger.info(text)`, `wandb.log(losses)`, `bar.set_postfix()`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if _BARS.search(call.func.attr):
        return True
    return bool(_LOGGING.search(call.func.attr)) and bool(_LOGS.search(path_of(call.func.value) or ""))


def _names_a_function(call: ast.Call) -> bool:
    """`compute(x)` and `self.compute(x)`; `criterion.compute(x)` may be of another file."""
    path = path_of(call.func) or ""
    return path.removeprefix("self.").isidentifier()
