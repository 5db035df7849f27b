"""Are there rows that tell what a loss makes of each number that it is divided by or multiplied with?

Where all that counts of a few rows stands in one of the two parts, that part is the whole, and each rule fits: a sum, a
mean over samples, a mean over what counts. The same is true of a factor that is 0. So other rows are looked for, and
put into two parts that both have some of it, but not in proportion: what is in one, and that again with something else.
A verdict holds only if these rows say the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from oomfix.runtime.batches.rows import first_part
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.few_rows import FewRows, with_rows_that_fit
from oomfix.runtime.verification.gradient_check import compared_gradients
from oomfix.runtime.verification.judging import DEPEND, NOTHING, contradict
from oomfix.runtime.verification.told_numbers import Key, Number
from oomfix.runtime.verification.verdict import Verdict

_Place = tuple[Key, int]
_NEXT_TO_NOTHING = 1e-6
_ROWS = 8
_MOST_LOOKS = 16
_MOST_ROWS = 40
_COPIED = 4  # rows of which it is looked at what several copies count


class Telling:
    """What some comparisons of rows have shown of the numbers of a loss.

    Args:
        by_rows: the loss is taken for a mean over samples.
        are_closed: hinges leave nothing, which a check sees open by itself, see `hinge_check`.

    Attributes:
        began: there was one.
        counts: numbers that are other ones in a part, by which the program divides itself.
        constants: those that are not, though the program has read others before.
        doubted: rows of which these were seen.
        too_many: rows that did not fit.
        numbers: all that were seen.
    """

    def __init__(self, by_rows: bool, are_closed: bool = False) -> None:
        self.began = False
        self._are_closed = are_closed
        self._by_rows = by_rows
        self._told: set[_Place] = set()
        self._seen: set[_Place] = set()
        self.counts: set[_Place] = set()
        self.constants: set[_Place] = set()
        self.doubted: list[int] = []
        self.numbers: set[_Place] = set()
        self.too_many = _MOST_ROWS
        self._carriers: dict[_Place, list[list[int]]] = {}

    def add(self, evidence: Evidence, rows: Sequence[int], holds: bool) -> None:
        """Learn from a comparison of `rows`; `holds`: by these the whole is what its parts make."""
        self.began = True
        cut = first_part(len(rows))
        parts = [list(rows[:cut]), list(rows[cut:])]
        for place, numbers in _aligned(evidence):
            self.numbers.add(place)
            told = _is_told(numbers, evidence, [len(part) for part in parts])
            if told is None and not self._by_rows:
                told = _is_other_than_by_rows(numbers, evidence)
            if told is False and self._are_closed and _are_of_nothing(numbers):
                told = None
            if told is None or (told and not holds):
                continue
            self._seen.add(place)
            if told:
                self._told.add(place)
            whole, *of_parts = numbers
            if told and whole is not None and whole.by_hand:
                varies = any(part is not None and part.amount != whole.amount for part in of_parts)
                if varies or any(_varying_reads(evidence, numbers, rows)):
                    (self.counts if varies else self.constants).add(place)
                    self.doubted = self.doubted or list(dict.fromkeys(rows))[:_COPIED]
            for number, part in zip(of_parts, parts, strict=True):
                if number is not None and number.amount > _NEXT_TO_NOTHING and number.shows:
                    self._carriers.setdefault(place, []).append(part)

    def open(self) -> list[_Place]:
        """The numbers of which nothing has told what becomes of them."""
        return sorted(self._seen - self._told, key=hash)

    def arrangements(self, place: _Place) -> Iterator[list[int]]:
        """Rows of which both parts have some of that number."""
        groups = self._carriers.get(place, [])
        apart = [(a, b) for a in groups for b in groups if not set(a) & set(b)]
        halves = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups if len(group) > 1]
        for one, other in (*apart[:4], *halves[:2], *((b, a) for a, b in halves[:2])):
            rows = _shared(one, other)
            if rows:
                yield rows


def by_telling_rows(few: FewRows, verdict: Verdict, how: Runs, count: int, telling: Telling) -> Verdict:
    """`verdict`, unless other rows refuse it, or none tell what becomes of each number."""
    how = replace(how, graph=True, light=not verdict.drew, notes_numbers=True)
    run = partial(_refused, few, verdict, how, telling)
    for rows in _windows(few.batch.size, min(max(count, 4), _ROWS)):
        if telling.began and not telling.open():
            break
        if refused := run(rows):
            return refused
    for place in telling.open():
        for rows in telling.arrangements(place):
            if refused := run(rows):
                return refused
            if place not in telling.open():
                break
    if telling.open() and verdict.nll_losses == len(telling.numbers) == 1 and verdict.units == "targets":
        # any function of a cross entropy is split rightly as long as its targets stand in one part, which is seen then
        return replace(verdict, one_part=True)
    if telling.open():
        return Verdict(None, NOTHING, undecided=True)
    return _by_copies(few, how, telling) or verdict


def _refused(few: FewRows, verdict: Verdict, how: Runs, telling: Telling, rows: list[int]) -> Verdict | None:
    if len(rows) >= telling.too_many:
        return None
    looked = with_rows_that_fit([len(rows)], partial(compared_gradients, few, how, rows=rows))
    if looked is None:
        telling.too_many = len(rows)
    if looked is None or looked[1].failure:
        return None
    found, evidence = looked
    if (evidence.divisors, evidence.bound) != (verdict.divisors, verdict.bound):
        telling.add(evidence, rows, holds=False)
        return None
    if found.rule is None and not found.undecided:
        return found
    if contradict(verdict, found):
        return Verdict(None, DEPEND)
    telling.add(evidence, rows, holds=found.rule is not None)
    return None


def _by_copies(few: FewRows, how: Runs, telling: Telling) -> Verdict | None:
    """The verdict that refuses a split because copies of a row do not have as many times what it has; None: they do."""
    for row in telling.doubted:
        rows = [row] * _ROWS
        evidence = with_rows_that_fit([len(rows)], partial(few.compared, how=how, rows=rows))
        for place, numbers in () if evidence is None or evidence.failure else _aligned(evidence):
            is_constant = len({None if number is None else number.amount for number in numbers}) == 1
            if place in telling.constants and place not in telling.counts and not is_constant:
                return Verdict(None, DEPEND)
            if place in telling.counts and not is_constant and not _are_copies(numbers, len(rows)):
                return Verdict(None, DEPEND)
    return None


def _windows(size: int, count: int) -> Iterator[list[int]]:
    """Rows side by side, and rows spread over the batch."""
    step = max(size // count, 1)
    starts = range(0, max(size - count, 0) + 1, count)
    yield list(range(0, size, step))[:count]
    for start in starts[:: max(math.ceil(len(starts) / _MOST_LOOKS), 1)]:
        yield list(range(start, min(start + count, size)))


def _shared(one: list[int], other: list[int]) -> list[int]:
    """Rows whose first part is both, and whose second part is the first of these again."""
    for count in range(len(one) * 2 + len(other), _MOST_ROWS):
        first = first_part(count)
        if first >= len(one) + len(other) and count - first >= len(one):
            fill = [*one] * count
            return [*one, *other, *fill][:first] + fill[: count - first]
    return []


def _aligned(evidence: Evidence) -> Iterator[tuple[_Place, list[Number | None]]]:
    """Each number of all rows, and those of the parts at the same place; not those of a loop over samples."""
    whole, *parts = (told.numbers for told in evidence.numbers)
    for key, numbers in whole.items():
        of_parts = [part.get(key, []) for part in parts]
        if all(len(of_part) == len(numbers) for of_part in of_parts):
            for place, several in enumerate(zip(numbers, *of_parts, strict=True)):
                yield (key, place), list(several)
        elif len(numbers) == 1 and all(len(of_part) <= 1 for of_part in of_parts):
            yield (key, 0), [numbers[0], *(of_part[0] if of_part else None for of_part in of_parts)]


def _is_told(numbers: list[Number | None], evidence: Evidence, sizes: Sequence[int]) -> bool | None:
    """Whether these rows tell what becomes of a number; None where it is in proportion to them."""
    if any(number is None for number in numbers):
        return False
    found = [number for number in numbers if number is not None]
    whole, one, other = (number.amount for number in found)
    shows = all(number.shows for number in found)
    if not found[0].divides:
        return shows and all((whole, one, other))
    if min(abs(one), abs(other)) <= _NEXT_TO_NOTHING:
        return False
    if whole == one == other:
        return not _may_be_least(found, evidence, sizes)
    if not _adds_up(numbers):
        return False
    if math.isclose(one * sizes[1], other * sizes[0]):
        return None
    # rows of which as much comes as of others show no weight
    return shows and not math.isclose(found[1].value, found[2].value, rel_tol=1e-3)


def _are_of_nothing(numbers: Sequence[Number | None]) -> bool:
    """Whether what is 0 is not the number, but what comes of it."""
    return all(number is not None and number.amount and not number.shows for number in numbers)


def _is_other_than_by_rows(numbers: Sequence[Number | None], evidence: Evidence) -> bool | None:
    """Whether a number in proportion to the rows tells that its mean is over something else; None where that is too."""
    if not all(number is not None and number.shows for number in numbers):
        return False
    one, other = evidence.shares
    return None if math.isclose(one.targets * other.rows, other.targets * one.rows) else True


def _adds_up(numbers: Sequence[Number | None]) -> bool:
    whole, *parts = (0.0 if number is None else number.amount for number in numbers)
    return math.isclose(whole, sum(parts), rel_tol=1e-5)


def _are_copies(numbers: Sequence[Number | None], rows: int) -> bool:
    """Whether copies of a row have as many times what counts in it."""
    whole, one, other = (math.nan if number is None else number.amount for number in numbers)
    cut = first_part(rows)
    return math.isclose(whole * cut, one * rows, rel_tol=1e-5) and math.isclose(
        whole * (rows - cut), other * rows, rel_tol=1e-5
    )


def _may_be_least(numbers: Sequence[Number | None], evidence: Evidence, sizes: Sequence[int]) -> bool:
    """Whether a divisor may be the larger of itself and of a number that the program has read before."""
    whole = numbers[0]
    least = 0.0 if whole is None else whole.amount
    return any(max(reads) <= least for reads in _varying_reads(evidence, numbers, range(sum(sizes))))


def _varying_reads(
    evidence: Evidence, numbers: Sequence[Number | None], rows: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """What the program has read before it divided by these, and what may count: no number of samples, no constant."""
    if any(number is None or not number.by_hand for number in numbers):
        return
    reads = [told.reads[: number.reads] for told, number in zip(evidence.numbers, numbers, strict=True) if number]
    cut = first_part(len(rows))
    if len({len(of_run) for of_run in reads}) > 1:
        return
    for (whole, is_size), (one, _), (other, _) in zip(*reads, strict=True):
        of_rows = whole and one * len(rows) == whole * cut and other * len(rows) == whole * (len(rows) - cut)
        if not (is_size and of_rows) and (not whole or whole != one or whole != other):
            yield whole, one, other
