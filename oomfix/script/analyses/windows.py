"""Accumulation windows: what a step waits for, whether the loss is divided, whether the tail is stepped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from oomfix.script.analyses.rounds import feeds_itself
from oomfix.script.analyses.training_loop import TrainingLoop, Window, waits
from oomfix.script.facts.trace import Backward, Event, Guard, Loop, Step, Trace, exclude_each_other
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import encloses, walk
from oomfix.script.syntax.patterns import Pattern

_WINDOW_NAME = Pattern(
    r"accum|grad_?acc|acc_?steps|\bgas\b|micro|grad_?steps|iter_?size|update_(freq|every)|virtual|subdivision",
    re.IGNORECASE,
)
_SKIPPING = (ast.Break, ast.Continue)


def find_window(loop: TrainingLoop, trace: Trace) -> Window | None:
    """The accumulation window: every step waits for a test that some backward does not wait for, or for a loop."""
    if loop.steps and (window := _decided_window(loop)) is not None:
        return window
    if not loop.steps and loop.later_steps and isinstance(loop.node, ast.For) and _counts_a_window(loop.node):
        iterable = loop.node.iter
        size = iterable.args[-1] if isinstance(iterable, ast.Call) and iterable.args else iterable
        return Window(ast.unparse(size), size, None)
    return _window_of_pieces(loop, trace)


def _window_of_pieces(loop: TrainingLoop, trace: Trace) -> Window | None:
    """A batch is cut up: a backward for each of its pieces, and a step behind the last."""
    for node in dict.fromkeys(backward.site.loop for backward in loop.backwards):
        pieces = trace.loops_over_pieces.get(node) if node is not None else None
        if node is not None and pieces is not None and _adds_up_over(node, loop, trace):
            elsewhere = frozenset(event.node for event in loop.backwards if event.site.loop is not node)
            return Window(ast.unparse(pieces.number), pieces.number, None, elsewhere=elsewhere)
    return None


def _adds_up_over(pieces: Loop, loop: TrainingLoop, trace: Trace) -> bool:
    """Whether each piece has a forward and a backward of its own, and nothing steps or resets before the last."""
    steps = [*loop.steps, *loop.later_steps]
    backwards = [event for event in loop.backwards if event.site.loop is pieces]
    forwards = [forward for event in backwards for forward in trace.forwards_of(event.origins)]
    resets = (event.site for event in trace.calls.get("zero_grad", ()))
    return (
        bool(steps)
        and not any(pieces in step.site.loops for step in steps)
        and not any(site.loop is pieces and not site.guards for site in resets)
        and all(pieces in forward.site.loops for forward in forwards)
        and not any(event.carried for event in backwards)
        and not feeds_itself(pieces)
        and not _computes_a_part_anew(pieces)
    )


def _decided_window(loop: TrainingLoop) -> Window | None:
    """A window that an `if` in the loop closes, where a flag chooses among steps on each of its branches."""
    guards = [(step, _window_guard(step, loop)) for step in loop.steps]
    waiting = {step: guard for step, guard in guards if guard is not None}
    free = [step for step, guard in guards if guard is None]
    if not waiting or not all(_excludes_all(step, waiting, loop) for step in free):
        return None
    decisions = list({id(guard.statement): guard for guard in waiting.values()}.values())
    first = decisions[0]
    ids = {id(guard.statement) for guard in decisions}
    elsewhere = frozenset(event.node for event in loop.backwards if _excludes_all(event, waiting, loop))
    accumulating = [event for event in loop.backwards if not waits(event, loop.node, ids)]
    if not any(event.node not in elsewhere for event in accumulating):
        return None
    if _is_one(_window_size(first.test), loop.node) or not isinstance(first.statement, ast.If):
        return None
    return Window(
        size=_window_size(first.test),
        test=first.test,
        decision=first.statement,
        alternatives=tuple(guard for guard in decisions[1:] if isinstance(guard.statement, ast.If)),
        elsewhere=elsewhere,
        fires_on_last_batch=_fires_on_last_batch(first),
    )


def _is_one(size: str, loop: Loop) -> bool:
    """Whether a window holds one iteration: `% 1`, or what the round itself sets to 1 and to nothing else."""
    assigned = [node for node in walk(loop) if isinstance(node, ast.Assign) and size in map(path_of, node.targets)]
    return size == "1" or (bool(assigned) and all(ast.unparse(node.value) == "1" for node in assigned))


def _excludes_all(event: Event, others: Iterable[Event], loop: TrainingLoop) -> bool:
    """Whether an event is on another branch of a flag than each of the others, within the loop."""
    guards = event.site.guards_within(loop.node)
    return all(exclude_each_other(guards, other.site.guards_within(loop.node)) for other in others)


def _window_guard(step: Step, loop: TrainingLoop) -> Guard | None:
    """What a step waits for; in the `elif` of one such test, its own."""
    guards = [
        guard
        for guard in step.site.guards_within(loop.node)
        if is_window_test(guard.test) or _is_hand_counted(guard, loop.node)
    ]
    return next((guard for guard in guards if guard.value), guards[0] if guards else None)


def _is_hand_counted(guard: Guard, loop: Loop) -> bool:
    """`seen += 1`, and `if seen == k:` a step and `seen = 0`."""
    if not isinstance(guard.test, ast.Compare) or not isinstance(guard.test.ops[0], ast.Eq | ast.GtE):
        return False
    counter = path_of(guard.test.left)
    if counter is None or not isinstance(guard.statement, ast.If):
        return False
    counted = any(isinstance(node, ast.AugAssign) and path_of(node.target) == counter for node in walk(loop))
    reset = any(
        isinstance(node, ast.Assign) and counter in map(path_of, node.targets) for node in walk(guard.statement)
    )
    return counted and reset


def is_window_name(path: str) -> bool:
    """Whether a name speaks of accumulation: `accumulation_steps`, `args.accumulate`."""
    return bool(_WINDOW_NAME.search(path))


def is_window_test(test: ast.expr) -> bool:
    """`(i + 1) % k == 0` and its kin: true once every few iterations."""
    for node in walk(test):
        if _remainder(node) is not None:
            return True
        if isinstance(node, ast.Name | ast.Attribute) and is_window_name(path_of(node) or ""):
            return isinstance(test, ast.Compare | ast.BoolOp) and not _asks_for_accumulation(test)
    return False


def _asks_for_accumulation(test: ast.expr) -> bool:
    """`if args.accumulation_steps > 1:`, or `> 0`: whether anything is accumulated at all."""
    match test:
        case ast.Compare(ops=[ast.Gt() | ast.LtE()], comparators=[ast.Constant(0 | 1)]):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(1)]):
            return True
    return False


def _remainder(node: ast.AST) -> ast.expr | None:
    """The divisor of `i % k` or `divmod(i, k)`; None for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return node.right
    if isinstance(node, ast.Call) and path_of(node.func) == "divmod" and len(node.args) == 2:
        return node.args[1]
    return None


def _window_size(test: ast.expr) -> str:
    for node in walk(test):
        if (size := _remainder(node)) is not None:
            return ast.unparse(size)
    return ast.unparse(test.comparators[0] if isinstance(test, ast.Compare) else test)


def _counts_a_window(node: ast.For) -> bool:
    if _computes_a_part_anew(node):
        return False
    iterable = node.iter
    if not isinstance(iterable, ast.Call) or path_of(iterable.func) not in ("range", "trange", "tqdm.trange"):
        return False
    if not iterable.args:
        return False
    return is_window_name(" ".join(_names(iterable))) or _fetches_batches(node)


def _computes_a_part_anew(loop: Loop) -> bool:
    """`kept[:j] + [out] + kept[j + 1 :]`: each round's loss is that of all parts, whose gradients add up to its own."""
    ahead: set[str | None] = set()
    behind: set[str | None] = set()
    counting = None if isinstance(loop, ast.While) else path_of(loop.target)
    for node in walk(loop):
        match node:
            case ast.Subscript(whole, ast.Slice(None, ast.Name(counter), None)) if counter == counting:
                ahead.add(path_of(whole))
            case ast.Subscript(
                whole, ast.Slice(ast.BinOp(ast.Name(counter), ast.Add(), ast.Constant(1)), None, None)
            ) if counter == counting:
                behind.add(path_of(whole))
    return bool(ahead & behind - {None})


def _fetches_batches(loop: Loop) -> bool:
    """`batch = next(stream)` in each iteration."""
    return any(isinstance(node, ast.Call) and path_of(node.func) == "next" for node in walk(loop))


def _names(node: ast.AST) -> Iterator[str]:
    for child in walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def _fires_on_last_batch(guard: Guard) -> bool:
    """`... or (i + 1) == len(loader)`; in a guard that continues, `... and (i + 1) != len(loader)`."""
    alternative = ast.Or if guard.value else ast.And
    size = _window_size(guard.test)
    return any(
        isinstance(node, ast.BoolOp)
        and isinstance(node.op, alternative)
        and not (guard.value and all(_remainder_in(part) or _asks_for_short_epoch(part, size) for part in node.values))
        for node in walk(guard.test)
    )


def _remainder_in(node: ast.expr) -> bool:
    return any(_remainder(part) is not None for part in walk(node))


def _asks_for_short_epoch(node: ast.expr, size: str) -> bool:
    """`len(loader) <= k and (i + 1) == len(loader)`: the end of an epoch that has no whole window at all."""
    return (
        isinstance(node, ast.BoolOp)
        and isinstance(node.op, ast.And)
        and any(
            isinstance(part, ast.Compare)
            and isinstance(part.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            and size in (ast.unparse(part.left), ast.unparse(part.comparators[0]))
            for part in node.values
        )
    )


def lost_tails(loop: TrainingLoop, own: list[ast.AST]) -> list[ast.If]:
    """The decisions on which the last incomplete window of an epoch is never stepped.

    `own` are the nodes of the function that the loop is in.
    """
    window = loop.window
    if window is None or window.decision is None or loop.later_steps:
        return []
    if isinstance(loop.node, ast.While) or _is_the_whole_run(loop.node, own):
        return []
    if _ends_with_a_whole_window(loop.node, own):
        return []
    decisions = [] if window.fires_on_last_batch else [(window.decision, window.test)]
    for guard in window.alternatives:
        if isinstance(guard.statement, ast.If) and not _fires_on_last_batch(guard):
            decisions.append((guard.statement, guard.test))
    return [
        decision
        for decision, test in decisions
        if _is_counted_per_epoch(test, loop.node, own) or _is_dropped_by_the_next_epoch(test, loop.node, own)
    ]


def _is_the_whole_run(loop: ast.For | ast.AsyncFor, own: list[ast.AST]) -> bool:
    """`for step in range(100_000): batch = next(stream)`, in no other loop: there are no epochs that could end.

    Also `bar = tqdm(range(100_000))` and `for step in bar`.
    """
    around = any(isinstance(node, Loop) and encloses(node, loop) for node in own)
    bars = (
        node.value for node in own if isinstance(node, ast.Assign) and path_of(loop.iter) in map(path_of, node.targets)
    )
    counted = loop.iter if not isinstance(loop.iter, ast.Name) else next(bars, loop.iter)
    return not around and not _enumerates(loop) and "range" in _names(counted) and _fetches_batches(loop)


def _is_counted_per_epoch(test: ast.expr, loop: ast.For | ast.AsyncFor, own: list[ast.AST]) -> bool:
    counters = set(_names(test))
    counters |= set(_counted_from(counters, loop))
    counted = [loop, *(outer for outer in own if _enumerates(outer) and encloses(outer, loop))]
    return any(counters & set(_names(node.target)) for node in counted) or any(
        _starts_with_the_epoch(counter, loop, own) for counter in counters
    )


def _counted_from(counters: set[str], loop: Loop) -> Iterator[str]:
    """`i`, of a counter that each round sets to `i + 1`."""
    for node in walk(loop):
        match node:
            case ast.Assign([ast.Name(counter)], ast.BinOp(ast.Name(index), ast.Add(), ast.Constant())):
                if counter in counters:
                    yield index


def _is_dropped_by_the_next_epoch(test: ast.expr, loop: ast.For | ast.AsyncFor, own: list[ast.AST]) -> bool:
    """`self.optimizer.zero_grad()` where each epoch begins, with a counter that goes on: `self.seen % k == 0`."""
    around = [node for node in own if isinstance(node, Loop | ast.If) and encloses(node, loop)]
    counted = {path_of(node.target) or "" for node in walk(loop) if isinstance(node, ast.AugAssign)}
    on_object = any(path.startswith("self.") and last_of(path) in _names(test) for path in counted)
    return (on_object or any(isinstance(node, Loop) for node in around)) and any(
        node.lineno < loop.lineno
        and all(encloses(outer, node) for outer in around)
        and not any(isinstance(other, ast.If) and other not in around and encloses(other, node) for other in own)
        for node in own
        if _resets_gradients(node)
    )


def _resets_gradients(node: ast.AST) -> TypeGuard[ast.Expr]:
    match node:
        case ast.Expr(ast.Call(ast.Attribute(attr="zero_grad"))):
            return True
    return False


def _enumerates(node: ast.AST) -> TypeGuard[ast.For]:
    """`for i, batch in tqdm(enumerate(loader))`."""
    return isinstance(node, ast.For) and any(
        isinstance(part, ast.Call) and path_of(part.func) == "enumerate" for part in walk(node.iter)
    )


def _starts_with_the_epoch(counter: str, loop: ast.For | ast.AsyncFor, own: list[ast.AST]) -> bool:
    """A counter kept by hand that is set to a number right before or behind the loop, and counts within one run."""
    counts = any(isinstance(node, ast.AugAssign) and path_of(node.target) == counter for node in walk(loop))
    shared = any(isinstance(node, ast.Global | ast.Nonlocal) and counter in node.names for node in own)
    leaves = any(isinstance(node, ast.If) and _breaks(node) and counter in _names(node.test) for node in walk(loop))
    if not counts or shared or leaves:
        return False
    around = [node for node in own if isinstance(node, Loop) and encloses(node, loop)]
    starts = [node for node in own if isinstance(node, ast.Assign) and _sets_to_number(node, counter)]
    starts = [node for node in starts if node.lineno < loop.lineno or (around and node.lineno > _end_of(loop))]
    return bool(starts) and any(all(encloses(outer, start) for outer in around) for start in starts)


def _end_of(loop: Loop) -> int:
    return loop.end_lineno or loop.lineno


def _sets_to_number(statement: ast.Assign, name: str) -> bool:
    """`seen = 0`, also beside other targets."""
    for target in statement.targets:
        if isinstance(target, ast.Name) and target.id == name:
            return isinstance(statement.value, ast.Constant)
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = zip(target.elts, statement.value.elts, strict=False)
            if any(path_of(one) == name and isinstance(value, ast.Constant) for one, value in pairs):
                return True
    return False


def _ends_with_a_whole_window(loop: ast.For | ast.AsyncFor, own: list[ast.AST]) -> bool:
    """`if i >= len(loader) // k * k: break`, a loop over so many batches, or `assert len(loader) % k == 0`."""
    values = {
        target.id: node.value
        for node in own
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if any(isinstance(node, ast.Assert) and _says_no_remainder(node.test) for node in own):
        return True
    limits: list[ast.expr] = [loop.iter]
    limits += [node.test for node in walk(loop) if isinstance(node, ast.If) and isinstance(node.body[0], _SKIPPING)]
    parts = [part for part in walk(*limits) if isinstance(part, ast.expr)]
    return any(_is_multiple(part, values) or _counts_windows(part, loop, values) for part in parts)


def _says_no_remainder(test: ast.expr) -> bool:
    """`len(loader) % k == 0`."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and _remainder(test.left) is not None
        and "len" in _names(test.left)
    )


def _counts_windows(node: ast.expr, loop: ast.For | ast.AsyncFor, values: dict[str, ast.expr]) -> bool:
    """`i // k` of the loop's own index, or a name of it: what is compared are whole windows."""
    value = values.get(node.id, node) if isinstance(node, ast.Name) else node
    counts = isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv)
    return counts and bool(set(_names(value)) & set(_names(loop.target)))


def _is_multiple(node: ast.expr, values: dict[str, ast.expr]) -> bool:
    """`n // k * k`, `n - n % k`, or a name of such a number."""
    if isinstance(node, ast.Name):
        value = values.get(node.id)
        return isinstance(value, ast.BinOp) and _is_multiple(value, values)
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Sub):
        return isinstance(node.right, ast.BinOp) and isinstance(node.right.op, ast.Mod)
    sides = [values.get(side.id, side) if isinstance(side, ast.Name) else side for side in (node.left, node.right)]
    return isinstance(node.op, ast.Mult) and any(
        isinstance(side, ast.BinOp) and isinstance(side.op, ast.FloorDiv) for side in sides
    )


def _breaks(statement: ast.If) -> bool:
    return any(isinstance(node, ast.Break) for node in walk(statement))


def is_divided(backward: Backward, window: Window) -> bool:
    """Whether the loss was divided by what may be the window's size.

    A literal counts when it is the size, or when the size is a name and the literal is too large for the mean of a few
    loss terms.
    """
    if backward.node.args and backward.framework is None and not backward.scaled:
        return True  # `loss.backward(torch.tensor(1 / k))`
    for divisor in backward.divisors:
        if not divisor.replace(".", "", 1).isdigit() or divisor == window.size:
            return True
        if not window.size.isdigit() and float(divisor) >= 4:
            return True
    return False
