"""The results of a few rows are compared with those of two parts.

Rows as they are chosen or as the batch has them, parts that repeat the draws of the whole or go on drawing, targets
held out or not: a forward may be split if one of these ways of running it says so. Later one confirms it.
"""

from dataclasses import dataclass, replace
from typing import Any

from oomfix.runtime import trees
from oomfix.runtime.batches.rows import has_single_row
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.judging import DEPEND, contradict, judge
from oomfix.runtime.verification.verdict import Verdict

_Best = tuple[Verdict, Runs, Evidence]
_OTHER_DRAWS = 6  # runs that shuffle a few rows otherwise


@dataclass(frozen=True)
class Found:
    """What the results showed.

    Attributes:
        verdict: the first that allows a split, or else that of runs which did not fail.
        how: how these runs were made.
        rows: on how many rows.
        alike_masks: see `evidence.Evidence`.
        empty_masks: see there.
        closed_hinges: see there.
        picks: see there.
        failed: the forward did.
        cross_entropies: with a mean; a loop over the samples has none.
        single_row_differs: a part was a single row, on which the forward may have failed or returned values of another
            kind: `squeeze()` takes away the dimension of samples too.
    """

    verdict: Verdict
    how: Runs
    rows: int
    alike_masks: frozenset[int]
    empty_masks: frozenset[int]
    closed_hinges: frozenset[int]
    picks: bool
    failed: bool
    cross_entropies: int
    single_row_differs: bool


def by_results(few: FewRows, trust: bool, count: int) -> Found:
    """The verdict on `count` rows; `trust`: a split was asked for whatever they show."""
    few.in_order = False
    verdict, how, evidence = _best(few, trust, count, graph=False)
    if evidence.failure and few.named(count) != sorted(few.named(count)):
        # sequences may have to lie by length, as the batch has them
        few.in_order = True
        in_order = _best(few, trust, count, graph=False)
        few.in_order = not in_order[2].failure
        if few.in_order:
            verdict, how, evidence = in_order
    if evidence.failure:
        # a forward that differentiates by itself fails without gradients
        verdict, how, evidence = _best(few, trust, count, graph=True)
    if verdict.rule is not None and evidence.drew_besides_torch:
        verdict, how, evidence = _with_other_draws(few, trust, count, (verdict, how, evidence))
    failed = bool(evidence.failure)
    differs = failed or not all(_is_of_one_kind(evidence.whole, part) for part in evidence.parts)
    verdict = replace(verdict, needs_gradients=how.graph)
    single_row_differs = has_single_row(count) and differs
    return Found(
        verdict,
        how,
        count,
        evidence.alike_masks,
        evidence.empty_masks,
        evidence.closed_hinges,
        evidence.picks,
        failed,
        evidence.nll_losses,
        single_row_differs,
    )


def by_named_rows(few: FewRows, earlier: Verdict, count: int) -> Verdict:
    """The verdict on two micro-batches, which are its `count` rows; `earlier`: that on others, which allows a split."""
    if earlier.divisors:
        found = judge(few.compared(count, Runs(graph=True, holds_out=False, divides=True)), rows=count)
        alike = (found.units, found.divisors, found.bound) == ("targets", earlier.divisors, earlier.bound)
        return found if found.rule is None or alike else Verdict(None, DEPEND)
    few.own_targets, few.counted_means = bool(earlier.own_targets), earlier.counted_means
    results = by_results(few, False, count)
    if results.verdict.rule is None:
        return results.verdict
    # with targets held out of the larger one, they may weigh the same
    found = judge(few.compared(count, replace(results.how, holds_out=False)), rows=count)
    return Verdict(None, DEPEND) if contradict(earlier, found) else found


def _is_of_one_kind(value: Any, other: Any) -> bool:
    """Whether two results hold values of the same types and numbers of dimensions."""
    if type(value) is not type(other):
        return False
    inner, others = trees.contents(value), trees.contents(other)
    if inner is None or others is None:
        return bool(getattr(value, "ndim", 0) == getattr(other, "ndim", 0))
    if isinstance(value, list):
        return True
    return len(inner) == len(others) and all(
        _is_of_one_kind(a, b) for (_, a), (_, b) in zip(inner, others, strict=True)
    )


def _with_other_draws(few: FewRows, trust: bool, count: int, best: _Best) -> _Best:
    """`best`, unless runs with other draws from Python and NumPy refuse: few rows may be shuffled alike.

    Flags drawn for each sample may be alike too, so that parts seem to draw again what the whole drew. They go on
    drawing where that is what other draws allow.
    """
    how = best[1]
    refused = _refused_by_other_draws(few, trust, count, how)
    if refused is None:
        return best
    if how.replays:
        how = replace(how, replays=False)
        evidence = few.compared(count, how)
        goes_on = replace(judge(evidence, trust, count), differentiates=evidence.differentiates)
        if goes_on.rule is not None and _refused_by_other_draws(few, trust, count, how) is None:
            return goes_on, how, evidence
    return refused, *best[1:]


def _refused_by_other_draws(few: FewRows, trust: bool, count: int, how: Runs) -> Verdict | None:
    for ahead in range(1, _OTHER_DRAWS + 1):
        other = judge(few.compared(count, replace(how, ahead=ahead)), trust, count)
        if other.rule is None and not other.undecided:
            return other
    return None


def _best(few: FewRows, trust: bool, count: int, graph: bool) -> _Best:
    """The first verdict that allows a split, or else that of a run which did not fail; what it was given for."""
    found: _Best | None = None
    drew = held = True
    for holds_out, replays in ((True, True), (True, False), (False, True), (False, False)):
        if (not replays and not drew) or (not holds_out and not held):
            continue  # the same runs again
        how = Runs(graph, holds_out, replays)
        evidence = few.compared(count, how)
        # penalties are told of whatever the verdict is
        verdict = replace(judge(evidence, trust, count), differentiates=evidence.differentiates)
        failed = bool(evidence.failure)
        if found is None or (found[2].failure and not failed) or verdict.rule is not None:
            found = verdict, how, evidence
        # what is written or bent does not change with the targets, and is not watched in every run
        if verdict.rule is not None or verdict.undecided or ((evidence.wrote or evidence.bends) and not failed):
            break
        if holds_out and replays and not failed:
            drew, held = evidence.drew, evidence.held
    assert found is not None
    return found


def confirmed(few: FewRows, earlier: Verdict, count: int) -> Verdict | None:
    """An earlier verdict, if a few rows confirm all of it."""
    divides = bool(earlier.divisors)
    few.own_targets, few.counted_means = bool(earlier.own_targets), earlier.counted_means
    how = Runs(graph=earlier.needs_gradients or divides, graph_of_whole=True, light=True, divides=divides)
    verdict = judge(few.compared(count, how), rows=count)
    few.own_targets, few.counted_means = False, ()
    same = replace(
        earlier,
        drew=verdict.drew,
        held=verdict.held,
        tells_means=verdict.tells_means,
        single_rows=verdict.single_rows,
        calls=earlier.calls or verdict.calls,
        needs_gradients=False,
        differentiates=False,
        from_nothing=False,
        means=(),
        graphs=None,
    )
    return replace(earlier, single_rows=verdict.single_rows or earlier.single_rows) if verdict == same else None
