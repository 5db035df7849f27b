"""Numbers that tell objects apart for good: an `id` may be given again once its object is gone."""

import weakref
from collections.abc import Iterable, Mapping
from itertools import count
from numbers import Number
from typing import Any

import torch

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Number)
_DEEPEST = 4
_MOST_ITEMS = 10_000


class Identities:
    """What tells objects from others, without keeping them alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = count()

    def of(self, value: object) -> int | None:
        """The number of an object; None where it cannot be told when the object is gone."""
        known = self._numbers.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        try:
            reference = weakref.ref(value)
        except TypeError:
            return None
        self._numbers[id(value)] = reference, next(self._next)
        return self._numbers[id(value)][1]

    def told(self, value: object, depth: int = 0) -> Any:
        """What tells a value: plain ones as they are, containers by what they hold, others by their number.

        None where it cannot be told, as in containers of many items.
        """
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, Mapping):
            return self._all((part for item in value.items() for part in item), len(value), type(value), depth)
        if isinstance(value, list | tuple | set | frozenset):
            return self._all(value, len(value), type(value), depth)
        number = self.of(value)
        return None if number is None else (number,)

    def _all(self, values: Iterable[object], items: int, kind: type, depth: int) -> Any:
        if depth == _DEEPEST or items > _MOST_ITEMS:
            return None
        parts = tuple(self.told(value, depth + 1) for value in values)
        return None if None in parts else (kind, parts)
