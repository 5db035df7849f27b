"""Sums over the bits of tensors, which tell of writes that leave no trace in their versions.

Momentum encoders are often written through `.data`: `p.data.mul_(m).add_(q.data, alpha=1 - m)`.
"""

from collections.abc import Iterable

import torch

from oomfix.runtime import simulation
from oomfix.runtime.state.data_places import is_plain

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an entry."""


class Checksums:
    """The sums of some tensors at one moment. They are read off the device only when they are compared.

    Args:
        tensors: any; those that are trained, and those of other types than torch's own, are left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if _has_checksum(tensor)]
        self._before = list(map(_checksum, self._tensors))

    def changed(self) -> list[torch.Tensor]:
        """The tensors that hold something else by now."""
        differ = [_checksum(tensor) != before for tensor, before in zip(self._tensors, self._before, strict=True)]
        return [tensor for tensor, differs in zip(self._tensors, _read(differ), strict=True) if differs]


def _has_checksum(tensor: torch.Tensor) -> bool:
    if simulation.assumption is not None or not is_plain(tensor) or tensor.requires_grad or tensor.is_quantized:
        return False
    return not tensor.is_meta and not tensor.is_conj() and not tensor.is_neg() and tensor.itemsize in _WHOLE_NUMBERS


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_WHOLE_NUMBERS[tensor.itemsize]).sum()


def _read(flags: list[torch.Tensor]) -> list[bool]:
    """The values of flags [], with one wait for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, flag in enumerate(flags):
        by_device.setdefault(flag.device, []).append(place)
    values = [False] * len(flags)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([flags[place] for place in places]).tolist(), strict=True):
            values[place] = value
    return values
