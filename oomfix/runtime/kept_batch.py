"""The batch of a call, kept so that a forward which writes it, or takes things out of it, can start again."""

import ctypes
import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch

from oomfix.runtime.batch import Batch


class KeptBatch:
    """What a batch holds before a run.

    Args:
        batch: the batch.
        tensors: every tensor in it.
        copies: keep the contents of its tensors too, not only whether they change.
    """

    def __init__(self, batch: Batch, tensors: Iterable[torch.Tensor], copies: bool) -> None:
        arguments = [*batch.args, *batch.kwargs.values()]
        self._containers = [(node, _content(node)) for node in arguments if isinstance(node, list | dict)]
        self._tensors = KeptTensors(tensors, largest=sys.maxsize if copies else 0)

    def written(self) -> bool:
        """Whether a tensor was written since."""
        return self._tensors.written()

    def restore(self) -> bool:
        """Put everything back that was kept; False if a tensor was written of which no copy was kept."""
        for node, content in self._containers:
            if len(node) != len(content) or not all(map(operator.is_, _values(node), _values(content))):
                node.clear()
                node.extend(content) if isinstance(node, list) else node.update(content)
        return self._tensors.restore()


class KeptTensors:
    """The versions of some tensors, and in host memory the contents of those that are small enough.

    Args:
        tensors: any; those without contents of their own are left out.
        largest: bytes of the largest tensor whose contents are kept.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], largest: int) -> None:
        self._tensors = [
            (tensor, tensor._version, _contents(tensor) if largest and tensor.nbytes <= largest else None)
            for tensor in tensors
            if not tensor.is_inference() and tensor.layout == torch.strided and not tensor.is_nested and tensor.numel()
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


def _contents(tensor: torch.Tensor) -> bytearray:
    # no tensor: what is short is the device's memory, and a tensor on the CPU is what a simulated card counts
    bytes_ = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return bytearray(ctypes.string_at(bytes_.data_ptr(), bytes_.numel()))


def _content(node: Any) -> Any:
    return dict(node) if isinstance(node, dict) else list(node)


def _values(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node
