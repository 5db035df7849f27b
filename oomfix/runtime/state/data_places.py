"""Where tensors have their data, which `tensor.data = other` changes without a trace in their versions.

Momentum encoders are often written that way. A view of each tensor from before keeps the old memory, in which nothing
was written, so putting it back costs no copy.
"""

from collections.abc import Iterable

import torch
from torch import nn


class DataPlaces:
    """The memory that some tensors have at one moment, held for as long as this is.

    Args:
        tensors: any; those of other types than torch's own are left out, since they may have no memory of their own.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._before = [(tensor, tensor.detach()) for tensor in tensors if is_plain(tensor)]

    def moved(self) -> list[torch.Tensor]:
        """The tensors that have other memory by now."""
        return [tensor for tensor, before in self._before if not _share(tensor, before)]

    def restore(self) -> bool:
        """Give every tensor the memory back that it had; whether one had moved."""
        moved = False
        for tensor, before in self._before:
            if not _share(tensor, before):
                tensor.data = before
                moved = True
        return moved


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own type, with memory of its own."""
    is_torchs = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return is_torchs and tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_inference()


def _share(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    same: bool = tensor.untyped_storage()._cdata == before.untyped_storage()._cdata
    return same and tensor.storage_offset() == before.storage_offset()
