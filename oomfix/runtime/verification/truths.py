"""What a program finds to be true of a batch: `if mask.any()`, `if (labels >= 0).sum() > 0`.

Where it is true of one micro-batch and not of another, the program may take another branch, or multiply by another
number, of which the graph of the loss shows nothing. Micro-batches are therefore told apart by it, see `ways`. Where it
is true of all, or of none, so it is of the whole batch; `mask.sum() > 5` need not be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat, simulation

NAMES = ("any", "all", "__bool__")
EQUALS = ("eq", "ne", "not_equal", "__eq__", "__ne__")
ORDERS = ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "__gt__", "__ge__", "__lt__",
          "__le__")  # fmt: skip
COUNTS = ("sum", "count_nonzero")
# these tell 0 from whole numbers above it by a threshold of 1
_FROM_ONE = ("ge", "greater_equal", "__ge__", "lt", "less", "__lt__")


@dataclass(frozen=True)
class _Count:
    """A tensor [] that was summed up, as it was then.

    Attributes:
        entries: so many were.
        of_marks: of each, 1 or nothing.
    """

    number: torch.Tensor
    version: int
    entries: int
    of_marks: bool


class Counts:
    """The sums that one run made of everything in a tensor, with no gradient, and what the program asks by them."""

    def __init__(self) -> None:
        self._found: dict[int, _Count] = {}

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note what a function of `COUNTS` gave."""
        summed = args[0] if args else None
        if simulation.assumption is not None or not isinstance(result, torch.Tensor) or result.requires_grad:
            return
        if not isinstance(summed, torch.Tensor) or compat.beneath_transforms(result) is not result:
            return
        with torch._C.DisableTorchFunction():
            if not result.dim() and not result.is_inference():
                of_marks = name == "count_nonzero" or summed.dtype == torch.bool
                self._found[id(result)] = _Count(result, result._version, summed.numel(), of_marks)

    def asks(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether a comparison asks if a sum is above or below 0, or if all that may be marked is."""
        count = self._about(args[0]) if len(args) == 2 else None
        if count is None or type(args[1]) not in (int, float):
            return False
        if count.of_marks and args[1] == count.entries:
            return True
        is_whole = not count.number.dtype.is_floating_point and not count.number.dtype.is_complex
        return name in ORDERS and (args[1] == 0 or (args[1] == 1 and name in _FROM_ONE and is_whole))

    def entries(self, asked: torch.Tensor) -> int:
        """How many entries a question about `asked` is about."""
        count = self._about(asked)
        with torch._C.DisableTorchFunction():
            return asked.numel() if count is None else count.entries

    def _about(self, number: object) -> _Count | None:
        count = self._found.get(id(number))
        return None if count is None or count.number._version != count.version else count


def truth_of(name: str, args: tuple[Any, ...], result: Any, counts: Counts) -> bool | None:
    """What a call says of a whole batch; None: nothing, or parts would not tell it.

    Args:
        name: of the function.
        args: that it was given.
        result: what it gave.
        counts: made before.
    """
    if simulation.assumption is not None:
        return None
    if name == "__bool__":
        return bool(result)
    is_of_nothing = name in EQUALS and isinstance(args[-1], int | float) and args[-1] == 0
    if name not in NAMES and not is_of_nothing and not counts.asks(name, args):
        return None
    if not isinstance(result, torch.Tensor) or compat.beneath_transforms(result) is not result:
        return None
    with torch._C.DisableTorchFunction():
        return bool(result) if result.numel() == 1 and result.dtype == torch.bool else None


class Truths(TorchFunctionMode):
    """Context around a forward.

    Attributes:
        found: what was true, and what was not, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []
        self._counts = Counts()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in COUNTS:
            self._counts.note(name, args, result)
        elif name in NAMES or name in EQUALS or name in ORDERS:
            truth = truth_of(name, args, result, self._counts)
            if truth is not None:
                self.found.append(truth)
        return result
