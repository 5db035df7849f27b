"""Means over what only the forward knows: positive and negative samples, the boxes of a batch, queries that have a box.

No weight of a part is right for means over different numbers of what counts. Where the batch does not show what they
are over (`own_targets`), the parts run once without a graph, and what each mean divides by is added up. Then they run
again, and each mean is divided by what the whole batch has of it: all of them are means over samples then. What each
part divides by has to be the same in both runs.

A divisor may stand for less than it is, as `max(count, 1)` does for 0. What torch does to keep it away from 0 is noted
(`bounds`). What the program does besides is not: as long as it left what few rows divide by as it was, a least number
is none above that, so that each part has to divide by more.
"""

import inspect
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F

from oomfix.runtime import compat
from oomfix.runtime.batches.bounds import Bound, Bounded, Bounds
from oomfix.runtime.batches.call_places import CallPlaces
from oomfix.runtime.verification.own_targets import CrossEntropy

MEAN_LOSSES = {
    getattr(F, name): inspect.signature(getattr(F, name))
    for name in (
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "gaussian_nll_loss",
        "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
        "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss",
        "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    )
}  # fmt: skip
_IN_PLACE = ("div_", "divide_", "true_divide_", "__itruediv__")
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", *_IN_PLACE)
_READS = ("item", "__float__")
_EXACT, _ROUNDED = 1e-12, 1e-6  # relative error of the sum of some numbers
_HALF = (torch.float16, torch.bfloat16)
_ROUNDS = (torch.float32, *_HALF)


@dataclass(frozen=True)
class Amount:
    """What one mean divides by.

    Attributes:
        number: what counts.
        may_be_bounded: the program divides by itself, by a number that may stand for less.
        tolerance: relative, of a sum of such numbers.
        bound: how what it divides by follows from what counts; None: it is the same.
        bent: see `bounds.Bounded`.
        place: of the call, see `call_places`.
    """

    number: float
    may_be_bounded: bool = False
    tolerance: float = _EXACT
    bound: Bound | None = None
    bent: tuple[int, ...] = ()
    place: int = 0

    def is_sum_of(self, parts: Sequence["Amount"]) -> bool:
        """Whether parts count as much together, each of them something, and are bounded alike.

        A part of which nothing counts shows nothing: the other one is the whole then, whatever is made of its rows.
        """
        total = sum(part.number for part in parts)
        alike = all(part.bound == self.bound and part.number for part in parts)
        return alike and math.isclose(self.number, total, rel_tol=self.tolerance)


@dataclass(frozen=True)
class Over:
    """What a mean is over, which the whole has as much of as its parts together.

    Attributes:
        above: what a part has to divide by more than; it may divide by nothing.
        bound: how what it divides by follows from what counts.
    """

    above: float
    bound: Bound | None

    def allows(self, amount: Amount) -> bool:
        """Whether a part may divide by that."""
        return amount.bound == self.bound and (amount.number == 0 or amount.number > self.above)


Counted = tuple[Over | None, ...]
"""Of each mean what it is over, None where that is no count, or the same for all: a number of steps, a temperature."""


@dataclass(frozen=True)
class _Mean:
    """One call that takes the mean of many numbers, or divides one number by another.

    Attributes:
        amount: what it divides by.
        written: makes the call as it is written.
        times: what it divides, times a number.
        dtype: that what it divides by is rounded to.
    """

    amount: Amount
    written: Callable[[], Any]
    times: Callable[[float], torch.Tensor]
    dtype: torch.dtype = torch.float64

    def over(self, count: float, share: float) -> torch.Tensor:
        """The mean over `share` of so much; not a number where that is nothing, as it is written."""
        divisor = count
        if self.amount.bound is not None:
            divisor = torch.tensor(self.amount.bound(count), dtype=self.dtype).item()
        return self.times(1 / (divisor * share) if divisor else math.nan)


class Means(Bounds):
    """Context around a forward that sees the means that it takes.

    Args:
        bent: see `bounds.Bounds`.

    Attributes:
        amounts: what each divides by.
    """

    def __init__(self, bent: Sequence[object] = ()) -> None:
        super().__init__(bent)
        self.amounts: list[Amount] = []
        self._read: dict[float, Bounded] = {}
        self._bounded: list[tuple[int, object]] = []
        self._places = CallPlaces(sys._getframe())

    def __enter__(self) -> "Means":
        self._places = CallPlaces(sys._getframe(1))
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for number, divisor in self._bounded:
            if self.behind(divisor) is None:  # it was used for something else as well
                self.amounts[number] = replace(self.amounts[number], bent=())
        places = self._places.found()
        self.amounts = [replace(amount, place=place) for amount, place in zip(self.amounts, places, strict=True)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        self._places.note(caller)
        mean = self._mean_of(func, args, kwargs)
        if mean is not None:
            self._places.mark(caller)
            self.amounts.append(mean.amount)
            return self.taken(mean)
        bounded = self.behind(args[0]) if args and getattr(func, "__name__", "") in _READS else None
        result = super().__torch_function__(func, types, args, kwargs)
        if bounded is not None:
            self._read[float(result)] = bounded
        return result

    @abstractmethod
    def taken(self, mean: _Mean) -> Any:
        """What a mean gives."""

    def _mean_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Mean | None:
        """The mean that a call takes; None where it takes none of everything that it is given."""
        cross_entropy = CrossEntropy.of(func, args, kwargs)
        if cross_entropy is not None:
            amount = Amount(cross_entropy.amount(cross_entropy.counted))
            return _Mean(amount, partial(func, *args, **kwargs), lambda factor: cross_entropy.total() * factor)
        name = getattr(func, "__name__", "")
        if func in MEAN_LOSSES:
            given = dict(MEAN_LOSSES[func].bind(*args, **kwargs).arguments)
            is_mean = (given.get("reduction", "mean"), given.get("size_average"), given.get("reduce"))
            if is_mean != ("mean", None, None) or not _are_seen(given.values()):
                return None
            return _of_entries(func(**{**given, "reduction": "none"}))
        of_all, divides = name == "mean" and len(args) == 1, name in _DIVISIONS and len(args) == 2
        if kwargs or not (of_all or divides) or not _are_seen(args):
            return None
        return _of_entries(args[0]) if of_all else self._of_division(func, *args)

    def _of_division(self, func: Any, number: Any, divisor: Any) -> _Mean | None:
        # what is looked at here is nothing that the program does, as a watch around this would take it
        with torch._C.DisableTorchFunction():
            if not isinstance(number, torch.Tensor) or not number.is_floating_point() or number.numel() != 1:
                return None
            bounded, tolerance = self.behind(divisor), _EXACT
            if isinstance(divisor, torch.Tensor):
                # the gradient flows through one with a graph; without graphs, no means are counted then
                if divisor.shape not in ((), number.shape) or divisor.is_complex() or divisor.requires_grad:
                    return None
                tolerance = _ROUNDED if divisor.dtype in _ROUNDS else _EXACT
                amount = float(divisor.detach())
            elif isinstance(divisor, Real):
                amount = float(divisor)
                bounded = self._read.get(amount)
            else:
                return None
            found = Amount(amount, True, tolerance)
            if bounded is not None:
                tolerance = _ROUNDED if bounded.count.dtype in _ROUNDS else _EXACT
                found = Amount(float(bounded.count), False, tolerance, bounded.bound, bounded.bent)
                if isinstance(divisor, torch.Tensor):
                    self._bounded.append((len(self.amounts), divisor))
        dtype = divisor.dtype if isinstance(divisor, torch.Tensor) else torch.float64
        times = number.mul_ if func.__name__ in _IN_PLACE else number.mul
        return _Mean(found, partial(func, number, divisor), times, dtype)


def _are_seen(values: Any) -> bool:
    """Whether tensors are what they look like, and nothing is run again in backward, without what is around it."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        if not all(compat.beneath_transforms(t) is t and t.layout == torch.strided for t in tensors):
            return False
    return not compat.is_inside_checkpoint()


def _of_entries(entries: torch.Tensor) -> _Mean | None:
    with torch._C.DisableTorchFunction():
        if not entries.is_floating_point() or entries.is_nested:
            return None
        amount = Amount(float(entries.numel()))
    return _Mean(amount, entries.mean, partial(_sum_times, entries))


def _sum_times(entries: torch.Tensor, factor: float) -> torch.Tensor:
    if entries.dtype not in _HALF:
        return entries.sum() * factor
    # the sum of many may be too large for half precision
    return (entries.sum(dtype=torch.float32) * factor).to(entries.dtype)


class NotedMeans(Means):
    """Context around a forward whose means stay as they are."""

    def taken(self, mean: _Mean) -> Any:
        """What a mean gives."""
        return mean.written()


class DividedMeans(Means):
    """Context around the forward of a part, whose means are divided by what the whole has of each.

    Args:
        counted: what they are over.
        whole: how much of it the whole has.
        share: of the rows.
        bent: see `bounds.Bounds`.
    """

    def __init__(self, counted: Counted, whole: Sequence[float], share: float, bent: Sequence[object] = ()) -> None:
        super().__init__(bent)
        self._counted = counted
        self._whole = whole
        self._share = share

    def taken(self, mean: _Mean) -> Any:
        """What a mean gives."""
        number = len(self.amounts) - 1
        is_counted = number < min(len(self._whole), len(self._counted)) and self._counted[number] is not None
        return mean.over(self._whole[number], self._share) if is_counted else mean.written()


def means_that_count(whole: Sequence[Amount], parts: Sequence[Sequence[Amount]], rows: Sequence[float]) -> Counted:
    """What means are over, told by runs on all rows and on parts of them.

    Args:
        rows: samples in the parts.

    Returns:
        Nothing where the runs take different means, where all of these are over as much of each sample, or where some
        are over nothing in a part, see `Amount.is_sum_of`.
    """
    if not are_the_same(whole, *parts):
        return ()
    found = [_over(*amounts) for amounts in zip(whole, *parts, strict=True)]
    per_row = [
        {round(amount.number / count, 9) for amount, count in zip(amounts, rows, strict=True)}
        for amounts, over in zip(zip(*parts, strict=True), found, strict=True)
        if over is not None
    ]
    return tuple(found) if any(len(different) > 1 for different in per_row) else ()


def are_the_same(*runs: Sequence[Amount]) -> bool:
    """Whether runs take the same means, each at one place of the program."""
    first, *others = ([amount.place for amount in run] for run in runs)
    return all(places == first for places in others)


def _over(whole: Amount, *parts: Amount) -> Over | None:
    if not whole.is_sum_of(parts):
        return None
    return Over(min(part.number for part in parts) if whole.may_be_bounded else 0.0, whole.bound)


def are_counted(counted: Counted, whole: Sequence[Amount], parts: Sequence[Sequence[Amount]]) -> bool:
    """Whether runs on all rows and on parts of them divide by what `counted` says."""
    if len(whole) != len(counted) or not are_the_same(whole, *parts):
        return False
    return all(
        over is None or (amount.bound == over.bound and amount.is_sum_of(of_parts))
        for over, amount, *of_parts in zip(counted, whole, *parts, strict=True)
    )


def vary(counted: Counted, whole: Sequence[Amount], parts: Sequence[Sequence[Amount]]) -> bool:
    """Whether a part divides by something else than the whole where `counted` says that nothing is counted.

    Or where what is counted (classes of a batch, groups) is in several parts, so that it is no sum of theirs.
    """
    if not all(len(run) == len(counted) for run in (whole, *parts)):
        return False
    are_alike = are_the_same(whole, *parts)
    return any(
        any(amount.number != of_whole.number for amount in of_parts)
        if over is None
        else are_alike and _all_count(of_whole, *of_parts) and not of_whole.is_sum_of(of_parts)
        for over, of_whole, *of_parts in zip(counted, whole, *parts, strict=True)
    )


def _all_count(*amounts: Amount) -> bool:
    """Whether something counts in each of these, and none stands for less."""
    return all(amount.number and not amount.may_be_bounded and amount.bound == amounts[0].bound for amount in amounts)


class CountedFirst:
    """The means in the parts of one batch, which all run twice.

    Args:
        counted: what they are over.
        rows: samples in the batch.
    """

    def __init__(self, counted: Counted, rows: int) -> None:
        self._counted = counted
        self._rows = rows
        self._whole: list[float] = []
        self._first: list[Means] = []
        self._parts: list[Means] = []

    def first(self) -> Means:
        """The context around the first forward of the next part."""
        self._first.append(NotedMeans())
        return self._first[-1]

    def add_up(self) -> str:
        """To be called when all parts have run first; returns why they do not tell what the whole divides by, or ""."""
        found = [means.amounts for means in self._first]
        if len(found[0]) != len(self._counted) or not are_the_same(*found):
            return "a part of it takes other means than another, or than a few rows did"
        by_mean = list(zip(*found, strict=True))
        for over, (amount, *others) in zip(self._counted, by_mean, strict=True):
            if over is not None and not all(map(over.allows, (amount, *others))):
                return "a part of it divides by so little that this may stand for less"
            if over is None and any(other.number != amount.number for other in others):
                return "the means in its loss are others in a part of it"
        self._whole = [sum(amount.number for amount in amounts) for amounts in by_mean]
        return ""

    def part(self, rows: int) -> Means:
        """The context around the second forward of the next part, of so many rows."""
        self._parts.append(DividedMeans(self._counted, self._whole, rows / self._rows))
        return self._parts[-1]

    def differ(self) -> bool:
        """Whether parts divide by something else than they did first."""
        numbers = [[amount.number for amount in means.amounts] for means in (*self._parts, *self._first)]
        return numbers[: len(self._parts)] != numbers[len(self._parts) :]
