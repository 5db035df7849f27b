"""Whether two runs of a training script trained the same: every optimizer step of one beside the other's.

The runs are recorded by `oomfix.equivalence.recorder`. Imports no torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

SKETCH_LENGTH = 256
"""Numbers that stand for all weights of a step: the distance of two sketches is that of the weights within 10 %."""

SPLIT_TOLERANCE = 1e-5
"""How much weights of an fp32 run may differ, relative, where batches were split."""


class Step(NamedTuple):
    """One optimizer step.

    Attributes:
        optimizer: which optimizer, by the order of their first steps.
        losses: what was backpropagated since the step before.
        digest: a hash of every bit of what the optimizer updates.
        sketch: the same as `SKETCH_LENGTH` sums over random halves of it, with signs; see `Recorder`.
    """

    optimizer: int
    losses: tuple[float, ...]
    digest: str
    sketch: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The sum of what was backpropagated for this step."""
        return math.fsum(self.losses)

    def to_json(self) -> dict[str, Any]:
        """The step in types that `json` writes."""
        return {**self._asdict(), "sketch": array("d", self.sketch).tobytes().hex()}

    @classmethod
    def from_json(cls, step: dict[str, Any]) -> Step:
        """The step that `to_json` gave."""
        sketch = array("d")
        sketch.frombytes(bytes.fromhex(step["sketch"]))
        return cls(step["optimizer"], tuple(step["losses"]), step["digest"], tuple(sketch))


class Recording(NamedTuple):
    """One process of a run.

    Attributes:
        steps: its optimizer steps.
        seen: what splitting or rounding cannot leave the same: "batch statistics", "random draws",
            "mixed precision".
        calls_in_parts: how many batches ran in micro-batches.
        files: the Python files that it imported, its script included.
    """

    steps: tuple[Step, ...]
    seen: frozenset[str] = frozenset()
    calls_in_parts: int = 0
    files: frozenset[str] = frozenset()


class Comparison(NamedTuple):
    """Two runs, step by step.

    Attributes:
        steps: how many steps both made.
        worst: the largest relative difference of their weights after a step; 0 where every bit is the same.
        difference: where and how they differ first, as one clause; None where they trained the same.
    """

    steps: int
    worst: float
    difference: str | None


def compare(before: Sequence[Recording], after: Sequence[Recording], tolerance: float | None = None) -> Comparison:
    """Compare the processes of two runs, one by one.

    Args:
        before, after: the processes of each run, in the same order.
        tolerance: the largest relative difference of the weights after a step; None: none, every bit is compared.
    """
    steps, worst, difference = 0, 0.0, None
    if len(before) != len(after):
        difference = f"other processes train: {len(before)} before and {len(after)} after"
    for one, other in zip(before, after, strict=False):
        for number, (mine, theirs) in enumerate(zip_longest(one.steps, other.steps), start=1):
            if mine is None or theirs is None:
                difference = difference or f"{len(one.steps)} steps before and {len(other.steps)} after"
                break
            steps += 1
            if mine.optimizer != theirs.optimizer:
                difference = difference or f"another optimizer makes step {number}"
                break
            if mine.digest != theirs.digest:
                distance = relative_distance(mine.sketch, theirs.sketch)
                worst = max(worst, distance)
                if tolerance is None or not distance <= tolerance:
                    difference = difference or f"weights differ by {distance:.1e} after step {number}"
    return Comparison(steps, worst, difference)


def relative_distance(one: Iterable[float], other: Iterable[float]) -> float:
    """The length of the difference of two vectors by the length of the first."""
    pairs = list(zip(one, other, strict=True))
    distance = math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs))
    length = math.sqrt(math.fsum(a * a for a, _ in pairs))
    if distance == 0:
        return 0.0
    return distance / length if length else math.inf
