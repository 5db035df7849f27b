"""Divisors that are kept away from 0: `mask.sum().clamp(min=1)`, `mask.sum() + 1e-8`.

What a whole batch divides by is then not what its parts divide by together: it is what they count together, kept away
from 0 once. Masks have no graph in which autograd would keep what was counted, so it is noted while the forward calls
the functions of torch: each number that is bounded, with the steps that led to the divisor. A number that goes into any
other function besides is forgotten again, for what becomes of it there is not known.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LARGER = ("max", "maximum")  # of two numbers, both tensors
_STEPS = {
    **dict.fromkeys(("clamp", "clip", "clamp_min", *_LARGER), "at least"),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__"), "plus"),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__"), "times"),
    **dict.fromkeys(("to", "type_as", "float", "double", "half", "bfloat16"), "as"),
}
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", "__itruediv__")


@dataclass(frozen=True)
class Bound:
    """How a divisor follows from what counts.

    Attributes:
        steps: ("at least", number), ("plus", number) or ("times", number), in their order.
    """

    steps: tuple[tuple[str, float], ...]

    def __call__(self, count: float) -> float:
        """The divisor where so much counts."""
        for step, number in self.steps:
            count = max(count, number) if step == "at least" else count + number if step == "plus" else count * number
        return count

    def is_felt(self, count: float) -> bool:
        """Whether the divisor is other than in proportion to what counts."""
        factor = math.prod(number for step, number in self.steps if step == "times")
        return not math.isclose(self(count), factor * count, rel_tol=1e-6)


@dataclass(frozen=True)
class Bounded:
    """What a divisor was made of.

    Attributes:
        count: what counts, one number.
        bound: how the divisor follows from it.
        bent: places of `count` in the list of what went into functions that bend, see `Bounds`.
    """

    count: torch.Tensor
    bound: Bound
    bent: tuple[int, ...]


class Bounds(TorchFunctionMode):
    """Context around a forward that notes which numbers are bounded.

    Args:
        bent: a list that another context around this one appends to, see `watching.Watch`.
    """

    def __init__(self, bent: Sequence[object] = ()) -> None:
        super().__init__()
        self._bent = bent
        # the tensors are held, so that their ids stay their own
        self._noted: dict[int, tuple[torch.Tensor, Bounded]] = {}

    def behind(self, divisor: object) -> Bounded | None:
        """What `divisor` was made of; None where it is not bounded, or was used for something else too."""
        _, found = self._noted.get(id(divisor), (None, None))
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, step = _step_of(func)
        begins = step in ("at least", "plus") and args and self._count_in(args[0])
        bends = len(self._bent)
        result = func(*args, **kwargs)
        if begins or self._noted:
            with torch._C.DisableTorchFunction():
                self._note(name, step, args, kwargs, result, begins or None, range(bends, len(self._bent)))
        return result

    def _note(
        self, name: str, step: str, args: Any, kwargs: Any, result: Any, begins: Bounded | None, bent: Iterable[int]
    ) -> None:
        source = (self.behind(args[0]) if args else None) or begins
        number = None if source is None else _number(name, step, args, kwargs, result)
        if source is not None and number is not None:
            steps = source.bound.steps if step == "as" else (*source.bound.steps, (step, number))
            self._noted[id(result)] = result, Bounded(source.count, Bound(steps), (*source.bent, *bent))
        elif not _divides(name, args, kwargs, result):
            for value in _inside((args, kwargs)):
                self._noted.pop(id(value), None)

    def _count_in(self, value: Any) -> Bounded | None:
        """`value` as it is before it is bounded; None where it is no number without a graph."""
        if type(value) is not torch.Tensor or id(value) in self._noted:
            return None
        with torch._C.DisableTorchFunction():
            if value.numel() != 1 or value.requires_grad or value.is_complex() or value.layout != torch.strided:
                return None
            return Bounded(value.clone(), Bound(()), ())


@functools.lru_cache(maxsize=4096)
def _step_of(func: Any) -> tuple[str, str]:
    """The name of a function without what says that it writes in place, and the step that it is; "": none."""
    name = getattr(func, "__name__", "")
    name = name if name.startswith("__") else name.removesuffix("_")
    return name, _STEPS.get(name, "")


def _number(name: str, step: str, args: Any, kwargs: Any, result: Any) -> float | None:
    """The number of the step that a call is, any for a cast; None where it is no step, or one that is not known."""
    if not step or type(result) is not torch.Tensor:
        return None
    if step == "as":
        return 1.0 if result.is_floating_point() or result.dtype == args[0].dtype else None
    given = [*args[1:], *kwargs.values()]
    if len(given) != 1 or not set(kwargs) <= {"min", "other"}:
        return None
    number = given[0]
    if name in _LARGER and type(number) is torch.Tensor and number.numel() == 1 and not number.requires_grad:
        number = float(number)  # which has to be the same in each part
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return float(number) if is_number and 0 < number < math.inf else None


def _divides(name: str, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a call divides a number with a graph by its second argument, or only asks what a tensor is like."""
    if name == "__get__":
        return not isinstance(result, torch.Tensor)
    is_division = name in _DIVISIONS and len(args) == 2 and not kwargs
    return is_division and isinstance(result, torch.Tensor) and result.requires_grad and result.numel() == 1


def _inside(values: Any) -> Iterator[Any]:
    """Everything in nested sequences and mappings."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from _inside(value)
    elif isinstance(values, dict):
        yield from _inside(tuple(values.values()))
    else:
        yield values
