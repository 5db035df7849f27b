"""The arithmetic of the corpus sheet: what an auditor found against what reviewers labelled.

A place is a repository, a path, a line and a code; however often it is found or labelled, it counts once. Places
that reviewers call debatable are scored neither way.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple


class Mark(NamedTuple):
    """A place in a script and what is there: a rule's code, LOOP for a training loop, PARSE for no Python 3."""

    repo: str
    path: str
    line: int
    code: str


class Verdict(str, Enum):
    """What became of a place that was found, labelled, or both."""

    RIGHT = "right"
    WRONG = "wrong"
    MISSED = "missed"
    DEBATABLE = "debatable"


class Score(NamedTuple):
    """Counts of places.

    Attributes:
        right: found, and labelled true.
        wrong: found, and not labelled.
        missed: labelled true, and not found.
    """

    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float | None:
        """The share of what was found that is right; None where nothing was found."""
        found = self.right + self.wrong
        return self.right / found if found else None

    @property
    def recall(self) -> float | None:
        """The share of what is there that was found; None where nothing is there."""
        there = self.right + self.missed
        return self.right / there if there else None

    def __add__(self, other: object) -> "Score":
        if not isinstance(other, Score):
            return NotImplemented
        return Score(self.right + other.right, self.wrong + other.wrong, self.missed + other.missed)


def judge(found: Iterable[Mark], labels: Iterable[tuple[Mark, bool]]) -> dict[Mark, Verdict]:
    """The verdict on every place that was found and on every true label that was not, in the order of places.

    Args:
        found: what an auditor reports.
        labels: places with True for a true label and False for a debatable one. A place with both is true: one of
            the occurrences on that line surely counts.
    """
    certain: dict[Mark, bool] = {}
    for mark, is_true in labels:
        certain[mark] = certain.get(mark, False) or is_true
    verdicts = {mark: _verdict(certain.get(mark)) for mark in found}
    verdicts |= {mark: Verdict.MISSED for mark, is_true in certain.items() if is_true and mark not in verdicts}
    return dict(sorted(verdicts.items()))


def _verdict(label: bool | None) -> Verdict:
    if label is None:
        return Verdict.WRONG
    return Verdict.RIGHT if label else Verdict.DEBATABLE


def scores(verdicts: Mapping[Mark, Verdict]) -> dict[str, Score]:
    """The counts of every code among the verdicts, in the order of codes."""
    counted = {
        Verdict.RIGHT: Score(right=1),
        Verdict.WRONG: Score(wrong=1),
        Verdict.MISSED: Score(missed=1),
        Verdict.DEBATABLE: Score(),
    }
    result: dict[str, Score] = {}
    for mark, verdict in verdicts.items():
        result[mark.code] = result.get(mark.code, Score()) + counted[verdict]
    return dict(sorted(result.items()))


def total(parts: Iterable[Score]) -> Score:
    """All counts together."""
    result = Score()
    for part in parts:
        result += part
    return result


def moved(marks: Iterable[Mark], place: Callable[[Mark], Mark | None]) -> set[Mark]:
    """The marks at coarser places, each once: `place` gives the new one, or None to leave the mark out."""
    return {mark for mark in map(place, marks) if mark is not None}
