"""May this batch be split? A few rows are run together and in two parts, and the results compared.

Whether a loss is a mean over independent samples cannot be read off its code (in-batch negatives, balance
losses, batch-normalised dice, pairwise attention that runs in training only), but it shows in numbers: the
results of the parts must give the result of the whole, under one of the rules in `outputs`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from oomfix.runtime import compat, simulation
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.counted_first import are_the_same, means_that_count
from oomfix.runtime.verification.divisor_check import by_divisors, by_divisors_of_more
from oomfix.runtime.verification.evidence import Runs
from oomfix.runtime.verification.few_rows import ROWS_OF_GROUPS, FewRows, RowCounts, most_to_look_at, with_rows_that_fit
from oomfix.runtime.verification.gradient_check import GRADIENTS_DEPEND, compared_gradients
from oomfix.runtime.verification.hinge_check import by_hinges
from oomfix.runtime.verification.judging import (
    BENDS,
    DEPEND,
    FLAT,
    NO_NUMBER,
    NOTHING,
    OPEN,
    SEVERAL_DEPEND,
    contradict,
    settled,
)
from oomfix.runtime.verification.mask_check import by_computed_masks, by_empty_masks, by_masks, by_other_rows
from oomfix.runtime.verification.repetition_check import by_copies, by_one_class, by_repetition
from oomfix.runtime.verification.result_check import Found, by_named_rows, by_results, confirmed
from oomfix.runtime.verification.telling_check import Telling, by_telling_rows
from oomfix.runtime.verification.verdict import Verdict

_ROWS_TO_REPEAT_IN = 6  # others are groups of their own, and show no more; two parts of which none is a single row
_LOOKS = 2
_READINGS = {
    "samples": "with a sample in each entry of its lists",
    "views": "with the tensors in its lists cut into samples",
}
_BY_SHAPE = ("steps", "folded", "input")


def check(
    forward: Callable[..., Any],
    batch: Batch,
    modules: list[nn.Module],
    most_rows: int,
    trust: bool = False,
    earlier: Verdict | None = None,
    with_gradients: bool = True,
) -> Verdict:
    """Compare `forward` on a few rows of `batch` with `forward` on two parts of them.

    Nothing remains of it, see `comparison.compare`, but how the batch is read: where it may not be split with lists
    that hold samples, these may hold views.

    Args:
        forward: returns the loss, or a container whose first value (or "loss") it is.
        batch: the samples; of fewer than three, rows are repeated.
        modules: every module that the forward may run.
        most_rows: rows of one micro-batch, which bound what the check may hold in memory.
        trust: the user asked for splitting whatever the check says: values that no rule fits get the one that
            their shapes suggest.
        earlier: the verdict of an earlier check, which compared gradients and masks too. One that allowed a split is
            confirmed on fewer rows, without watching every operation, where that can be done; gradients and masks are
            compared again where the forward has become another computation, by the number of its calls. After one that
            refused a split, other rows have to allow it too: once may be chance.
        with_gradients: a backward follows, and its gradients can be compared: parameters are not spread over processes.

    Returns:
        The verdict; an undecided one where not even two rows fit, or where there are none.
    """
    if simulation.assumption is not None:
        simulation.assumption.note()
    if not batch.size:
        return Verdict(None, "it is empty", undecided=True)
    verdict = _as_read(FewRows(forward, batch, modules), most_rows, trust, earlier, with_gradients)
    was_refused = earlier is not None and earlier.rule is None and not earlier.undecided
    if verdict.rule is not None and was_refused and not trust:
        last = range(batch.size)[-most_to_look_at(most_rows) :]
        besides = replace(check_besides(verdict, forward, batch, modules, last), left_out=False)
        verdict = verdict if besides.reason == NOTHING else besides
    return (
        verdict
        if verdict.rule is not None
        else _read_otherwise(verdict, forward, batch, modules, most_rows, with_gradients)
    )


def _read_otherwise(
    verdict: Verdict,
    forward: Callable[..., Any],
    batch: Batch,
    modules: list[nn.Module],
    most_rows: int,
    with_gradients: bool,
) -> Verdict:
    """The verdict on what else the batch may be, if that allows a split; `verdict`: that on what it was taken for."""
    size, reading = batch.size, batch.reading
    for another in batch.other_readings():
        if another in _BY_SHAPE and verdict.reason in (NOTHING, OPEN):
            continue  # few rows, which have not shown that they depend on each other
        batch.read(another)
        rows = math.ceil(most_rows * batch.size / size)
        other = _as_read(FewRows(forward, batch, modules), rows, False, None, with_gradients)
        if other.rule is not None:
            return other
        if another not in _BY_SHAPE and reading not in _BY_SHAPE:
            reason = f"{_READINGS[reading]}, {verdict.reason}; {_READINGS[another]}, {other.reason}"
            reason = verdict.reason if other.reason == verdict.reason else reason
            verdict = replace(verdict, reason=reason, undecided=verdict.undecided or other.undecided)
    batch.read(reading)
    return verdict


def check_besides(
    verdict: Verdict, forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], rows: Sequence[int]
) -> Verdict:
    """`verdict`, or where it allows a split, one that refuses it because `rows` do, which two micro-batches have."""
    if verdict.rule is None or simulation.assumption is not None:
        return verdict
    found = with_rows_that_fit([len(rows)], partial(by_named_rows, FewRows(forward, batch, modules, rows), verdict))
    if found is None:
        return replace(verdict, left_out=True)
    # what was seen to be a sum, with something in both parts, stays one where some rows add nothing to it
    adds_nothing = found.reason == OPEN and verdict.units == "calls"
    return verdict if found.rule is not None or adds_nothing else found


def _as_read(rows: FewRows, most_rows: int, trust: bool, earlier: Verdict | None, with_gradients: bool) -> Verdict:
    """The verdict where lists hold what they are taken for."""
    may_be_single = earlier is None or earlier.single_rows is not False
    counts = RowCounts.of(rows.batch.size, most_rows, may_be_single)
    closer = not trust and simulation.assumption is None
    if closer and earlier is not None:
        as_before = _as_before(rows, counts, earlier, with_gradients)
        if as_before is not None:
            return as_before
    found, counts = _with_results(rows, trust, counts)
    if found is None:
        return Verdict(None, "there is no memory to check it on a few rows", undecided=True)
    verdict = found.verdict
    if closer and verdict.rule is not None:
        verdict = _confirmed_closer(rows, found, counts, with_gradients)
    depends = verdict.rule is None and verdict.reason in (DEPEND, SEVERAL_DEPEND, GRADIENTS_DEPEND, BENDS)
    if closer and depends and with_gradients:
        weighed = _by_divisors(rows, found.how, counts)
        if weighed is not None and weighed.undecided:
            weighed = _by_divisors_of_others(rows, found.how, counts) or weighed
        if weighed is not None and weighed.rule is not None:
            verdict = weighed
        elif weighed is not None and (verdict.reason == DEPEND or weighed.undecided):
            # what its means seem to be over, an accumulation window goes by
            verdict = replace(verdict, units=weighed.units, divisors=weighed.divisors, bound=weighed.bound)
            verdict = replace(verdict, reason=weighed.reason, undecided=weighed.undecided)
    if closer and depends and verdict.rule is None:
        return _by_own_means(verdict, rows, found, counts, with_gradients) or verdict
    return _of_parts(verdict, counts)


def _as_before(rows: FewRows, counts: RowCounts, earlier: Verdict, with_gradients: bool) -> Verdict | None:
    """The verdict in the way of the earlier one, if a few rows confirm it."""
    if earlier.rule is not None and not earlier.drew:
        once_more = with_rows_that_fit(counts.gradients, partial(confirmed, rows, earlier))
        if once_more is not None:
            return once_more
    if earlier.counted_means:
        counted = _by_counted_means(rows, Runs(graph=earlier.needs_gradients), counts)
        if counted is not None:
            return counted
    if earlier.may_have_own_targets:
        own = _by_own_targets(FewRows(rows.forward, rows.batch, rows.modules), counts, with_gradients)
        if own is not None and own.rule is not None:
            return own
    return None


def _of_parts(verdict: Verdict, counts: RowCounts) -> Verdict:
    """`verdict`, which says so where no part may be a single row."""
    return verdict if counts.may_be_single else replace(verdict, single_rows=False)


def _by_divisors(rows: FewRows, how: Runs, counts: RowCounts) -> Verdict | None:
    """The verdict where parts weigh what their losses divide by; on more rows where a part was nothing.

    A single row may be nothing to a forward that takes as many rows as make whole groups and leaves the others.
    """
    run = partial(by_divisors, rows, how)
    weighed = _in_parts_that_run(counts, run)
    if weighed is not None and weighed.reason == NO_NUMBER and counts.may_be_single:
        weighed = with_rows_that_fit(counts.together, run) or weighed
    if weighed is None or weighed.rule is None:
        return weighed
    weighed = with_rows_that_fit(counts.results, partial(by_divisors_of_more, rows, how, weighed)) or weighed
    if weighed.rule is None:
        return weighed
    how = replace(how, divides=True, light=False)
    in_one_class = partial(by_one_class, rows, replace(how, graph=True, holds_out=False))
    other = with_rows_that_fit([min(max(counts.results), _ROWS_TO_REPEAT_IN)], in_one_class)
    if other is not None and other.rule is None and not other.undecided:
        return Verdict(None, DEPEND)
    return by_telling_rows(rows, weighed, how, max(counts.results), Telling(by_rows=False))


def _by_divisors_of_others(rows: FewRows, how: Runs, counts: RowCounts) -> Verdict | None:
    """As `_by_divisors`, of rows that show more than the first did, if they allow a split."""
    for others in _other_rows(rows, counts):
        weighed = _by_divisors(others, how, counts.of_all())
        if weighed is not None and weighed.rule is not None:
            return weighed
    return None


def _other_rows(rows: FewRows, counts: RowCounts) -> Iterator[FewRows]:
    """The same batch, seen by other rows, as many as memory may have room for."""
    most, size = max(counts.results), rows.batch.size
    step = max(size // most, 1)
    for these in (*(range(start, size, step)[:most] for start in range(min(step, _LOOKS))), ()):
        yield FewRows(rows.forward, rows.batch, rows.modules, these)


def _by_own_means(
    verdict: Verdict, rows: FewRows, found: Found, counts: RowCounts, with_gradients: bool
) -> Verdict | None:
    """The verdict where means are divided by what the whole has of each; None: it refuses, as `verdict` does."""
    own = _by_own_targets(rows, counts, with_gradients) if found.cross_entropies else None
    if not with_gradients or (own is not None and own.rule is not None):
        return own
    counted = _by_counted_means(rows, found.how, counts)
    if counted is None or counted.rule is not None:
        return counted or own
    # a loop over samples takes other means in every part
    is_loop = counted.reason == DEPEND
    return own if own is not None or verdict.undecided or is_loop else counted


def _by_counted_means(rows: FewRows, how: Runs, counts: RowCounts) -> Verdict | None:
    """The verdict where the parts are run first, to count what their means are over; None: it refuses a split too.

    Rows that are unlike each other may be put into parts of which one has nothing that counts, so others are looked at
    before.
    """
    if any(map(compat.is_compiled, rows.modules)):
        return None  # means in what is compiled are not seen
    verdict = None
    for others in _other_rows(rows, counts):
        found = _with_counted_means(others, how, counts)
        if found is not None and found.rule is not None:
            return found
        if found is None and verdict is None:
            return None
        verdict = found or verdict
    return verdict


def _with_counted_means(rows: FewRows, how: Runs, counts: RowCounts) -> Verdict | None:
    """The verdict of these rows, undecided where others may show more."""
    how = replace(how, holds_out=False, counted_means=())
    noted = with_rows_that_fit(counts.results, partial(rows.compared, how=how))
    if noted is None or noted.failure:
        return None
    whole, *parts = noted.amounts
    if not are_the_same(whole, *parts):
        return Verdict(None, DEPEND, undecided=True)  # a condition, where one of them has nothing
    if any(not amount.number for amounts in parts for amount in amounts):
        return Verdict(None, NOTHING, undecided=True)
    rows.counted_means = means_that_count(whole, parts, [share.rows for share in noted.shares])
    if not rows.counted_means:
        return None
    found, counts = _with_results(rows, False, counts)
    if found is None or found.verdict.rule is None:
        return found.verdict if found is not None and found.verdict.undecided else None
    # of fewer rows, nothing may count in a part
    all_rows = replace(counts, gradients=[found.rows], together=[found.rows])
    verdict = _confirmed_closer(rows, found, all_rows, with_gradients=True)
    if verdict.rule is None and not verdict.undecided:
        return None
    return _of_parts(verdict, counts)


def _by_own_targets(rows: FewRows, counts: RowCounts, with_gradients: bool) -> Verdict | None:
    """The verdict where cross entropies are divided by their targets in the whole; None: it refuses a split too."""
    rows.own_targets = True
    found, counts = _with_results(rows, False, counts)
    if found is None or (found.verdict.rule is not None and not found.verdict.own_targets):
        return None
    verdict = found.verdict
    if verdict.rule is not None:
        verdict = _confirmed_closer(rows, found, counts, with_gradients)
    if verdict.rule is None and not verdict.undecided:
        return None
    return _of_parts(verdict, counts)


def _with_results(rows: FewRows, trust: bool, counts: RowCounts) -> tuple[Found | None, RowCounts]:
    """What the results show, and on how many rows to look closer."""
    run = partial(by_results, rows, trust)
    found = with_rows_that_fit(counts.results, run)
    if found is not None and found.single_row_differs:
        in_larger_parts = with_rows_that_fit(counts.together, run)
        if in_larger_parts is None or not in_larger_parts.failed:
            return in_larger_parts, counts.in_larger_parts()
    return found, counts


def _confirmed_closer(rows: FewRows, found: Found, counts: RowCounts, with_gradients: bool) -> Verdict:
    """A verdict that allows a split, or the one that refuses it after a closer look."""
    verdict = found.verdict
    how = replace(found.how, light=not verdict.drew)
    other_looks = (
        (found.rows, partial(by_masks, rows, how)),
        (found.rows, partial(by_other_rows, rows, found, how)),
        (found.rows, partial(by_computed_masks, rows, found, how)),
        (found.rows, partial(by_empty_masks, rows, found, how)),
        (found.rows, partial(by_hinges, rows, found, how)),
        (min(found.rows, _ROWS_TO_REPEAT_IN), partial(by_repetition, rows, how)),
        (found.rows, partial(by_copies, rows, found, how)),
        (min(found.rows, _ROWS_TO_REPEAT_IN), partial(by_one_class, rows, how)),
    )
    for most, look in other_looks:
        other = with_rows_that_fit([most, 2], look)
        if other is not None and other.rule is None and not other.undecided:
            return other
        if other is not None and contradict(verdict, other):
            return Verdict(None, DEPEND)
        verdict = verdict if other is None else settled(verdict, other)
    gradients, telling = None, Telling(verdict.units == "rows", bool(found.closed_hinges))
    if with_gradients:
        # a graph needs more memory than the runs of a check without one
        gradients = _in_parts_that_run(counts, partial(_by_gradients, rows, how, telling))
    left_open = gradients is not None and gradients.reason in (OPEN, NO_NUMBER) and verdict.units != "calls"
    left_open = left_open or (gradients is not None and gradients.reason == FLAT)
    if gradients is not None and gradients.rule is None and (not gradients.undecided or left_open):
        return gradients
    if gradients is None:
        return replace(verdict, calls=0)
    nothing = verdict.one_part or gradients.one_part or gradients.reason in (OPEN, NO_NUMBER)
    if nothing and found.rows < ROWS_OF_GROUPS:
        # the other part was the whole, whatever the forward makes of its rows
        more = with_rows_that_fit([ROWS_OF_GROUPS], partial(by_results, rows, False))
        if more is not None and not more.failed and more.verdict.rule is None and not more.verdict.undecided:
            return more.verdict
    if contradict(verdict, gradients):
        return Verdict(None, DEPEND)
    verdict = settled(verdict, gradients)
    verdict = by_telling_rows(rows, verdict, how, found.rows, telling)
    if verdict.rule is None:
        return verdict
    calls, single_rows = 0 if verdict.drew else gradients.calls, gradients.single_rows
    return replace(verdict, means=gradients.means, calls=calls, single_rows=single_rows, graphs=gradients.graphs)


def _by_gradients(rows: FewRows, how: Runs, telling: Telling, count: int) -> Verdict | None:
    """As `by_gradients`; `telling` learns which numbers in the loss these rows tell."""
    found, evidence = compared_gradients(rows, replace(how, notes_numbers=True), count)
    if evidence.failure:
        return None
    telling.add(evidence, rows.named(count), holds=found.rule is not None)
    return found


def _in_parts_that_run(counts: RowCounts, run: Callable[[int], Verdict | None]) -> Verdict | None:
    """What `run` returns with a graph, or where the forward fails on a single row, where no part is one."""
    verdict = with_rows_that_fit(counts.gradients, run)
    if verdict is not None or not counts.may_be_single:
        return verdict
    verdict = with_rows_that_fit(counts.together, run)
    return None if verdict is None else replace(verdict, single_rows=False)
