"""Masks that happen to tell no rows apart get a gap in the first row: a mean over what they leave shows then."""

from dataclasses import replace

from oomfix.runtime.evidence import Runs
from oomfix.runtime.few_rows import FewRows
from oomfix.runtime.judging import judge
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
    alike = found.alike_masks if count == found.rows else few.compared(count, how).alike_masks
    if not alike:
        return None
    evidence = few.compared(count, replace(how, mask_gaps=alike))
    return None if evidence.failure else judge(evidence)
