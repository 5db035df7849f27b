"""What becomes of a training loop."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from oomfix.script import TrainingLoop
from oomfix.script.facts.trace import Backward, Step
from oomfix.script.syntax.edits import Edit

Form = Literal["micro-batched", "in-place", "none"]
Scaling = Literal["ours", "none", "script's"]
"""Who scales losses in a file: the manager, nobody (no fp16), or the script itself, precision and all."""

WINDOW_STAYS = "its accumulation window stays"


class Lifted(NamedTuple):
    """What an attempt to lift the slices of a loop makes of it.

    Attributes:
        reason: why they stay in place; None where they become functions.
        joined_line: the line that holds more than one statement, where that is the reason.
        state: what the slices leave behind in objects, or hand on from row to row.
        said: what else is to be said of them: of batches that may be objects, of lines that print or log.
        runs_ahead: networks run outside of them, for more than one.
        says_again: they print or log, and would do so for every part of a batch.
    """

    reason: str | None = None
    joined_line: int | None = None
    state: str | None = None
    said: tuple[str, ...] = ()
    runs_ahead: bool = False
    says_again: bool = False

    @property
    def form(self) -> Form:
        """The form of the loop then."""
        return "micro-batched" if self.reason is None else "in-place"


@dataclass(eq=False)
class Verdict:
    """What becomes of a loop.

    Attributes:
        loop: the loop.
        form: the strongest form that is safe.
        reason: why not more; None for a loop that is micro-batched.
        backwards: the calls that run its backwards, one per place in the file.
        liftable: those whose slice may be tried as a function.
        steps: the calls that step its optimizers and that the manager can make.
        kept_steps: those that stay as they are.
        sees_scale: why its gradients must not be scaled by the manager, or None.
        scaled: whether the script scales its loss.
        state: why the batches of a lifted slice run whole: what it leaves behind, or hands on from row to row.
        runs_ahead: networks run outside of the lifted slices, for more than one of them.
        handed_to: who is given the loss, and runs its backward; None: the script does.
        said: what else the summary has to say of a lifted slice.
        notes: what else the summary has to say.
    """

    loop: TrainingLoop
    form: Form = "in-place"
    reason: str | None = None
    backwards: list[Backward] = field(default_factory=list)
    liftable: list[ast.Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kept_steps: list[Step] = field(default_factory=list)
    sees_scale: str | None = None
    state: str | None = None
    runs_ahead: bool = False
    handed_to: str | None = None
    said: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def scaled(self) -> bool:
        """Whether the script itself scales its loss, or something else that it is handed to."""
        is_handed = self.handed_to is not None and self.form != "none"
        return is_handed or any(event.scaled for event in self.backwards)

    def become(self, lifted: Lifted) -> None:
        """Take over what an attempt to lift its slices made of the loop."""
        self.form, self.reason = lifted.form, lifted.reason
        self.state, self.said, self.runs_ahead = lifted.state, lifted.said, lifted.runs_ahead

    def leave(self, reason: str) -> None:
        """Leave the loop alone."""
        self.form, self.reason = "none", reason


class Attempt(NamedTuple):
    """What lifting the slices of a file makes of it.

    Attributes:
        edits: what turns slices into functions.
        loops: of each loop that was tried, its verdict and what becomes of it.
    """

    edits: list[Edit]
    loops: list[tuple[Verdict, Lifted]]

    @property
    def lifted(self) -> set[int]:
        """The loops that are micro-batched, by the identity of their verdicts."""
        return {id(verdict) for verdict, lifted in self.loops if lifted.reason is None}

    @property
    def say_again(self) -> set[int]:
        """The loops that print or log where their loss is computed."""
        return {id(verdict) for verdict, lifted in self.loops if lifted.says_again}

    def is_more_than(self, other: Attempt) -> bool:
        """Whether it lifts more than another attempt, or as much with fewer loops that print for every part."""
        fewer = self.say_again < other.say_again
        return self.lifted > other.lifted or (self.lifted == other.lifted and fewer)

    @property
    def stays(self) -> bool:
        """Whether a loop stays in place."""
        return any(lifted.reason is not None for _, lifted in self.loops)

    @property
    def joined_lines(self) -> list[int]:
        """The lines that hold more than one statement, where that is what is in the way."""
        return [lifted.joined_line for _, lifted in self.loops if lifted.joined_line is not None]


class LoopOutcome(NamedTuple):
    """What became of a training loop, or of a function that is the iteration of one.

    Attributes:
        line, end_line: as in the file before; in a notebook, as in the cell.
        rewrite: the form.
        reason: why not more, None where nothing stood in the way.
        cell: the 1-based number of its cell in a notebook, else None.
        notes: what else is to be known of it, one clause each.
        function: the name of a function that makes a step each time it is called, by a loop in another file; None for
            a loop of this file.
    """

    line: int
    end_line: int
    rewrite: Form
    reason: str | None
    cell: int | None = None
    notes: tuple[str, ...] = ()
    function: str | None = None

    @property
    def why_window_stays(self) -> str | None:
        """What is said of an accumulation window that is not told to the runtime, though something is wrong with it."""
        return next((note for note in self.notes if note.startswith(WINDOW_STAYS)), None)
