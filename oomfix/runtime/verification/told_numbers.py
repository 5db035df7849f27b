"""The numbers for a whole batch that a loss is divided by or multiplied with, where each part has one of its own.

A part in which nothing counts shows nothing of a mean over what counts: the other part is the whole then, whatever rule
is tried on it. So the numbers of few rows are noted, and a check looks for rows that tell (`telling_check`).
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch

from oomfix.runtime import compat, simulation
from oomfix.runtime.batches.bounds import Bounds
from oomfix.runtime.batches.call_places import way_to
from oomfix.runtime.verification.compared_numbers import is_read
from oomfix.runtime.verification.counted_first import MEAN_LOSSES
from oomfix.runtime.verification.own_targets import CrossEntropy

Key = tuple[tuple[CodeType, int], ...]

_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_", "__itruediv__")
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__")
_READS = ("item", "__int__", "__float__", "__index__")
_SIZES = ("__len__", "numel", "size", "__get__")


@dataclass(frozen=True)
class Number:
    """What a loss, or a part of it, is divided by or multiplied with; 1 for a sum.

    Attributes:
        amount: before it is kept away from 0, where that was seen.
        divides: the loss is divided by it.
        by_hand: it is a number of Python, or may have been made of one.
        reads: numbers that the program had read off tensors by then.
        value: what came of it, the largest entry where these are several.
    """

    amount: float
    divides: bool
    by_hand: bool = False
    reads: int = 0
    value: float = 0.0

    @property
    def shows(self) -> bool:
        """Whether what came of it is not 0, whatever the number is."""
        return self.value != 0


class ToldNumbers(Bounds):
    """Context around a forward with gradients on.

    Args:
        outside: the frame that runs it.
        is_made: whether a tensor was not there before.

    Attributes:
        numbers: of each place in the program, in the order of its calls.
        reads: what the program has read off tensors, and whether that is a size.
    """

    def __init__(self, outside: FrameType, is_made: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.numbers: dict[Key, list[Number]] = {}
        self.reads: list[tuple[float, bool]] = []
        self._outside = id(outside)
        self._is_made = is_made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not _may_tell(func):
            return super().__torch_function__(func, types, args, kwargs)
        # what is looked at here is nothing that the program does, as a watch around this would take it
        with torch._C.DisableTorchFunction():
            number = self._number_of(func, name, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        if name in _READS or name in _SIZES:
            self._note_read(name, result)
        elif number is not None and _may_be_of_loss(number, args, result):
            key = way_to(sys._getframe(1), self._outside)
            self.numbers.setdefault(key, []).append(replace(number, value=_largest(result)))
        return result

    def _note_read(self, name: str, result: Any) -> None:
        if isinstance(result, torch.Size):
            result = result[0] if result else None
        if isinstance(result, int | float) and not isinstance(result, bool):
            self.reads.append((float(result), name in _SIZES))

    def _number_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Number | None:
        cross_entropy = CrossEntropy.of(func, args, kwargs)
        if cross_entropy is not None:
            return Number(cross_entropy.amount(cross_entropy.counted), True)
        if func in MEAN_LOSSES:
            given = dict(MEAN_LOSSES[func].bind(*args, **kwargs).arguments)
            is_mean = (given.get("reduction", "mean"), given.get("size_average"), given.get("reduce"))
            return _of_entries(next(iter(given.values()))) if is_mean == ("mean", None, None) else None
        if name in ("mean", "sum") and len(args) == 1 and not kwargs:
            # a sum is a factor of itself: where it is 0, it shows nothing
            return _of_entries(args[0]) if name == "mean" else Number(1.0, False)
        if kwargs or len(args) != 2 or not (name in _DIVISIONS or name in _PRODUCTS):
            return None
        return self._of_product(*args) if name in _PRODUCTS else self._of_division(*args)

    def _of_division(self, _: Any, divisor: Any) -> Number | None:
        bounded, amount = self.behind(divisor), _plain(divisor)
        if bounded is not None:
            amount = float(bounded.count)
        by_hand = not isinstance(divisor, torch.Tensor) or not all(is_size for _, is_size in self.reads)
        return None if amount is None else Number(amount, True, by_hand, reads=len(self.reads))

    def _of_product(self, one: Any, other: Any) -> Number | None:
        for factor in (one, other):
            made = self._is_made(factor) if isinstance(factor, torch.Tensor) else is_read(factor)
            amount = _plain(factor) if made else None
            if amount is not None:
                return Number(amount, False)
        return None


@functools.lru_cache(maxsize=4096)
def _may_tell(func: Any) -> bool:
    """Whether a call may divide, multiply or read."""
    name = getattr(func, "__name__", "")
    is_told = name in (*_DIVISIONS, *_PRODUCTS, *_READS, *_SIZES, "mean", "sum")
    return is_told or func in MEAN_LOSSES or CrossEntropy.may_be(func)


def _of_entries(entries: Any) -> Number | None:
    return Number(float(entries.numel()), True) if isinstance(entries, torch.Tensor) else None


def _plain(value: Any) -> float | None:
    """`value` as a number of Python; None where it is none for a whole batch, or has a graph."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, torch.Tensor) or simulation.assumption is not None:
        return None
    plain = compat.beneath_transforms(value) is value and value.layout == torch.strided and not value.is_nested
    if not plain or value.dim() or value.requires_grad or value.is_complex():
        return None
    return float(value)


def _may_be_of_loss(number: Number, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a result has a graph, or is made of several weights, each divided by what all of them have."""
    if not isinstance(result, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        weights = number.divides and len(args) > 1 and isinstance(args[1], torch.Tensor) and result.dim() > 0
        return result.requires_grad or weights


def _largest(result: torch.Tensor) -> float:
    with torch._C.DisableTorchFunction():
        entries = result.detach()
        return float(entries.flatten()[entries.abs().argmax()]) if entries.numel() else 0.0
