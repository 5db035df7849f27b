"""What meets a threshold, or goes across samples, by what a run on a few rows shows and runs on two parts of them."""

from collections.abc import Sequence

import torch

from oomfix.runtime.batches.rule_choice import choose, close
from oomfix.runtime.verification.compared_numbers import Bent
from oomfix.runtime.verification.counted_first import Amount
from oomfix.runtime.verification.evidence import Evidence
from oomfix.runtime.verification.function_kinds import Kind
from oomfix.runtime.verification.one_run import OneRun


def note_thresholds(found: Evidence, runs: Sequence[OneRun]) -> None:
    """Note what meets a threshold, without what only makes a divisor: the whole has enough of it if parts have."""
    taken: list[list[Amount]] = found.amounts if found.counted_means else [[] for _ in runs]
    bent = [run.watch.bent for run in runs]
    compared = _compared(bent, taken)
    watched = [of_run for of_run in bent if len(of_run) == len(bent[0])]
    found.counts_little = any(not of_run[place].exceeds for of_run in watched for place in compared)
    left_out = [_bounded(run, found.divisors, amounts) | compared for run, amounts in zip(runs, taken, strict=True)]
    of_whole, *of_parts = [
        [Bent(torch.empty(0)) if place in places else one for place, one in enumerate(of_run)]
        for of_run, places in zip(bent, left_out, strict=True)
    ]
    of_rows, *others = [run.watch.truths for run in runs]
    # a loop asks about each sample, and is no branch of the batch
    found.truths = tuple(of_rows) if all(len(other) == len(of_rows) for other in others) else ()
    found.bends = any(_bend_apart(of_whole, of_part) for of_part in of_parts)
    found.counts_nothing = any(_count_nothing(of_whole, of_part) for of_part in of_parts)


def note_hidden_terms(found: Evidence, runs: Sequence[OneRun]) -> None:
    """Note whether what is multiplied by 0 depends on several samples: a weight may be 0 until the loss has settled."""
    whole, *parts = (run.watch.hidden for run in runs)
    if any(len(part) != len(whole) for part in parts):
        return
    found.hides = any(
        all(term.isfinite() for term in terms) and choose(terms[0], terms[1:], found.shares) is None
        for terms in zip(whole, *parts, strict=True)
    )


def _bend_apart(whole: list[Bent], part: list[Bent]) -> bool:
    """Whether something of one shape, but not one value, went into the functions that bend, on all rows and on a part.

    Other numbers of such functions are those of a loop over samples, which bends each by itself.
    """
    if len(whole) != len(part):
        return False
    pairs = [(a.value, b.value) for a, b in zip(whole, part, strict=True) if a.counted_of == b.counted_of]
    return any(a.shape == b.shape and a.numel() and not close(a, b) for a, b in pairs)


def go_across(whole: OneRun, rows: int, part: OneRun, rows_of_part: int) -> bool:
    """Whether something goes across samples, by its size in a run on all rows and on a part.

    Another number of functions of a kind is that of a loop over samples, whose sizes are their own.
    """
    return any(_grow(kind, whole, rows, part, rows_of_part) for kind in whole.watch.across if kind is not Kind.LEAVES)


def leave_torch(whole: OneRun, rows: int, part: OneRun, rows_of_part: int) -> bool:
    """Whether numbers of samples leave torch, as many as there are samples."""
    return _grow(Kind.LEAVES, whole, rows, part, rows_of_part)


def _grow(kind: Kind, whole: OneRun, rows: int, part: OneRun, rows_of_part: int) -> bool:
    of_whole, of_part = (run.watch.across.get(kind, []) for run in (whole, part))
    if len(of_whole) != len(of_part):
        return False
    return any(a.grows(rows, b, rows_of_part) for a, b in zip(of_whole, of_part, strict=True))


def are_cut_later(whole: OneRun, rows: int, part: OneRun, rows_of_part: int, batch: int) -> bool:
    """Whether the first entries of something are kept: all of a few rows, and not all of a batch of so many."""
    if len(whole.watch.kept) != len(part.watch.kept):
        return False
    pairs = zip(whole.watch.kept, part.watch.kept, strict=True)
    return any(a.cuts_more(rows, b, rows_of_part, batch) for a, b in pairs)


def _count_nothing(whole: list[Bent], part: list[Bent]) -> bool:
    """Whether a number was 0, as a count is of rows of which none counts: for other rows it may be apart."""
    return len(whole) == len(part) and any(a.is_nothing() and b.is_nothing() for a, b in zip(whole, part, strict=True))


def _bounded(run: OneRun, counting: Sequence[int], amounts: Sequence[Amount]) -> set[int]:
    """Places of what went into functions that bend, and became nothing but a divisor that counts."""
    bounded = [divisor.bounded for position, divisor in enumerate(run.divisors) if position in counting]
    return {place for one in (*bounded, *amounts) if one is not None for place in one.bent}


def _compared(bent: Sequence[list[Bent]], amounts: Sequence[list[Amount]]) -> set[int]:
    """Places of divisors that count, and that the program compares with a plain number, in all runs."""
    places = set(range(len(bent[0])))
    for of_run, divided_by in zip(bent, amounts, strict=True):
        if len(of_run) == len(bent[0]):  # others are those of a loop over samples, or were not watched
            divisors = [amount.number for amount in divided_by if amount.may_be_bounded]
            places &= {place for place, one in enumerate(of_run) if one.is_compared(divisors)}
    return places
