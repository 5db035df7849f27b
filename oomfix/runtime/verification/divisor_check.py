"""A mean that a program takes itself (`divisors`): may the parts of a batch be weighed by what their losses divide by?

Rows of which a mask leaves as much each show nothing of such a mean, so masks get gaps; and a part in which nothing
counts shows whether the program then divides by 0, which weighs nothing, or by something else.
"""

from dataclasses import replace

from oomfix.runtime import compat
from oomfix.runtime.batches.rows import gaps_for_masks, leaving_nothing
from oomfix.runtime.verification.divisors import NEXT_TO_NOTHING
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.gradient_check import by_gradients
from oomfix.runtime.verification.judging import DEPEND, NO_NUMBER, OPEN, SEVERAL_DEPEND, judge
from oomfix.runtime.verification.verdict import Verdict


def by_divisors(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict where the parts weigh what their losses divide by; None where the forward fails."""
    # what a mask selects cannot be held out by rows, see `watching.HeldOut`; gaps show as much
    how = replace(how, graph=True, light=False, divides=True, holds_out=False)
    gaps = gaps_for_masks(few.batch, few.named(count))
    evidence = few.compared(count, how, gaps=gaps)
    if evidence.alike_masks:
        how = replace(how, mask_gaps=evidence.alike_masks)
        evidence = few.compared(count, how, gaps=gaps)
    if evidence.failure:
        return None
    # one weight is not right for several means
    refused = Verdict(None, SEVERAL_DEPEND if evidence.nll_losses + len(evidence.divisors) > 1 else DEPEND)
    verdict = judge(evidence, rows=count)
    counts = [share.targets for share in evidence.shares if share.targets == share.divided_by]
    if verdict.reason == OPEN and evidence.divisors and any(counts):
        return verdict  # nothing counts in one of the parts: other rows may show more
    if verdict.units != "targets" or verdict.nll_losses or not verdict.divisors:
        return refused
    if not all(share.targets > NEXT_TO_NOTHING for share in evidence.shares):
        # the other part is the whole then, whatever it makes of its rows
        return replace(verdict, rule=None, reason=NO_NUMBER, undecided=True)
    if verdict.bound is not None and any(map(compat.is_compiled, few.modules)):
        return refused  # what it calls cannot be noted then
    gradients = by_gradients(few, how, count, gaps)
    if gradients is None or gradients.rule is None:
        return refused
    from_nothing: bool | None = False
    how = replace(how, mask_gaps=frozenset(), empties=True)
    for nothing in leaving_nothing(few.batch):
        from_nothing = _from_nothing(verdict, few.compared(count, how, gaps=nothing), count)
        if from_nothing is None:
            return refused
        if from_nothing:
            break
    return replace(verdict, held=True, from_nothing=bool(from_nothing), graphs=gradients.graphs)


def by_divisors_of_more(few: FewRows, how: Runs, earlier: Verdict, count: int) -> Verdict:
    """`earlier`, the verdict on a few rows, unless more of them refuse it, in parts that are as alike as they can be.

    The kinds of a few samples that are unlike may be others in each part, so that a mean over the kinds that are there
    looks like one over what belongs to each.
    """
    how = replace(how, graph=True, light=False, divides=True, holds_out=False)
    spread = range(0, few.batch.size, max(few.batch.size // count, 1))[:count]
    rows = [*spread[::2], *spread[1::2]]
    evidence = few.compared(len(rows), how, rows=rows)
    found = judge(evidence, rows=count)
    shows_nothing = found.undecided or not all(share.targets > NEXT_TO_NOTHING for share in evidence.shares)
    return earlier if found.rule is not None or shows_nothing else Verdict(None, DEPEND)


def _from_nothing(verdict: Verdict, emptied: Evidence, rows: int) -> bool | None:
    """Whether what the loss divides by was 0 for a part in which nothing counts; None if `verdict` does not hold then.

    A program may divide by something else instead (`max(count, 1)`), and terms of a loss that has such a divisor may
    count nevertheless.
    """
    if emptied.failure:
        return False
    if (emptied.divisors, emptied.bound) != (verdict.divisors, verdict.bound):
        return None
    if emptied.shares[0].targets > NEXT_TO_NOTHING:
        return False
    seen = judge(emptied, rows=rows)
    return seen.units == "targets" if seen.rule is not None else False if seen.undecided else None
