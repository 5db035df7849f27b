"""Training loops: which loops train, and what is known of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oomfix.script.names import path_of
from oomfix.script.trace import Backward, Forward, Guard, Loop, Step, Trace

_WINDOW_NAME = re.compile(r"accum|micro|grad_?steps|iter_?size|update_(freq|every)|virtual|subdivision", re.IGNORECASE)


@dataclass
class Window:
    """Gradient accumulation: a step every `size` iterations.

    `test` is what the step waits for, `decision` the `if` that asks it; None when the window is an inner loop.
    """

    size: str
    test: ast.expr
    decision: ast.If | None
    fires_on_last_batch: bool = False
    """An alternative in the decision lets the step through at the end of the epoch."""


@dataclass
class TrainingLoop:
    """The innermost batch loop whose iterations run a backward, with its events in program order."""

    node: Loop
    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    later_steps: list[Step] = field(default_factory=list)
    """Steps that run when the loop has ended, in what surrounds it."""
    framework: str | None = None
    window: Window | None = None
    runs: set[int] = field(default_factory=set)
    """The runs of the loop in which a backward happens: a loop that also evaluates has others."""

    @property
    def line(self) -> int:
        """The line of the `for` or `while` (1-based)."""
        return self.node.lineno

    @property
    def end_line(self) -> int:
        """The last line of the loop's body (1-based)."""
        return self.node.end_lineno or self.node.lineno

    @property
    def autocast(self) -> str:
        """The dtype under which its forwards run: "none", "float16", "bfloat16", "unknown" or "framework"."""
        kinds = {
            "unknown" if forward.site.autocast == "held" else forward.site.autocast for forward in self.forwards
        } - {None}
        if self.framework is not None:
            return "framework"
        return "none" if not kinds else (kinds.pop() or "unknown") if len(kinds) == 1 else "unknown"

    @property
    def accumulates_by_itself(self) -> bool:
        """Whether a framework divides the loss and steps the tail; apex does the precision only."""
        return self.framework not in (None, "apex")

    @property
    def accumulated_backwards(self) -> list[Backward]:
        """The backwards that run on every iteration of the window."""
        if self.window is None or self.window.decision is None:
            return self.backwards
        return [backward for backward in self.backwards if not _waits(backward, self.node, {id(self.window.decision)})]

    def to_json(self) -> dict[str, Any]:
        """The loop as `oomfix audit --format json` shows it."""
        return {
            "line": self.line,
            "end_line": self.end_line,
            "forwards": _lines(self.forwards),
            "backwards": _lines(self.backwards),
            "steps": _lines(self.steps or self.later_steps),
            "optimizers": sorted({step.optimizer for step in self.steps or self.later_steps}),
            "amp": self.autocast,
            "accumulation": None if self.window is None else self.window.size,
            "framework": self.framework,
        }


def _lines(events: list[Any]) -> list[int]:
    return sorted({event.node.lineno for event in events})


def find_training_loops(trace: Trace) -> list[TrainingLoop]:
    """Every training loop of a file, by line."""
    loops: dict[Loop, TrainingLoop] = {}
    for backward in trace.backwards:
        if backward.is_grad_call or not backward.site.loops:
            continue
        node = _batch_loop(backward, trace)
        if node in trace.framework_loops:
            continue
        loop = loops.setdefault(node, TrainingLoop(node))
        loop.backwards.append(backward)
        loop.runs.add(backward.site.runs[backward.site.loops.index(node)])
        loop.framework = loop.framework or backward.framework or ("apex" if backward.site.apex else None)
    _collect_forwards(loops, trace)
    _collect_steps(loops, trace)
    for loop in loops.values():
        loop.window = _window(loop)
    return sorted(loops.values(), key=lambda loop: loop.line)


def _batch_loop(backward: Backward, trace: Trace) -> Loop:
    """The innermost loop around both the backward and a forward it goes through.

    A loop over losses, scales or discriminators around the backward alone is part of an iteration, not a batch loop.
    """
    around = backward.site.loops
    depths = [_shared_depth(around, forward.site.loops) for forward in trace.forwards_of(backward.origins)]
    depth = max(depths, default=0)
    if depth:
        return around[depth - 1]
    batches = [loop for loop in around if loop not in trace.loops_over_parts]
    return (batches or list(around))[-1]


def _shared_depth(first: tuple[Loop, ...], second: tuple[Loop, ...]) -> int:
    depth = 0
    for one, other in zip(first, second, strict=False):
        if one is not other:
            break
        depth += 1
    return depth


def _collect_forwards(loops: dict[Loop, TrainingLoop], trace: Trace) -> None:
    """Each forward belongs to the innermost training loop around it."""
    for forward in trace.forwards.values():
        node = next((node for node in reversed(forward.site.loops) if node in loops), None)
        if node is not None and (forward.origin in trace.backpropagated or _feeds_hooks(forward, loops[node])):
            loops[node].forwards.append(forward)


def _collect_steps(loops: dict[Loop, TrainingLoop], trace: Trace) -> None:
    """The steps in each loop, and those behind it in what surrounds it."""
    outside: dict[tuple[Loop, ...], list[TrainingLoop]] = {}
    for loop in loops.values():
        for around in {backward.site.loops[: backward.site.loops.index(loop.node)] for backward in loop.backwards}:
            outside.setdefault(around, []).append(loop)
    for step in trace.steps:
        for node in step.site.loops:
            if node in loops:
                loops[node].steps.append(step)
        for loop in outside.get(step.site.loops, ()):
            if loop.node not in step.site.loops and _runs_after(step, loop):
                loop.later_steps.append(step)


def _feeds_hooks(forward: Forward, loop: TrainingLoop) -> bool:
    """A forward whose result nobody takes, in a training iteration: the loss gets at it by hooks or attributes."""
    return forward.discarded and forward.site.run_of(loop.node) in loop.runs and not forward.evaluating


def _runs_after(step: Step, loop: TrainingLoop) -> bool:
    """The step is behind the loop, in the same function or in the loop around it."""
    if step.node.lineno <= loop.end_line:
        return False
    return bool(step.site.loops) or step.site.function is loop.backwards[0].site.function


def _window(loop: TrainingLoop) -> Window | None:
    """The accumulation window: every step waits for a test that some backward does not wait for."""
    if loop.steps:
        guards = [_window_guard(step, loop) for step in loop.steps]
        first = guards[0]
        if first is None or any(guard is None for guard in guards):
            return None
        waiting = {id(guard.statement) for guard in guards if guard is not None}
        if _window_size(first.test) == "1":
            return None
        free = [backward for backward in loop.backwards if not _waits(backward, loop.node, waiting)]
        if not free or not isinstance(first.statement, ast.If):
            return None
        return Window(_window_size(first.test), first.test, first.statement, _fires_on_last_batch(first))
    if loop.later_steps and isinstance(loop.node, ast.For) and _counts_a_window(loop.node):
        iterable = loop.node.iter
        size = iterable.args[-1] if isinstance(iterable, ast.Call) and iterable.args else iterable
        return Window(ast.unparse(size), size, None)
    return None


def _waits(backward: Backward, loop: Loop, decisions: set[int]) -> bool:
    return any(id(guard.statement) in decisions for guard in backward.site.guards_within(loop))


def _window_guard(step: Step, loop: TrainingLoop) -> Guard | None:
    for guard in step.site.guards_within(loop.node):
        if is_window_test(guard.test) or _is_hand_counted(guard, loop.node):
            return guard
    return None


def _is_hand_counted(guard: Guard, loop: Loop) -> bool:
    """`seen += 1`, and `if seen == k:` a step and `seen = 0`."""
    if not isinstance(guard.test, ast.Compare) or not isinstance(guard.test.ops[0], ast.Eq | ast.GtE):
        return False
    counter = path_of(guard.test.left)
    if counter is None or not isinstance(guard.statement, ast.If):
        return False
    counted = any(isinstance(node, ast.AugAssign) and path_of(node.target) == counter for node in ast.walk(loop))
    reset = any(
        isinstance(node, ast.Assign) and counter in map(path_of, node.targets) for node in ast.walk(guard.statement)
    )
    return counted and reset


def is_window_test(test: ast.expr) -> bool:
    """`(i + 1) % k == 0` and its kin: true once every few iterations."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return True
        if isinstance(node, ast.Name | ast.Attribute) and _WINDOW_NAME.search(path_of(node) or ""):
            return isinstance(test, ast.Compare | ast.BoolOp)
    return False


def _window_size(test: ast.expr) -> str:
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return ast.unparse(node.right)
    return ast.unparse(test.comparators[0] if isinstance(test, ast.Compare) else test)


def _counts_a_window(node: ast.For) -> bool:
    iterable = node.iter
    if (
        isinstance(iterable, ast.Call)
        and path_of(iterable.func) in ("range", "trange", "tqdm.trange")
        and iterable.args
    ):
        names = " ".join(_names(iterable))
        fetches = any(isinstance(child, ast.Call) and path_of(child.func) == "next" for child in ast.walk(node))
        return bool(_WINDOW_NAME.search(names)) or fetches
    return False


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def _fires_on_last_batch(guard: Guard) -> bool:
    """`... or (i + 1) == len(loader)`; in a guard that continues, `... and (i + 1) != len(loader)`."""
    alternative = ast.Or if guard.value else ast.And
    return any(isinstance(node, ast.BoolOp) and isinstance(node.op, alternative) for node in ast.walk(guard.test))


def is_counted_per_epoch(loop: TrainingLoop) -> bool:
    """Whether the window's counter starts anew with the loop: it is the loop's own index."""
    assert loop.window is not None and loop.window.decision is not None
    node = loop.node
    if isinstance(node, ast.While):
        return False
    targets = set(_names(node.target))
    return bool(targets & set(_names(loop.window.test)))


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
