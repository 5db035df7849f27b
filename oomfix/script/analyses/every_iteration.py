"""Whether something runs on every iteration of its loop, or only where a condition lets it."""

from __future__ import annotations

import ast
import re

from oomfix.script.analyses.windows import is_window_test
from oomfix.script.facts.trace import Event, Guard
from oomfix.script.syntax.patterns import Pattern

_DEVICE_CHECK = Pattern(r"cuda|gpu|device", re.IGNORECASE)
_MEMORY_CHECK = Pattern(r"mem|alloc|reserved|usage", re.IGNORECASE)
_ENDS_THE_LOOP = (ast.Break, ast.Return, ast.Raise)


def runs_every_iteration(event: Event) -> bool:
    """Whether nothing but a check for the device, or leaving out a batch, stands between the loop and an event."""
    return not event.site.handling_exception and all(
        _leaves_out_a_batch(guard, event)
        or _ends_the_loop_otherwise(guard)
        or (guard.value and _asks_for_the_device(guard.test))
        for guard in event.site.guards
    )


def _asks_for_the_device(test: ast.expr) -> bool:
    """`device.type == "cuda"`, which comes out the same in each iteration, as no count and no memory does."""
    text = ast.unparse(test)
    return bool(_DEVICE_CHECK.search(text)) and not _MEMORY_CHECK.search(text) and not is_window_test(test)


def _leaves_out_a_batch(guard: Guard, event: Event) -> bool:
    """`if len(x) == 0: continue`, behind which an event stands; every few batches is another matter."""
    decision = guard.statement
    if not isinstance(decision, ast.If) or guard.value or event.node.lineno <= (decision.end_lineno or 0):
        return False
    return _always_leaves(decision.body, (*_ENDS_THE_LOOP, ast.Continue)) and not is_window_test(guard.test)


def _ends_the_loop_otherwise(guard: Guard) -> bool:
    """`if i >= limit: break` with an `else`: there is no iteration that goes on by the other branch."""
    decision = guard.statement
    if not isinstance(decision, ast.If):
        return False
    other = decision.orelse if guard.value else decision.body
    return bool(other) and _always_leaves(other, _ENDS_THE_LOOP)


def _always_leaves(body: list[ast.stmt], leaving: tuple[type[ast.stmt], ...]) -> bool:
    """Whether a block always comes to such a statement, and never to what stands behind it."""
    last = body[-1]
    if isinstance(last, ast.If) and last.orelse:
        return _always_leaves(last.body, leaving) and _always_leaves(last.orelse, leaving)
    return isinstance(last, leaving)
