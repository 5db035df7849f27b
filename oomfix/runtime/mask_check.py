"""Masks that happen to tell no rows apart get a gap in the first row: a mean over what they leave shows then."""

from dataclasses import replace

from oomfix.runtime.evidence import Runs
from oomfix.runtime.few_rows import FewRows
from oomfix.runtime.judging import OTHERS, judge
from oomfix.runtime.result_check import Found
from oomfix.runtime.rows import gaps_for_masks
from oomfix.runtime.verdict import Verdict


def by_masks(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where masks of the batch have gaps; None if none tells nothing, or they are refused."""
    gaps = gaps_for_masks(few.batch, few.named(count))
    if all(gap is None for gap in gaps):
        return None
    evidence = few.compared(count, how, gaps=gaps)
    return None if evidence.failure else judge(evidence)


def by_computed_masks(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """As `by_masks`, for masks that the forward computes."""
    # fewer rows than the verdict was given on: those did not fit again
    return _with_gaps(
        few, how, count, found.alike_masks if count == found.rows else few.compared(count, how).alike_masks
    )


def by_empty_masks(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """The verdict that refuses a split where computed masks leave something that left nothing; None if nothing does.

    What the loss does then, as behind `if (loss > 100).any()`, is seen at the micro-batches that do it.
    """
    empty = found.empty_masks if count == found.rows else few.compared(count, how).empty_masks
    verdict = _with_gaps(few, how, count, empty)
    return verdict if verdict is not None and verdict.reason == OTHERS else None


def _with_gaps(few: FewRows, how: Runs, count: int, masks: frozenset[int]) -> Verdict | None:
    if not masks:
        return None
    evidence = few.compared(count, replace(how, mask_gaps=masks))
    return None if evidence.failure else judge(evidence)
