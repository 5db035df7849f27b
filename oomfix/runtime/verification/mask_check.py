"""Masks that happen to tell no rows apart get a gap in the first row: a mean over what they leave shows then."""

from dataclasses import replace

from oomfix.runtime.batches.rows import choose_others, gaps_for_masks
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.judging import DEPEND, OPEN, OTHERS, SEVERAL_DEPEND, contradict, judge
from oomfix.runtime.verification.result_check import Found
from oomfix.runtime.verification.verdict import Verdict


def by_masks(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where masks of the batch have gaps; None if none tells nothing, or they are refused."""
    gaps = gaps_for_masks(few.batch, few.named(count))
    if not gaps:
        return None
    evidence = few.compared(count, how, gaps=gaps)
    return None if evidence.failure else judge(evidence)


def by_other_rows(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """The verdict that rows give which masks tell apart, where those looked at all have nothing, or the same.

    None where masks told these apart, or the others say nothing else.
    """
    for rows in choose_others(few.batch, few.named(count)):
        evidence = few.compared(count, how, rows=rows)
        verdict = Verdict(None, OPEN, undecided=True) if evidence.failure else judge(evidence)
        if not verdict.undecided and (verdict.rule is None or contradict(found.verdict, verdict)):
            return verdict
    return None


def by_computed_masks(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """As `by_masks`, for masks that the forward computes."""
    # fewer rows than the verdict was given on: those did not fit again
    alike = found.alike_masks if count == found.rows else few.compared(count, how).alike_masks
    evidence = few.compared(count, replace(how, mask_gaps=alike)) if alike else None
    return None if evidence is None or evidence.failure else judge(evidence)


def by_empty_masks(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """The verdict that refuses a split where computed masks leave something that left nothing; None if nothing does.

    What another branch does then, as behind `if (loss > 100).any()`, is seen at the micro-batches that take it.
    """
    empty = found.empty_masks if count == found.rows else few.compared(count, how).empty_masks
    filled = few.compared(count, replace(how, mask_gaps=empty)) if empty else None
    if filled is None or filled.failure:
        return None
    verdict = judge(filled)
    if verdict.reason == OTHERS:
        return verdict
    depends = verdict.reason in (DEPEND, SEVERAL_DEPEND)
    return verdict if depends and _is_one_way(filled, few.compared(count, how)) else None


def _is_one_way(evidence: Evidence, other: Evidence) -> bool:
    """Whether a forward computed the same with masks that leave something and without, of other numbers."""
    return (evidence.calls, evidence.truths) == (other.calls, other.truths)
