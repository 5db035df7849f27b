"""Training loops: which loops train, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oomfix.script.trace import Backward, Forward, Loop, Step, Trace
from oomfix.script.windows import Window, find_window, waits


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
        decisions = {id(self.window.decision), *(id(guard.statement) for guard in self.window.alternatives)}
        return [
            backward
            for backward in self.backwards
            if backward.node not in self.window.elsewhere and not waits(backward, self.node, decisions)
        ]

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
        loop.window = find_window(loop)
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
