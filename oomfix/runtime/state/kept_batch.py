"""The batch of a call, kept so that a forward which writes it, or takes things out of it, can start again."""

import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch

from oomfix.runtime.state.kept_tensors import KeptTensors


class KeptBatch:
    """What a batch holds before a run.

    Args:
        containers: those among its arguments; other values are left out.
        tensors: every tensor in it.
        copies: keep the contents of its tensors too, not only whether they change.
    """

    def __init__(self, containers: Iterable[Any], tensors: Iterable[torch.Tensor], copies: bool) -> None:
        self._containers = [(node, _content(node)) for node in containers if isinstance(node, list | dict)]
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


def _content(node: Any) -> Any:
    return dict(node) if isinstance(node, dict) else list(node)


def _values(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node
