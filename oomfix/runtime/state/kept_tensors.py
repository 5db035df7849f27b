"""Tensors kept so that those a forward writes in place can be put back."""

import ctypes
from collections.abc import Iterable

import torch

from oomfix.runtime import simulation


class KeptTensors:
    """The versions of some tensors, and in host memory the contents of those that are small enough.

    Args:
        tensors: any; those made in inference mode, which have no version, and empty ones are left out.
        largest: bytes of the largest tensor whose contents are kept.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], largest: int) -> None:
        self._tensors = [
            (tensor, tensor._version, _contents(tensor, largest) if largest else None)
            for tensor in tensors
            if not tensor.is_inference() and tensor.numel()
        ]

    def written(self) -> bool:
        """Whether one was written since."""
        written = [tensor for tensor, version, _ in self._tensors if tensor._version != version]
        return bool(written)

    def restore(self) -> bool:
        """Put the contents back of those that were written; False if a copy is missing."""
        whole = True
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                if tensor._version != version:
                    whole = whole and copy is not None
                    if copy is not None:
                        found = torch.frombuffer(copy, dtype=torch.uint8).view(tensor.dtype)
                        tensor.copy_(found.view(tensor.shape))
        return whole


def _contents(tensor: torch.Tensor, largest: int) -> bytearray | None:
    """What `tensor` holds; None where that is more than `largest` bytes, or not in one piece."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.nbytes > largest:
        return None
    if simulation.assumption is not None:
        return None
    # no tensor: what is short is the device's memory, and a tensor on the CPU is what a simulated card counts
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytearray(ctypes.string_at(plain.data_ptr(), plain.nbytes))
