"""Numbers that meet a threshold: they go into functions that bend, or a program compares them and may branch on it.

What is computed from a number that was read off a tensor is followed as long as it stays a number of Python.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

# these treat a number that is as large as the threshold like a larger one
_LIKE_LARGER = ("ge", "greater_equal", "lt", "less")


@dataclass(frozen=True)
class Bent:
    """What went into a function that bends, or was compared.

    Attributes:
        value: empty where it is large; one with rows has another shape in a part of them.
        computed: it was not there before the run.
        exceeds: it was compared with a plain number, and would be treated alike if it were any larger, or not; None:
            it was not.
        of_nothing: something had been counted before, and there was nothing of it.
        counted_of: it was asked whether a count is 0, or all there may be, of so many entries; None: it was not.
    """

    value: torch.Tensor
    computed: bool = False
    exceeds: bool | None = None
    of_nothing: bool = False
    counted_of: int | None = None

    def is_nothing(self) -> bool:
        """Whether it is one number, computed, and 0, or may have been made of a count that is."""
        return self.computed and self.value.numel() == 1 and (self.of_nothing or not bool(self.value))

    def is_compared(self, numbers: Collection[float]) -> bool:
        """Whether it was compared with a plain number, and is one of `numbers`."""
        return self.exceeds is not None and float(self.value) in numbers


def exceeds(name: str, number: Any, threshold: Any) -> bool | None:
    """Whether the comparison of that name has the same result for `number` and for every larger one; None: it has none.

    What was read off a tensor too is no fixed threshold.
    """
    if not isinstance(threshold, int | float) or isinstance(threshold, _Compared):
        return None
    return bool(number > threshold or (number == threshold and name.strip("_") in _LIKE_LARGER))


def is_read(value: object) -> bool:
    """Whether this is a number that was read off a tensor, or was computed from one."""
    return isinstance(value, _Compared)


def told_when_compared(number: Any, bent: list[Bent], source: Bent, as_read: bool = True) -> Any:
    """`number`, which appends to `bent` when it is compared or rounded that it was read off `source`.

    Args:
        number: what was read, or was computed from that.
        bent: see `watching.Watch`.
        source: where it was read.
        as_read: nothing was computed from it.
    """
    if isinstance(number, float):
        return _Number(number).told(bent, source, as_read)
    is_count = isinstance(number, int) and not isinstance(number, bool)
    return _Count(number).told(bent, source, as_read) if is_count else number


class _Compared:
    _bent: list[Bent]
    _source: Bent
    _as_read: bool

    def told(self, bent: list[Bent], source: Bent, as_read: bool) -> "_Compared":
        self._bent, self._source, self._as_read = bent, source, as_read
        return self

    def computed(self, number: Any) -> Any:
        """What the program has computed from this, and may compare too."""
        return number if number is NotImplemented else told_when_compared(number, self._bent, self._source, False)

    def rounded(self, number: Any) -> Any:
        """As `computed`, where that has the same result for several numbers."""
        if number is not NotImplemented:
            self._bent.append(replace(self._source, exceeds=None))
        return self.computed(number)

    def _note(self, name: str, other: Any) -> None:
        # what falls where this rises exceeds nothing
        is_kept = self._as_read and self._source.value.numel() == 1
        self._bent.append(replace(self._source, exceeds=exceeds(name, self.plain(), other) if is_kept else None))

    def plain(self) -> Any:
        raise NotImplementedError

    def __lt__(self, other: Any) -> Any:
        self._note("lt", other)
        return super().__lt__(other)  # type: ignore[misc]

    def __le__(self, other: Any) -> Any:
        self._note("le", other)
        return super().__le__(other)  # type: ignore[misc]

    def __gt__(self, other: Any) -> Any:
        self._note("gt", other)
        return super().__gt__(other)  # type: ignore[misc]

    def __ge__(self, other: Any) -> Any:
        self._note("ge", other)
        return super().__ge__(other)  # type: ignore[misc]


class _Number(_Compared, float):
    def plain(self) -> float:
        return float(self)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)  # a copy is a plain number


class _Count(_Compared, int):
    def plain(self) -> int:
        return int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


_COMPUTES = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
             "__neg__")  # fmt: skip
_ROUNDS = ("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__")
_ROUNDS_COUNTS = (*_ROUNDS, "__rshift__", "__rrshift__")


def _followed(kind: type, name: str) -> Callable[..., Any]:
    """The method of that name of a plain number, whose result is followed."""
    plain, rounds = getattr(kind, name), name in _ROUNDS_COUNTS

    def method(number: Any, *others: Any) -> Any:
        result = plain(number, *others)
        return number.rounded(result) if rounds else number.computed(result)

    return method


for _kind, _plain, _names in ((_Number, float, _ROUNDS), (_Count, int, _ROUNDS_COUNTS)):
    for _name in (*_COMPUTES, *_names):
        setattr(_kind, _name, _followed(_plain, _name))
