"""What a loss divides by where its program takes the mean: `(loss * mask).sum() / mask.sum()`, `loss[mask].mean()`.

The mean over what a mask leaves of a batch is the mean over its micro-batches, each weighted by how much it leaves of
it: what it divides by. Autograd keeps that in the graph of the loss, so it is read there, as the divisors of cross
entropies are (`normaliser`), and costs no second computation. Which of the divisors count is found out by a check:
those that for all rows are what they are for two parts of them together. A constant, as the number of batches whose
gradients are accumulated, is none of them, and has to be the same in every part.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from oomfix.runtime.batches.bounds import Bound, Bounded, Bounds
from oomfix.runtime.batches.normaliser import mean_nll_weights, share_targets
from oomfix.runtime.verification.verdict import Verdict

_MEAN = 1  # torch's code for reduction="mean"
_DIVISIONS = ("DivBackward0", "DivBackward1")
# these give one number for many, and keep how many they were, or the numbers themselves
_MEANS = ("MeanBackward0",)
_MEAN_LOSSES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
# what the terms of a loss are put together with; behind anything else stand tensors with more than one number
_TERMS = ("AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0")
NEXT_TO_NOTHING = 1e-6  # added to a divisor lest it is 0


@dataclass(frozen=True)
class Divisor:
    """What one mean divides by.

    Attributes:
        amount: as autograd keeps it.
        of: the operation that takes the mean, and the one whose result it is taken of.
        bounded: what it was made of, where it is kept away from 0.
        level: how many divisions its mean is divided by besides.
    """

    amount: Any
    of: tuple[str, str]
    bounded: Bounded | None = None
    level: int = 0

    @property
    def is_division(self) -> bool:
        """Whether the program divides a sum itself, by a number that may be anything."""
        return self.of[0] in _DIVISIONS


@dataclass(frozen=True)
class Counted:
    """What one mean divides by, in numbers.

    Attributes:
        amount: what counts, of which the whole has as much as its parts together.
        divided_by: the same, unless it is bounded.
        bound: how the second follows from the first.
    """

    amount: float
    divided_by: float
    bound: Bound | None = None


@dataclass(frozen=True)
class Means:
    """The means in one loss, as far as they are told apart by a check.

    Attributes:
        counted: those that count.
        others: what the others divide by.
        of: which operations they are.
        divisions: those in `counted` that are divisions.
        loss: the loss itself.
    """

    counted: list[Counted]
    others: list[float]
    of: tuple[tuple[str, str], ...]
    divisions: list[Counted]
    loss: float

    def is_like(self, other: "Means") -> bool:
        """Whether these are the same means, of other rows."""
        return self.of == other.of and all(map(math.isclose, self.others, other.others))

    def hide_something(self) -> bool:
        """Whether something is divided by nothing, which leaves it infinite, or lost in what is no number."""
        return self._divides_by_nothing() and not math.isnan(self.loss)

    def may_count_nothing(self) -> bool:
        """Whether a divisor may stand in for 0, as in `max(count, 1)`, which the weights of parts must not hold.

        Of one that is seen to be bounded, what counts is known.
        """
        more = [division for division in self.divisions if abs(division.amount) > NEXT_TO_NOTHING]
        is_lost = self._divides_by_nothing() and len(self.of) > 1
        may_be_least = any(division.amount == 1 and division.bound is None for division in more)
        return may_be_least or is_lost or bool(more and self.loss == 0)

    def _divides_by_nothing(self) -> bool:
        return any(division.divided_by == 0 for division in self.divisions)


def divisors(loss: torch.Tensor, bounds: Bounds | None = None) -> list[Divisor]:
    """What each mean in `loss` divides by, as autograd keeps it, in the order of its terms; it may have none.

    Means inside of a model are not looked for. A divisor that depends on parameters is left out: the gradient flows
    through it.

    Args:
        loss: a scalar with its graph.
        bounds: what was noted as it was computed.
    """
    found: list[Divisor] = []
    ahead: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    seen: set[Any] = set()
    while ahead:
        node, level = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        amount: Any = None
        name = node.name()
        if name in _DIVISIONS:
            (numerator, _), *others = node.next_functions
            if not any(other is not None for other, _ in others) and _is_number(node._saved_other):
                amount = node._saved_other
            ahead.append((numerator, level + (amount is not None)))
        elif name in _MEANS:
            amount = node._saved_self_sym_numel
        elif name in _MEAN_LOSSES and node._saved_reduction == _MEAN:
            amount = node._saved_self.numel()
        elif name in _TERMS:
            ahead += [(term, level) for term, _ in reversed(node.next_functions)]
        if amount is not None:
            behind = node.next_functions[0][0]
            bounded = None if bounds is None else bounds.behind(amount)
            found.append(Divisor(amount, (name, "" if behind is None else behind.name()), bounded, level))
    return found


def of_each(runs: Sequence[Sequence[Divisor]]) -> list[Sequence[Divisor]]:
    """Of the means in one loss, those that each run of it takes, on whatever rows: all, or those around a loop.

    A loop over samples takes other numbers of means, of which each is of a sample. Divisions of what they add up to
    divide the whole.
    """
    most = max(max((divisor.level for divisor in run), default=0) for run in runs)
    for level in range(most, -1, -1):
        outer = [[divisor for divisor in run if divisor.level <= level] for run in runs]
        if len({len(run) for run in outer}) == 1:
            return [*outer]
    return [() for _ in runs]


def as_many(found: Sequence[Divisor], count: int) -> Sequence[Divisor]:
    """The `count` means of a loss that `of_each` gave for others; none where it has other numbers of them."""
    for level in range(max((divisor.level for divisor in found), default=0), -1, -1):
        outer = [divisor for divisor in found if divisor.level <= level]
        if len(outer) == count:
            return outer
    return ()


def _is_number(divisor: Any) -> bool:
    return not isinstance(divisor, torch.Tensor) or divisor.numel() == 1


def numbers(found: Sequence[torch.Tensor | float]) -> list[float]:
    """The numbers in `found`. Reading tensors waits for the device, once."""
    # a plain number that a tensor was divided by is kept as a tensor on the CPU
    on_device = {n: x for n, x in enumerate(found) if isinstance(x, torch.Tensor) and x.device.type != "cpu"}
    stacked = [tensor.detach().reshape(()).double() for tensor in on_device.values()]
    read = dict(zip(on_device, torch.stack(stacked).tolist() if stacked else (), strict=True))
    return [read[n] if n in read else _read(number) for n, number in enumerate(found)]


def _read(number: torch.Tensor | float) -> float:
    if not isinstance(number, torch.Tensor):
        return float(number)
    # a dispatch mode of the program (a flop counter) is shown a number in place of a tensor that torch made of one
    with torch._C._DisableTorchDispatch() if type(number) is torch.Tensor else nullcontext():
        return float(number.item())


def read(found: Sequence[Divisor], *more: torch.Tensor) -> tuple[list[Counted], list[float]]:
    """What means divide by, and `more`, in numbers. Waits for the device, once."""
    bounded = [divisor.bounded for divisor in found if divisor.bounded is not None]
    read = iter(numbers([*(one.count for one in bounded), *(divisor.amount for divisor in found), *more]))
    counts = iter([next(read) for _ in bounded])
    counted = []
    for divisor in found:
        divided_by = next(read)
        if divisor.bounded is None:
            counted.append(Counted(divided_by, divided_by))
        else:
            counted.append(Counted(next(counts), divided_by, divisor.bounded.bound))
    return counted, list(read)


def counting(whole: Sequence[float], parts: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The positions of the divisors that for all rows are the sum of those for the parts.

    None where the parts have other means than the whole.
    """
    if any(len(part) != len(whole) for part in parts):
        return ()
    pairs = enumerate(zip(whole, *parts, strict=True))
    return tuple(position for position, (total, *of_parts) in pairs if math.isclose(total, sum(of_parts), rel_tol=1e-5))


def common_bound(counted: Sequence[Counted]) -> tuple[bool, Bound | None]:
    """Whether one weight is right for all of these: none is bounded, or all are, alike; and how they are bounded."""
    first = counted[0]
    alike = all(
        one.bound == first.bound and (first.bound is None or math.isclose(one.amount, first.amount)) for one in counted
    )
    return alike, first.bound


def means(loss: torch.Tensor, positions: Sequence[int], bounds: Bounds | None = None) -> Means | None:
    """The means in `loss`; None where it hides them.

    Args:
        loss: a scalar with its graph.
        positions: of those that count among `divisors`.
        bounds: what was noted as it was computed.
    """
    found = divisors(loss, bounds)
    if len(found) <= max(positions):
        return None
    counted, (value,) = read(found, loss)
    return Means(
        [counted[position] for position in positions],
        [other.divided_by for position, other in enumerate(counted) if position not in positions],
        tuple(divisor.of for divisor in found),
        [counted[position] for position in positions if found[position].is_division],
        value,
    )


def weights(loss: torch.Tensor, verdict: Verdict, bounds: Bounds | None = None) -> list[Counted]:
    """What the means that count in `loss` divide by, of cross entropies or taken by hand; none where it hides them.

    Args:
        loss: a scalar with its graph.
        verdict: says which they are.
        bounds: what was noted as it was computed.
    """
    if not verdict.divisors:
        return [Counted(weight, weight) for weight in mean_nll_weights(loss, max(verdict.nll_losses, 1))]
    found = means(loss, verdict.divisors, bounds)
    return [] if found is None else found.counted


def are_one(loss: torch.Tensor, verdict: Verdict) -> bool:
    """Whether the means in `loss` divide by the same, in later batches too."""
    return len(verdict.divisors) == 1 if verdict.divisors else share_targets(loss, verdict.nll_losses)
