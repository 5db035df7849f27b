"""Accumulation windows: which batches share a step, and what their losses are divided by.

The gradient of a window is that of the mean over everything in it. Each loss is divided by what the window is
expected to hold, judged by its first batch; where it held something else in the end (a shorter last window, a
ragged batch, ignored targets), all gradients are corrected by one factor before the step.
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from oomfix.runtime.arguments import shown
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.bounds import Bound
from oomfix.runtime.processes.sharding import is_distributed
from oomfix.runtime.verification.verdict import Verdict

_log = logging.getLogger("oomfix")
_T = TypeVar("_T")


class Divisor:
    """What the losses of one window are divided by: samples, targets or calls.

    Attributes:
        expected: what the window is expected to divide by; 0 until the first batch is known.
        total: amount that it has held so far.
        bound: how what it divides by is kept away from 0; None: it is the amount itself.
    """

    def __init__(self, expected: float = 0.0, total: float = 0.0, bound: Bound | None = None) -> None:
        self.expected = expected
        self.total = total
        self.bound = bound

    def share(self, amount: float, expected: float, divided_by: float = 0.0) -> float:
        """The factor for a loss that stands for `amount`; `expected` is the window's, were all like this.

        0 for a loss that stands for nothing: the mean over an empty batch is NaN, and has nothing to add.

        Args:
            divided_by: what the loss was divided by, if it was another number than the amount.
        """
        divided_by = divided_by or amount
        if not divided_by:
            return 0.0
        if not self.expected:
            self.expected = expected
        self.total += amount
        return divided_by / self.expected

    def correction(self) -> float:
        """The factor by which gradients are off because the window held more or less than expected."""
        whole = self.total if self.bound is None else self.bound(self.total)
        return self.expected / whole if self.expected and whole else 1.0

    def copy(self) -> "Divisor":
        """An independent copy, to return to when a call has to start again."""
        return Divisor(self.expected, self.total, self.bound)


class Proportions:
    """What the means of a loss divide by, as long as it is in proportion to what weighs the loss."""

    def __init__(self) -> None:
        self._first: tuple[float, Sequence[float]] | None = None

    def keep(self, weight: float, divisors: Sequence[float], count: Sequence[bool] = ()) -> bool:
        """Whether these are to `weight` what the first were to theirs.

        Args:
            count: False for those that may also be the same as the first, as a constant is.
        """
        self._first = self._first or (weight, divisors)
        first, of_first = self._first
        if len(divisors) != len(of_first):
            return False
        count = count or [True] * len(divisors)
        return all(
            math.isclose(amount * first, before * weight) or (not counts and math.isclose(amount, before))
            for amount, before, counts in zip(divisors, of_first, count, strict=True)
        )

    def copy(self) -> "Proportions":
        """An independent copy."""
        other = Proportions()
        other._first = self._first
        return other


class Slot:
    """The nth loss of every batch of a window; the only one where the loop has one loss per batch.

    Attributes:
        units: what the loss is a mean of, decided at its first call: "rows", "targets" or, for a sum, "calls".
        decided_by: what a check had found then.
        divisor: what it is divided by.
        calls: batches that had it.
        others: what its other means divide by.
    """

    def __init__(self) -> None:
        self.units = ""
        self.decided_by: Verdict | None = None
        self.divisor = Divisor()
        self.calls = 0
        self.others = Proportions()
        self._held: list[tuple[int, float]] = []
        self.remember()

    def remember(self) -> None:
        """A call begins: what it adds or decides is forgotten if it fails."""
        self._before = self.units, self.decided_by, self.divisor.copy(), self.others.copy()

    def put_back(self) -> None:
        """Forget what the call that failed added or decided."""
        self.units, self.decided_by, divisor, others = self._before
        self.divisor, self.others = divisor.copy(), others.copy()

    def keep(self, rows: int) -> None:
        """The call went well; its batch had so many samples."""
        self._held.append((rows, self.divisor.total - self._before[2].total))

    def averages_over_samples(self) -> bool:
        """Go on by samples instead of targets; False where the batches so far did not weigh in the same way by both."""
        held = [(rows, targets) for rows, targets in self._held if targets]
        if held:
            rows, targets = held[0]
            if any(not math.isclose(others * rows, targets * more) for more, others in held):
                return False
            self.divisor.expected *= rows / targets
            self.divisor.total *= rows / targets
        self.units = "rows"
        return True


class Totals:
    """What the losses of one window hold, and the gradients they went into.

    Attributes:
        left: no more batches come, though more were expected; gradients made since are none of this window's.
    """

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._position = 0
        self._next = 0
        self._leaves: dict[int, tuple[torch.Tensor, set[int]]] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._corrected: set[int] = set()
        self._foreign = False
        self._hidden = False
        self.left = False

    def begin(self, position: int) -> Slot:
        """The slot of the loss that comes next in the batch at `position`."""
        if position != self._position:
            self._position, self._next = position, 0
        if self._next == len(self._slots):
            self._slots.append(Slot())
        slot = self._slots[self._next]
        self._next += 1
        slot.remember()
        slot.calls += 1
        return slot

    def comes_to_the_last(self, position: int) -> bool:
        """Whether the loss that comes next in the batch at `position` is the last of it, as in the batches before."""
        index = self._next if position == self._position else 0
        return index + 1 >= len(self._slots)

    def withdraw(self, slot: Slot) -> None:
        """The call that began with `slot` failed, and may be made again: the window has not seen it."""
        slot.put_back()
        slot.calls -= 1
        self._next -= 1

    def meets(
        self,
        leaves: Iterable[torch.Tensor],
        held: Callable[[torch.Tensor], torch.Tensor | None],
        hides_leaves: bool = False,
    ) -> None:
        """Note the leaves of the present loss before its backward.

        Args:
            leaves: those that are to be seen.
            held: gives the gradient that a leaf held before.
            hides_leaves: there are others.
        """
        self._hidden = self._hidden or hides_leaves
        for leaf in leaves:
            before = held(leaf)
            if id(leaf) in self._leaves:
                self._foreign = self._foreign or (before is not None and not self._is_ours(leaf, before))
            else:
                self._foreign = self._foreign or (before is not None and bool(before.any()))
                self._leaves[id(leaf)] = (leaf, set())
            self._leaves[id(leaf)][1].add(self._next - 1)

    def end(self, window: "Window") -> None:
        """The present loss has run; corrects the gradients if it is the last of the window."""
        if window.closed and self._next == len(self._slots):
            self.correct([leaf for leaf, _ in self._leaves.values()])
        for key, (leaf, _) in self._leaves.items():
            if leaf.grad is not None:
                self._seen[key] = (weakref.ref(leaf.grad), leaf.grad._version)

    def holds(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether the losses so far went into a gradient of one of `leaves`."""
        return any(id(leaf) in self._leaves and leaf.grad is not None for leaf in leaves)

    def correct(self, leaves: Iterable[torch.Tensor]) -> None:
        """Multiply gradients by what they are off because the window held other amounts than expected, once.

        Raises:
            RuntimeError: the losses, or gradients of other origin, in one gradient are off by different factors, or
                some of the gradients are not to be seen.
        """
        if not self._leaves:
            return
        by_factor: dict[float, list[torch.Tensor]] = {}
        for leaf in leaves:
            if leaf.grad is None or id(leaf) in self._corrected:
                continue
            if id(leaf) not in self._leaves:
                if is_distributed(leaf) and any(_is_off(self._factor(slot)) for slot in self._slots):
                    raise RuntimeError(
                        "accumulate: the batches of this window differ in size, and memory.backward cannot see which "
                        "gradients FSDP2 has exchanged; use memory.forward_backward, or batches of one size"
                    )
                continue
            self._corrected.add(id(leaf))
            if self.left and not self._is_ours(leaf, leaf.grad):
                continue
            factors = [self._factor(self._slots[index]) for index in self._leaves[id(leaf)][1]]
            if not any(map(_is_off, factors)):
                continue
            if self._hidden:
                raise RuntimeError(
                    "accumulate: the batches of this window differ in size, and memory.backward cannot see which "
                    "gradients went through a reentrant checkpoint. Use checkpoint(..., use_reentrant=False), or "
                    "memory.forward_backward"
                )
            if self._foreign or max(factors) - min(factors) > 1e-12 * max(factors):
                raise RuntimeError(
                    "accumulate: the batches of this window differ in size (or in targets that count), and its "
                    "gradients come from several losses, or from a backward of your own, which cannot be weighed "
                    "apart any more. Return the sum of these losses from one forward, use drop_last=True and "
                    "batches of one size, or call zero_grad before the window begins."
                )
            by_factor.setdefault(factors[0], []).append(leaf.grad)
        with torch.no_grad():
            for factor, gradients in by_factor.items():
                torch._foreach_mul_(gradients, factor)

    def _is_ours(self, leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether nobody has replaced or changed the gradient since the last loss of the window."""
        place, version = self._seen.get(id(leaf), (None, 0))
        return place is not None and place() is gradient and version == gradient._version

    def _factor(self, slot: Slot) -> float:
        # a loss that has not had its turn at this position yet is judged by those before
        behind = slot.calls / self._position if slot.calls < self._position else 1.0
        return slot.divisor.correction() * behind


def _is_off(factor: float) -> bool:
    return abs(factor - 1.0) > 1e-12


@dataclass
class Window:
    """The window that is open.

    Attributes:
        count: windows begun so far.
        length: batches it will have, as far as known.
        position: batches it has had, the present one included.
        closed: the present batch is its last.
        samples: in the present batch.
        totals: what the losses of the window hold so far.
    """

    count: int = 0
    length: int = 1
    position: int = 1
    closed: bool = True
    samples: int = 1
    totals: Totals = field(default_factory=Totals)
    _loop: object = None

    def begin(self, loop: object, length: int) -> None:
        """A new window of `length` batches, in the loop that `loop` stands for."""
        self._loop = loop
        self.count += 1
        self.length = length
        self.totals = Totals()

    def is_complete_with_the_next(self) -> bool:
        """Whether the gradients of the window are complete with the loss that comes next; always, outside of one."""
        return self.length == 1 or (self.closed and self.totals.comes_to_the_last(self.position))

    def belongs_to(self, loop: object) -> bool:
        """Whether `loop` is the one that began it, and has not been left."""
        return self._loop is loop

    def forget_left(self) -> None:
        """A backward begins that is no part of the loop that was left, if one was."""
        if self.totals.left:
            self.totals = Totals()

    def leave(self, loop: object) -> None:
        """What follows is no part of `loop`, unless another loop has begun since."""
        if not self.belongs_to(loop):
            return
        if self.closed:
            self.totals = Totals()
        else:
            self.totals.left = True
        self._loop = None
        self.length = self.position = self.samples = 1
        self.closed = True


def windows(loader: Iterable[_T], length: float, window: Window) -> Iterator[_T]:
    """The batches of `loader`, with `window` kept up to date before each.

    A loader that has no length is read one batch ahead, to know its last batch; one that has a length is not.

    Raises:
        TypeError: `loader` cannot be iterated over.
        ValueError: `length` is no whole number, or below 1.
        RuntimeError: while iterating, if another loop over windows was begun in the middle of this one.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader: got {shown(loader)}, expected an iterable of batches")
    # scripts divide batch sizes: 64 / 16 is 4.0
    is_number = isinstance(length, Real) and not isinstance(length, bool)
    if not is_number or not float(length).is_integer() or length < 1:
        raise ValueError(f"k: got {length!r}, expected a whole number of batches, at least 1")
    return _windows(loader, int(length), window)


def _windows(loader: Iterable[_T], length: int, window: Window) -> Iterator[_T]:
    loop = object()
    try:
        for index, (batch, remaining) in enumerate(_with_remaining(loader)):
            if index and not window.belongs_to(loop):
                raise RuntimeError(
                    "accumulate: another memory.accumulate was begun in the middle of this one; windows cannot be "
                    "nested. End one loop before the other begins"
                )
            position = index % length
            if position == 0:
                window.begin(loop, length if remaining is None else min(length, remaining))
            window.position = position + 1
            window.closed = window.position == length or remaining == 1
            window.samples = _samples_in(batch)
            yield batch
        if window.belongs_to(loop) and not window.closed:
            _log.warning(
                "accumulate: the loader gave fewer batches than its length says, so its last window, of "
                f"{window.position} batch(es), ended without a step; step after the loop, or mend the length."
            )
    finally:
        # after a `break` too, as soon as nobody holds the iterator
        window.leave(loop)


def _samples_in(batch: Any) -> int:
    """Number of samples in what a loader gave: a list of equally long tensors is (input, target, ...)."""
    if isinstance(batch, list) and batch and all(isinstance(part, torch.Tensor) and part.dim() for part in batch):
        images = all(part.dim() == 3 and part.shape[0] in (1, 3, 4) for part in batch)
        if len({len(part) for part in batch}) == 1 and not images:
            return len(batch[0])
    elif isinstance(batch, list) and any(isinstance(part, torch.Tensor) and part.dim() for part in batch):
        return Batch(tuple(batch), {}).size
    return Batch((batch,), {}).size


def _with_remaining(loader: Iterable[_T]) -> Iterator[tuple[_T, int | None]]:
    """Each batch with the number of batches from it to the end; None: more follow, how many is not known."""
    total = _length_of(loader)
    if total is None:
        yield from _looking_ahead(iter(loader))
        return
    for index, batch in enumerate(loader):
        yield batch, max(total - index, 1)


def _length_of(loader: Any) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        # a guess: workers that share the data each round up, or repeat what others have
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _looking_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, int | None]]:
    missing = object()
    batch = next(batches, missing)
    while batch is not missing:
        following = next(batches, missing)
        yield batch, 1 if following is missing else None
        batch = following
