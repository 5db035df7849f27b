"""What a forward changes besides gradients, kept so that a run which failed leaves no trace."""

import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from oomfix.runtime.recomputation import Attributes


class RandomState:
    """The state of random number generators when it was made.

    Args:
        outside_torch: Python's and NumPy's too, which takes longer than all of torch's.
        own: generators that the program made for itself.
    """

    def __init__(self, outside_torch: bool = True, own: Iterable[Any] = ()) -> None:
        self._torch = torch.get_rng_state()
        # asking a GPU before CUDA runs would start it
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._own = [(generator, _state_of(generator)) for generator in own]
        self._python = random.getstate() if outside_torch else None
        # through the package: numpy 2 imports its generators when they are first used, in the forward perhaps
        numpy: Any = sys.modules.get("numpy") if outside_torch else None
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)

    def moved(self) -> bool:
        """Whether any of the generators has been drawn from since."""
        if not torch.equal(torch.get_rng_state(), self._torch):
            return True
        if self._cuda is not None and not torch.equal(torch.cuda.get_rng_state(), self._cuda):
            return True
        return self.moved_outside_torch() or any(not _same(_state_of(own), state) for own, state in self._own)

    def moved_outside_torch(self) -> bool:
        """Whether Python's or NumPy's generator has been drawn from since; False if these were not kept."""
        if self._python is not None and random.getstate() != self._python:
            return True
        if self._numpy is None:
            return False
        now, before = sys.modules["numpy"].random.get_state(legacy=False), self._numpy
        if now["has_gauss"] != before["has_gauss"] or now["state"]["pos"] != before["state"]["pos"]:
            return True
        return bool((now["state"]["key"] != before["state"]["key"]).any())

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for generator, state in self._own:
            _set_state(generator, state)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def is_generator(value: Any) -> bool:
    """Whether `value` is a random number generator of torch, Python or NumPy that a program holds itself."""
    kind = type(value)
    known = _is_generator_type.get(kind)
    if known is None:
        numpy: Any = sys.modules.get("numpy")
        of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
        known = _is_generator_type[kind] = issubclass(kind, (torch.Generator, random.Random, *of_numpy))
    return known


_is_generator_type: dict[type, bool] = {}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_same(state[key], other[key]) for key in state)
    if isinstance(state, tuple):
        return all(map(_same, state, other))
    same = state == other
    return bool(same if isinstance(same, bool) else same.all())  # of numbers, or of arrays and tensors


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class KeptState:
    """Tensors and attributes of some modules, of which those that forwards change are kept before each run.

    Before the first run all buffers and attributes are kept; later only the statistics of normalisation layers and
    what an earlier run was seen to change, so masks, position tables and weights cost nothing.

    Args:
        modules: every module that the forward may run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._places: list[_Place] = []
        self._kept: list[_Place] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._first = True
        self._explores = False
        self._attributes: Attributes | None = None
        self._attributes_change = False

    def keep(self, explore: bool, objects: Callable[[], list[Any]] = list) -> None:
        """Remember what the coming run may change. May run out of memory, and be called again.

        Args:
            explore: look at everything, not only at what was seen to change.
            objects: others whose attributes are to be kept.
        """
        if self._first and not self._places:
            self._places = [place for module in self._living() for place in _places(module)]
            self._kept = [place for place in self._places if not place.is_parameter]
        looks = explore or self._attributes_change
        self._attributes = Attributes([*self._living(), *objects()]) if looks else None
        self._explores = explore
        if explore:
            for place in self._places:
                place.look()
        tensors = [place.tensor() for place in self._kept]
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            self._tensors, self._copies = [], []
            self._kept = [place for place, tensor in zip(self._kept, tensors, strict=True) if tensor is not None]
            self._copies = [torch.empty_like(tensor) for tensor in tensors if tensor is not None]
            self._tensors = [tensor for tensor in tensors if tensor is not None]
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)

    def ran(self) -> None:
        """To be called after a run that went well; learns what forwards change."""
        if not self._explores or self._attributes is None:
            return
        self._attributes_change = self._attributes_change or bool(self._attributes.changed())
        self._attributes = None
        before = len(self._kept)
        self._kept = [place for place in self._places if place.is_norm or place.changes or place.changed()]
        for place in self._kept:
            place.changes = True
        if self._first or len(self._kept) != before:
            self._tensors, self._copies = [], []
        self._first = False

    def restore(self) -> list[str]:
        """Put everything back that was kept; the names of tensors that were changed without having been kept."""
        with torch.no_grad():
            for place, tensor, copy in zip(self._kept, self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
                place.put(tensor)
        if self._attributes is not None:
            self._attributes.restore()
        kept = {id(place) for place in self._kept}
        # parameters are changed by optimizers too, so they are compared with a look at this very call only
        lost = [
            place
            for place in self._places
            if id(place) not in kept and place.changed() and (self._explores or not place.is_parameter)
        ]
        for place in lost:
            place.changes = True
            place.look()
        return [place.name for place in lost]

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
        self.is_norm = holder == "_buffers" and isinstance(module, _NormBase)
        self.changes = False

    def tensor(self) -> torch.Tensor | None:
        module = self._module()
        return None if module is None else getattr(module, self._holder).get(self._key)

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
    for holder in ("_buffers", "_parameters", "__dict__"):
        for key, value in getattr(module, holder).items():
            if isinstance(value, torch.Tensor):
                yield _Place(module, holder, key)
