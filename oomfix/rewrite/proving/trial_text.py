"""What `oomfix apply --check-equivalence` says: losses side by side, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from oomfix.equivalence.comparison import Step
from oomfix.rewrite.proving.trial import Side, Trial

_ROWS = 10


def lines(trial: Trial, mended: Sequence[str] = ()) -> list[str]:
    """The losses of some steps of each version side by side, and whether all trained the same.

    Args:
        trial: the runs.
        mended: what the rewrite mended that changes what is trained, one clause each.
    """
    columns = ["before", *(f"after, {side.name}" for side in trial.sides)]
    rows = _losses(trial)
    text = [f"loss  {'step':>5}" + "".join(f"{column:>16}" for column in columns)]
    for number in _shown(len(rows)):
        text.append(f"      {number:>5}" + "".join(f"{_number(loss):>16}" for loss in rows[number - 1]))
    text += [_verdict(side) for side in trial.sides]
    if trial.mends and trial.same:
        return [*text, "the rewritten scripts train the same"]
    if trial.same:
        text += [f"left out, since it changes what is trained: {clause}" for clause in mended]
        return [*text, "the rewritten scripts train the same, but for what they mend"]
    return [*text, "the rewritten scripts do not train the same"]


def as_json(trial: Trial) -> dict[str, Any]:
    """The losses of all steps of the first process, and what each version's comparison found."""
    names = ["before", *(side.name for side in trial.sides)]
    return {
        "command": trial.command,
        "same": trial.same,
        "mends_compared": trial.mends,
        "losses": [dict(zip(names, row, strict=True)) for row in _losses(trial)],
        "versions": [
            {
                "name": side.name,
                "tolerance": side.tolerance or 0.0,
                "steps": side.found.steps,
                "largest_difference": side.found.worst,
                "difference": side.found.difference,
                "notes": list(side.notes),
            }
            for side in trial.sides
        ],
    }


def _losses(trial: Trial) -> list[list[float | None]]:
    """For each step of the first process, the loss of each version; None where a version made no such step."""
    versions = [trial.before, *(side.processes for side in trial.sides)]
    first = [processes[0].steps if processes else () for processes in versions]
    return [[_loss(step) for step in steps] for steps in zip_longest(*first)]


def _loss(step: Step | None) -> float | None:
    return step.loss if step is not None and step.losses else None


def _shown(count: int) -> list[int]:
    """The numbers of the steps to show: the first ones, then some up to the last."""
    if count <= _ROWS:
        return list(range(1, count + 1))
    half = _ROWS // 2
    spread = [half + (count - half) * index // (_ROWS - half) for index in range(1, _ROWS - half + 1)]
    return [*range(1, half + 1), *spread]


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.7g}"


def _verdict(side: Side) -> str:
    found = side.found
    notes = "".join(f"; {note}" for note in side.notes)
    if found.difference is not None:
        return f"{side.name}: differs: {found.difference}{notes}"
    if found.worst == 0:
        return f"{side.name}: the same weights, to the bit, after each of {found.steps} steps{notes}"
    within = f"the same weights within {side.tolerance:.0e} after each of {found.steps} steps"
    return f"{side.name}: {within} (at most {found.worst:.1e} apart){notes}"
