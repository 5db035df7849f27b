"""Running statistics of normalisation layers, which every forward changes, kept before each call at little cost.

A network has a hundred and fifty such buffers of a few numbers each. They are copied into one tensor for each type of
number, in one operation, and found through the dictionaries that hold them.
"""

import itertools
import operator
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def has_statistics(module: nn.Module) -> bool:
    """Whether `module` is a normalisation layer, whose buffers are running statistics."""
    return isinstance(module, _NormBase)


class KeptStatistics:
    """The buffers of some normalisation layers.

    Args:
        layers: modules for which `has_statistics` holds.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._holders = [layer._buffers for layer in layers]
        self._names: list[list[str]] = []
        self._values: list[torch.Tensor | None] = []
        self._groups: list[_Group] = []

    def keep(self) -> None:
        """Remember what they hold. May run out of memory, and be called again."""
        if not self._holders:
            return
        values = list(itertools.chain.from_iterable(map(dict.values, self._holders)))
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._groups = []
            by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for value in values:
                if value is not None:
                    by_kind.setdefault((value.dtype, value.device), []).append(value)
            self._groups = [_Group(tensors) for tensors in by_kind.values()]
            self._names = [list(holder) for holder in self._holders]
            self._values = values
        for group in self._groups:
            group.keep()

    def restore(self) -> None:
        """Put back what they held, in the tensors that held it."""
        values = iter(self._values)
        for holder, names in zip(self._holders, self._names, strict=True):
            holder.update(zip(names, values, strict=False))
        for group in self._groups:
            group.restore()


class _Group:
    """Tensors of one type on one device, and one tensor with room for the numbers of all."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # views, which see what the tensors hold from now on too
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._copy = torch.empty(sum(map(len, self._flat)), dtype=tensors[0].dtype, device=tensors[0].device)

    def keep(self) -> None:
        with torch.no_grad():
            torch.cat(self._flat, out=self._copy)

    def restore(self) -> None:
        copies = torch.split(self._copy, [len(flat) for flat in self._flat])
        with torch.no_grad():
            torch._foreach_copy_(self._flat, copies)
