"""What a forward changes in its models and objects, kept so that a run which failed leaves no trace."""

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from oomfix.runtime.memory.oom import is_out_of_memory
from oomfix.runtime.state.attributes import Attributes
from oomfix.runtime.state.checksums import Checksums
from oomfix.runtime.state.data_places import DataPlaces
from oomfix.runtime.state.kept_statistics import KeptStatistics, has_statistics
from oomfix.runtime.state.kept_tensors import KeptTensors
from oomfix.runtime.state.referenced import owners_of, tensors_of
from oomfix.runtime.techniques.attributes_on_host import waits_on_host

_SMALL = 2**20  # bytes of a tensor outside of modules that is kept before it was seen to change


class KeptState:
    """Tensors and attributes of some modules, of which those that forwards change are kept before each run.

    Before the first run all buffers and attributes are kept; later only the statistics of normalisation layers and
    what an earlier run was seen to change, so masks, position tables and weights cost nothing.

    Args:
        modules: every module that the forward may run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._modules = [weakref.ref(module) for module in modules]
        self._statistics = KeptStatistics(filter(has_statistics, modules))
        self._places: list[_Place] = []
        self._kept: list[_Place] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._first = True
        self._explores = False
        self._attributes: Attributes | None = None
        self._attributes_change = False
        self._loose: KeptTensors | None = None
        self._loose_change = False
        self._data: DataPlaces | None = None
        self._checksums: Checksums | None = None

    def keep(self, explore: bool, forward: Callable[..., Any]) -> None:
        """Remember what the coming run may change. May run out of memory, and be called again.

        Args:
            explore: look at everything, not only at what was seen to change.
            forward: what will run; attributes of the objects it refers to are kept too.
        """
        if self._first and not self._places:
            self._places = [place for module in self._living() for place in _places(module)]
            self._kept = [place for place in self._places if not place.is_parameter]
        self._explores = explore
        looks = explore or self._attributes_change
        self._attributes = Attributes(owners_of(forward, self._living())) if looks else None
        self._data = self._checksums = None
        if explore:
            for place in self._places:
                place.look()
            held = [tensor for place in self._places if (tensor := place.tensor()) is not None]
            self._data = DataPlaces([*held, *tensors_of(forward, self._living())])
            self._checksums = Checksums(held)
        self._loose = None
        if explore or self._loose_change:
            largest = sys.maxsize if self._loose_change else _SMALL if self._first else 0
            self._loose = KeptTensors((t for t in tensors_of(forward, self._living()) if t.grad_fn is None), largest)
        tensors = [place.tensor() for place in self._kept]
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            self._tensors, self._copies = [], []
            self._kept = [place for place, tensor in zip(self._kept, tensors, strict=True) if tensor is not None]
            self._copies = [torch.empty_like(tensor) for tensor in tensors if tensor is not None]
            self._tensors = [tensor for tensor in tensors if tensor is not None]
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)
        self._statistics.keep()

    def ran(self) -> None:
        """To be called after a run that went well; learns what forwards change."""
        if not self._explores or self._attributes is None:
            return
        self._attributes_change = self._attributes_change or bool(self._attributes.changed())
        self._attributes = None
        self._loose_change = self._loose_change or (self._loose is not None and self._loose.written())
        self._loose = None
        moved = {id(tensor) for tensor in self._data.moved()} if self._data is not None else set()
        try:
            unseen = moved | self._changed_unseen()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            unseen = moved  # the call went well; a later one looks again
        self._data = self._checksums = None
        before = len(self._kept)
        self._kept = [p for p in self._places if p.changes or p.changed() or id(p.tensor()) in unseen]
        for place in self._kept:
            place.changes = True
        if self._first or len(self._kept) != before:
            self._tensors, self._copies = [], []
        self._first = False

    def restore(self) -> list[str]:
        """Put everything back that was kept; the names of tensors that were changed without having been kept."""
        if self._data is not None:
            self._data.restore()
        with torch.no_grad():
            for place, tensor, copy in zip(self._kept, self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
                place.put(tensor)
        self._statistics.restore()
        if self._attributes is not None:
            self._attributes.restore()
        loose_is_lost = self._loose is not None and not self._loose.restore()
        self._loose_change = self._loose_change or loose_is_lost
        kept = {id(place) for place in self._kept}
        unseen = self._changed_unseen()
        # parameters are changed by optimizers too, so they are compared with a look at this very call only
        lost = [
            place
            for place in self._places
            if id(place) not in kept
            and ((place.changed() and (self._explores or not place.is_parameter)) or id(place.tensor()) in unseen)
        ]
        for place in lost:
            place.changes = True
            place.look()
        return [place.name for place in lost] + ["a tensor outside of modules"] * loose_is_lost

    def _changed_unseen(self) -> set[int]:
        """What was written without a trace in its version, by the identities of the tensors."""
        return set() if self._checksums is None else {id(tensor) for tensor in self._checksums.changed()}

    def _living(self) -> list[nn.Module]:
        return [module for place in self._modules if (module := place()) is not None]


class _Place:
    """A tensor that a module holds: a buffer, a parameter, or a plain attribute."""

    def __init__(self, module: nn.Module, holder: str, key: str) -> None:
        # weak, so that what is known about a forward does not keep its model alive
        self._module = weakref.ref(module)
        self._holder = holder
        self._key = key
        self._seen: tuple[int, int] | None = None
        self.name = f"{type(module).__name__}.{key}"
        self.is_parameter = holder == "_parameters"
        self.changes = False

    def tensor(self) -> torch.Tensor | None:
        module = self._module()
        if module is None:
            return None
        try:
            # torch.jit has something else in the place of these dictionaries, without `get`
            held: torch.Tensor | None = getattr(module, self._holder)[self._key]
            return held
        except KeyError:
            return None

    def put(self, tensor: torch.Tensor) -> None:
        module = self._module()
        if module is not None:
            getattr(module, self._holder)[self._key] = tensor

    def look(self) -> None:
        """Remember which tensor is there, and its version."""
        tensor = self.tensor()
        self._seen = None if tensor is None else (id(tensor), tensor._version)

    def changed(self) -> bool:
        """Whether the tensor was written since the last look. A tensor in its place is an attribute's matter."""
        tensor = self.tensor()
        if tensor is None or self._seen is None:
            return False
        identity, version = self._seen
        return id(tensor) == identity and tensor._version != version


def _places(module: nn.Module) -> Iterator[_Place]:
    for holder in ("_parameters", "__dict__") if has_statistics(module) else ("_buffers", "_parameters", "__dict__"):
        for key, value in getattr(module, holder).items():
            # what waits on the host is written by nobody: reading it puts another tensor in its place
            if isinstance(value, torch.Tensor) and not waits_on_host(value):
                yield _Place(module, holder, key)
