"""Tensors that modules keep as attributes, in host memory: attention maps, features that another loss reads.

Such a tensor outlives the forward that made it. Neither checkpointing nor `offload_activations` frees its memory, since
the module holds it. Here it is copied to the host, and back when somebody reads the attribute.
"""

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from oomfix.runtime.techniques.checkpointed_block import CheckpointedBlock
from oomfix.runtime.techniques.offloading import is_movable, nbytes

_DEVICE = "_oomfix_device"  # on a copy in host memory: where it came from


@contextmanager
def attributes_on_host(modules: Iterable[nn.Module], min_bytes: int = 2**20) -> Iterator["AttributesOnHost"]:
    """Move large tensors that modules assign to their attributes to the host, while the context is active.

    Put it around a forward. A tensor is moved when a module's forward has returned and nothing but the attribute holds
    its memory: then nobody can write it unseen, and moving it frees something. Reading the attribute gives a tensor on
    the device, now and after the context, with the graph it had; what was read is moved again when the next module's
    forward in the context has returned.

    Args:
        modules: what their attributes hold on entering stays where it is: tables, caches.
        min_bytes: tensors smaller than this stay on the device (bytes).

    Yields:
        What counts the bytes that were moved.

    Code that looks into `vars(module)` finds the copy on the host. A torch that does not say how many hold a tensor
    (2.3 does not, 2.6 does) moves none.
    """
    moving = AttributesOnHost(modules, min_bytes)
    hook = register_module_forward_hook(moving.after_forward)
    try:
        yield moving
    finally:
        hook.remove()


def waits_on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the copy of one that was moved here."""
    return hasattr(tensor, _DEVICE)


class AttributesOnHost:
    """The attributes that are moved in one context.

    Attributes:
        moved_bytes: what has left the device so far (bytes).
    """

    def __init__(self, modules: Iterable[nn.Module], min_bytes: int) -> None:
        self.moved_bytes = 0
        self._min_bytes = min_bytes
        self._old: list[weakref.ref[Any]] = []
        self._places: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
        self._old = [weakref.ref(value) for module in modules for value in vars(module).values() if self._is_new(value)]

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Move what this module has left, and what earlier ones left and could not be moved then."""
        # a name that held a tensor here would count among its holders
        for name in [name for name, value in vars(module).items() if self._is_new(value)]:
            self._places[id(module), name] = weakref.ref(module)
        for (_, name), reference in self._places.items():
            holder = reference()
            if holder is None or not self._is_new(vars(holder).get(name)):
                continue
            if _holders(vars(holder), name) == _alone() and _is_read_through(holder, name):
                self.moved_bytes += nbytes(vars(holder)[name])
                _move(vars(holder), name)

    def _is_new(self, value: object) -> bool:
        """Whether this is a large tensor on the device, which was not there on entering."""
        return (
            isinstance(value, torch.Tensor)
            and not waits_on_host(value)
            and is_movable(value)
            and not (value.is_leaf and value.requires_grad)
            and nbytes(value) >= self._min_bytes
            and not any(old() is value for old in self._old)
        )


class _Attribute:
    """Stands in a class for one attribute of its modules: what waits on the host comes back where it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        try:
            value = vars(module)[self._name]
        except KeyError:
            # torch then looks among parameters, buffers and submodules
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self._name!r}") from None
        if not isinstance(value, torch.Tensor) or not waits_on_host(value):
            return value
        with torch.enable_grad():
            read = value.to(getattr(value, _DEVICE), copy=True)
        if not torch.is_inference_mode_enabled():
            # who reads it may write it
            vars(module)[self._name] = read
        return read

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self._name]


def _is_read_through(module: nn.Module, name: str) -> bool:
    """See to it that reading the attribute brings it back; False where its class has other plans for the name."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return False
    found = inspect.getattr_static(kind, name, None)
    if found is None and name not in dir(kind):
        # not in a class that checkpointing made, which the module may lose again
        own = kind.__bases__[1] if CheckpointedBlock in kind.__bases__ else kind
        setattr(own, name, _Attribute(name))
        return True
    return isinstance(found, _Attribute)


def _move(attributes: dict[str, Any], name: str) -> None:
    tensor = attributes[name]
    with torch.enable_grad():
        copy = tensor.to("cpu", copy=True)
    setattr(copy, _DEVICE, tensor.device)
    attributes[name] = copy


def _holders(attributes: dict[str, Any], name: str) -> tuple[int, int, int]:
    """How many references there are to a tensor in Python, to it in torch, and to its memory."""
    tensor = attributes[name]
    # torch versions that do not say how many hold a tensor never move it
    uses = tensor._use_count() if hasattr(tensor, "_use_count") else 0
    return sys.getrefcount(tensor), uses, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _alone() -> tuple[int, int, int]:
    """The references to a tensor that only an attribute holds."""
    references, _, memory = _holders({"tensor": torch.empty(1)}, "tensor")
    return references, 1, memory
