"""What a program finds to be true of a batch: `if mask.any()`, `if (labels >= 0).sum() == 0`.

Where it is true of one micro-batch and not of another, the program may take another branch, or multiply by another
number, of which the graph of the loss shows nothing. Micro-batches are therefore told apart by it, see `ways`.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat, simulation

NAMES = ("any", "all", "__bool__")
EQUALS = ("eq", "ne", "not_equal", "__eq__", "__ne__")


def truth_of(name: str, args: tuple[Any, ...], result: Any) -> bool | None:
    """What a call says of a whole batch; None: nothing, or it compares with something else than 0.

    Args:
        name: of the function.
        args: that it was given.
        result: what it gave.
    """
    if simulation.assumption is not None:
        return None
    if name == "__bool__":
        return bool(result)
    if name in EQUALS and not (isinstance(args[-1], int | float) and args[-1] == 0):
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in NAMES or name in EQUALS:
            truth = truth_of(name, args, result)
            if truth is not None:
                self.found.append(truth)
        return result
