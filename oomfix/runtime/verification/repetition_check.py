"""Rows that come again: they count again, unless samples that are alike are grouped, or compete for places.

Rows that a check chooses are unlike each other, so that each may be alone in its group: the sum over classes of their
mean losses looks like one over samples then. Nor do a few that are unlike each other fill what has room for some of
each kind, such as an expert that takes no more than its share of a batch. What is between two that are alike is often
nothing, as their distance is, so rows that differ are put into one class too.
"""

from dataclasses import replace

from oomfix.runtime.batches.rows import first_part, of_one_class
from oomfix.runtime.verification.evidence import Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.judging import judge
from oomfix.runtime.verification.result_check import Found
from oomfix.runtime.verification.verdict import Verdict


def by_repetition(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where both parts have a row in common; None where the forward fails."""
    rows, cut = few.named(count), first_part(count)
    # the second part begins with the row that the first one ends with, so that their order is kept
    return _judged(few, how, [*rows[:cut], rows[cut - 1], *rows[cut + 1 :]])


def by_copies(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """The verdict where each part is one row again and again; None where the forward fails, or picks no samples.

    What is put into an order may have been drawn in that order, so it is drawn the other way round.
    """
    if not found.picks:
        return None
    rows, cut = few.named(count), first_part(count)
    return _judged(few, replace(how, reverses=True), [*rows[:1] * cut, *rows[-1:] * (count - cut)])


def by_one_class(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where both parts have rows of one class; None where they do already, or where the forward fails."""
    gaps = of_one_class(few.batch, few.named(count))
    if not gaps:
        return None
    evidence = few.compared(count, replace(how, empties=True), gaps=gaps)
    return None if evidence.failure else judge(evidence)


def _judged(few: FewRows, how: Runs, rows: list[int]) -> Verdict | None:
    evidence = few.compared(len(rows), how, rows=rows)
    return None if evidence.failure else judge(evidence)
