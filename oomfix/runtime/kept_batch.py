"""The batch of a call, kept so that a forward which writes it, or takes things out of it, can start again."""

import operator
from typing import Any

import torch

from oomfix.runtime.batch import Batch


class KeptBatch:
    """What a batch holds before a run.

    Args:
        batch: the batch.
        copies: keep the contents of its tensors too, not only whether they change.
    """

    def __init__(self, batch: Batch, copies: bool) -> None:
        arguments = [*batch.args, *batch.kwargs.values()]
        self._containers = [(node, _content(node)) for node in arguments if isinstance(node, list | dict)]
        self._tensors = [
            (tensor, tensor._version, tensor.detach().clone() if copies else None)
            for tensor in batch.tensors()
            if not tensor.is_inference()
        ]

    def written(self) -> bool:
        """Whether a tensor was written since."""
        return any(tensor._version != version for tensor, version, _ in self._tensors)

    def restore(self) -> bool:
        """Put everything back that was kept; False if a tensor was written of which no copy was kept."""
        for node, content in self._containers:
            if len(node) != len(content) or not all(map(operator.is_, _values(node), _values(content))):
                node.clear()
                node.extend(content) if isinstance(node, list) else node.update(content)
        whole = True
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                if tensor._version != version:
                    whole = whole and copy is not None
                    if copy is not None:
                        tensor.copy_(copy)
        return whole


def _content(node: Any) -> Any:
    return dict(node) if isinstance(node, dict) else list(node)


def _values(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node
