"""Hinges: `relu(margin - distance)`, `clamp(min=0)`. One that is 0 for all of a few rows hides what is behind it.

Pairs of samples that are far apart, or sums over the batch that are small as long as it is, look like independent
samples then, beside a term of the loss that is one of these. So a check runs once more with such hinges open: they give
what went in. Samples that do not depend on each other do not so either.
"""

from collections.abc import Collection
from typing import Any

import torch

from oomfix.runtime import compat, simulation

_ONE_BY_ONE = ("relu", "relu_", "threshold", "clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")
_OF_TWO = ("max", "maximum")


class Hinges:
    """The hinges of one run, in the order in which they are called.

    Attributes:
        count: how many there were.
        closed: numbers of those that gave nothing but 0.

    Args:
        opened: numbers of those that give what went in.
    """

    def __init__(self, opened: Collection[int]) -> None:
        self.count = 0
        self.closed: list[int] = []
        self._opened = opened

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func`, which bends, gives."""
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        name = getattr(func, "__name__", "")
        if not values or not (name in _ONE_BY_ONE or (name in _OF_TWO and len(values) == 2)):
            return func(*args, **kwargs)
        number = self.count
        self.count += 1
        if number in self._opened:
            return torch.minimum(*values) if name in _OF_TWO else values[0]
        result = func(*args, **kwargs)
        if _is_nothing(result):
            self.closed.append(number)
        return result


def _is_nothing(result: Any) -> bool:
    """Whether `result` has several entries, all 0; one number that bends is compared by its value."""
    if simulation.assumption is not None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return False
    if result.layout != torch.strided or result.is_nested or compat.beneath_transforms(result) is None:
        return False
    if not result.dim() or not result.numel():
        return False
    least, most = result.detach().aminmax()  # far faster than any()
    return not bool(most) and not bool(least)


def closed_alike(whole: Hinges, part: Hinges) -> frozenset[int]:
    """Those that are closed in a run; none where a run on a part of its rows calls fewer, as a loop over them does."""
    return frozenset(whole.closed) if whole.count == part.count else frozenset()
