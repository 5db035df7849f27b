"""A training loop and its accumulation window: what is known of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from oomfix.script.facts.trace import Backward, Forward, Guard, Loop, Step


@dataclass(eq=False)
class Window:
    """Gradient accumulation: a step every `size` iterations.

    `test` is what the step waits for, `decision` the `if` that asks it; None when the window is an inner loop.
    """

    size: str
    test: ast.expr
    decision: ast.If | None
    alternatives: tuple[Guard, ...] = ()
    """The decisions on other branches of a flag, one for each way to step."""
    elsewhere: frozenset[ast.Call] = frozenset()
    """Backwards on a branch of a flag on which something else decides about the step."""
    fires_on_last_batch: bool = False
    """An alternative in the decision lets the step through at the end of the epoch."""


@dataclass(eq=False)
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
    batches: Loop | None = None
    """The loop around it that gives the batches, where it goes over networks that each train on the same batch."""

    @property
    def line(self) -> int:
        """The line of the `for` or `while` (1-based) that goes over batches."""
        return (self.batches or self.node).lineno

    @property
    def end_line(self) -> int:
        """The last line of the loop's body (1-based)."""
        loop = self.batches or self.node
        return loop.end_lineno or loop.lineno

    @property
    def autocast(self) -> str:
        """The dtype under which its forwards run: "none", "float16", "bfloat16", "unknown" or "framework"."""
        if self.framework is not None:
            return "framework"
        dtypes = {forward.site.autocast for forward in self.forwards if forward.site.autocast is not None}
        if not dtypes:
            return "none"
        return dtypes.pop() if len(dtypes) == 1 and "held" not in dtypes else "unknown"

    @property
    def accumulates_by_itself(self) -> bool:
        """Whether a framework divides the loss and steps the tail; apex and the runtime leave a window as it is."""
        return self.framework not in (None, "apex", "oomfix")

    @property
    def accumulated_backwards(self) -> list[Backward]:
        """The backwards that run on every iteration of the window."""
        if self.window is None:
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


def waits(backward: Backward, loop: Loop, decisions: set[int]) -> bool:
    """Whether a backward waits for one of these decisions (by `id`) within its loop."""
    return any(id(guard.statement) in decisions for guard in backward.site.guards_within(loop))
