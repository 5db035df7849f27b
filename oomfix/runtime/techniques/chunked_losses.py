"""Cross entropies that a program computes with torch, computed a few rows of logits at a time instead."""

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat
from oomfix.runtime.techniques.cross_entropy import CHUNK_BYTES, chunked_cross_entropy


class ChunkedLosses(TorchFunctionMode):
    """Context in which `functional.cross_entropy` (and so `nn.CrossEntropyLoss`) over large logits runs in chunks.

    Large are logits of more than 64 MiB in fp32. Replaced is what has the same value and gradient but for the order
    of sums: logits of shape [rows, classes] in fp32 or fp64, class numbers as targets, no class weights, any
    ignore_index and label smoothing. Everything else runs as written: half-precision logits outside of autocast,
    whose loss torch would round; weighted means, whose divisor `memory.forward_backward` could not read; what a
    user's own checkpoint runs again in backward, where this context is gone.

    Attributes:
        saved_bytes: the most that one loss needed less at the peak of its backward: a copy of its logits; two where
            the program keeps them that long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            loss = self._in_chunks(*args, **kwargs)
            if loss is not None:
                return loss
        return func(*args, **kwargs)

    def _in_chunks(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor | None:
        """The loss, or None where torch shall compute it. The names are those of torch: callers pass them."""
        plain = weight is None and size_average is None and reduce is None
        if not plain or not _is_large(input) or not _are_class_numbers(target, input):
            return None
        if not torch.is_grad_enabled() or compat.is_inside_checkpoint():
            return None
        loss = chunked_cross_entropy(
            input, target, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        self.saved_bytes = max(self.saved_bytes, input.numel() * input.element_size() - CHUNK_BYTES)
        return loss


def _is_large(logits: torch.Tensor) -> bool:
    precise = logits.dtype in (torch.float32, torch.float64)
    return precise and logits.dim() == 2 and logits.requires_grad and 4 * logits.numel() > CHUNK_BYTES


def _are_class_numbers(target: torch.Tensor, logits: torch.Tensor) -> bool:
    return target.dtype == torch.int64 and target.shape == logits.shape[:1]
