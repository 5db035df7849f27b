"""Accumulation windows: which batches share a step, and what their losses are divided by.

The gradient of a window is that of the mean over everything in it. Each loss is divided by what the window is
expected to hold, judged by its first batch; where it held something else in the end (a shorter last window, a
ragged batch, ignored targets), all gradients are corrected by one factor before the step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from oomfix.runtime.batch import Batch

_T = TypeVar("_T")


class Divisor:
    """What the losses of one window are divided by: samples, targets or calls.

    Attributes:
        expected: amount that the window is expected to hold; 0 until the first batch is known.
        total: amount that it has held so far.
    """

    def __init__(self, expected: float = 0.0, total: float = 0.0) -> None:
        self.expected = expected
        self.total = total

    def share(self, amount: float, expected: float) -> float:
        """The factor for a loss that stands for `amount`; `expected` is the window's, were all like this."""
        if not self.expected:
            self.expected = expected
        self.total += amount
        return amount / self.expected

    def correction(self) -> float:
        """The factor by which gradients are off because the window held more or less than expected."""
        return self.expected / self.total if self.total else 1.0

    def copy(self) -> "Divisor":
        """An independent copy, to return to when a call has to start again."""
        return Divisor(self.expected, self.total)


@dataclass
class Window:
    """The window that is open.

    Attributes:
        number: counts windows, to tell one from the next.
        length: batches it will have, as far as known.
        position: batches it has had, the present one included.
        closed: the present batch is its last.
        samples: in the present batch.
    """

    number: int = 0
    length: int = 1
    position: int = 1
    closed: bool = True
    samples: int = 1


def windows(loader: Iterable[_T], length: int, window: Window) -> Iterator[_T]:
    """The batches of `loader`, with `window` kept up to date before each.

    A loader that has no length is read one batch ahead, to know its last batch; one that has a length is not.

    Raises:
        ValueError: `length` is below 1.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"k: got {length!r}, expected a whole number of batches, at least 1")
    try:
        for index, (batch, remaining) in enumerate(_with_remaining(loader)):
            position = index % length
            if position == 0:
                window.number += 1
                window.length = length if remaining is None else min(length, remaining)
            window.position = position + 1
            window.closed = window.position == length or remaining == 1
            window.samples = Batch((batch,), {}).size
            yield batch
    finally:
        # after a `break` too: what follows is a loop of its own
        window.number += 1
        window.length = window.position = window.samples = 1
        window.closed = True


def _with_remaining(loader: Iterable[_T]) -> Iterator[tuple[_T, int | None]]:
    """Each batch with the number of batches from it to the end; None: more follow, how many is not known."""
    try:
        total: int = len(loader)  # type: ignore[arg-type]
    except TypeError:
        yield from _looking_ahead(iter(loader))
        return
    for index, batch in enumerate(loader):
        yield batch, max(total - index, 1)


def _looking_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, int | None]]:
    missing = object()
    batch = next(batches, missing)
    while batch is not missing:
        following = next(batches, missing)
        yield batch, 1 if following is missing else None
        batch = following
