"""Checkpoint files of a simulated run: none is written, and those that are read go where the script wants them."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches

Place = Callable[[torch.UntypedStorage, str], bool]


class Checkpoints:
    """`torch.save` and `torch.load` of a run.

    A file that was read holds real data, and so has torch put it on the host first; tensors that belong on the card
    are moved there after. What the script saved, and loads again, comes back as it was in shape and place.
    """

    def __init__(self, patches: Patches, trace: CardTrace) -> None:
        self._trace = trace
        self._saved: dict[object, Any] = {}
        self._load = torch.load
        patches.set(torch, save=self._not_written, load=self._read)
        # a map_location such as `lambda storage, location: storage.cuda()` asks for the card
        patches.set(torch.UntypedStorage, cuda=lambda storage, *args, **kwargs: _OnCard())

    def _not_written(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        self._trace.assume("torch.save wrote nothing")
        if not isinstance(value, nn.Module):
            self._saved[_key(file)] = tree_map_only(torch.Tensor, _kept, value)

    def _read(self, file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = _place(map_location)
        if _key(file) in self._saved:
            saved = copy.deepcopy(self._saved[_key(file)])
            return tree_map_only(_Kept, lambda kept: kept.again(place), saved)
        on_card: dict[int, torch.UntypedStorage] = {}

        def onto_the_host(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            if place(storage, location):
                on_card[storage._cdata] = storage
            return storage

        moved: dict[tuple[Any, ...], torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata not in on_card:
                return tensor
            # tied weights are one tensor after loading, too
            view = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            if view not in moved:
                moved[view] = tensor.cuda()
            return moved[view]

        loaded = self._load(file, onto_the_host, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(loaded, nn.Module):
            return loaded.cuda() if on_card else loaded
        return tree_map_only(torch.Tensor, move, loaded)


class _OnCard:
    """What a map_location that moves a storage to the card returns."""


class _Kept:
    """A tensor that was saved: its shape and place, not its data."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.location = "cuda:0" if isinstance(tensor, FakeTensor) else "cpu"
        self.data = None if isinstance(tensor, FakeTensor) else tensor.detach().clone()

    def again(self, place: Place) -> torch.Tensor:
        tensor = torch.zeros(self.shape, dtype=self.dtype) if self.data is None else self.data
        return tensor.cuda() if place(tensor.untyped_storage(), self.location) else tensor


def _kept(tensor: torch.Tensor) -> _Kept:
    return _Kept(tensor)


def _key(file: Any) -> object:
    """Under which name a file is found again: its path, or the object if it has none."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.realpath(path) if isinstance(path, str | os.PathLike) else id(file)


def _place(map_location: Any) -> Place:
    """Whether a storage saved at a location goes to the card, as torch.load decides it."""

    def on_card(storage: torch.UntypedStorage, location: str) -> bool:
        wanted = map_location
        if isinstance(map_location, dict):
            wanted = map_location.get(location, location)
        elif callable(map_location):
            wanted = map_location(storage, location)
        if wanted is None:
            wanted = location
        if isinstance(wanted, _OnCard | torch.UntypedStorage):
            return isinstance(wanted, _OnCard)
        device = torch.device(wanted.decode() if isinstance(wanted, bytes) else wanted)
        return device.type == "cuda"

    return on_card
