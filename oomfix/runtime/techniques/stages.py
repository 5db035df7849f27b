"""Between the stages of a training: what belonged to one is freed before the next begins."""

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oomfix.runtime import trees
from oomfix.runtime.arguments import shown
from oomfix.runtime.memory.oom import free_what_is_left

_log = logging.getLogger("oomfix")
_MIB = 2**20
_FREED = (torch.optim.Optimizer, nn.Module, torch.Tensor)


@dataclass(frozen=True)
class Freed:
    """What `free` did.

    Attributes:
        freed_bytes: memory of tensors that no longer exist, each storage once (bytes).
        held_bytes: memory of released tensors that something else still refers to (bytes).
    """

    freed_bytes: int
    held_bytes: int

    def __str__(self) -> str:
        held = f", {self.held_bytes / _MIB:.1f} MiB still held elsewhere" if self.held_bytes else ""
        return f"{self.freed_bytes / _MIB:.1f} MiB freed{held}"


def free(*things: Any) -> Freed:
    """Free the memory of objects that are no longer needed, even if names still refer to them.

    `del optimizer` frees nothing while a scheduler, a list or a closure refers to it too. Here the things
    themselves are emptied, then reference cycles are collected and the allocator's cache is given back.

        runtime.free(optimizer, teacher)    # Freed(freed_bytes=..., held_bytes=0)

    Args:
        things: optimizers (their state, and the gradients of their parameters; the parameters stay), modules
            (parameters, buffers and gradients), tensors (their data and graph), and lists and dictionaries,
            which are emptied of these.

    Returns:
        Bytes freed, and bytes that something else still holds.

    Raises:
        TypeError: something else; drop your own references to it instead.

    A freed optimizer refuses to step, a freed module is on the "meta" device, a freed tensor is empty. The graph of a
    view goes when nothing refers to the view any more, and is counted as held until then.
    """
    for thing in things:
        _check(thing)
    storages: dict[int, tuple[weakref.ref[Any], int]] = {}
    for thing in things:
        _note(_tensors_of(thing), storages)
        _empty(thing)
    return _collected(storages)


@dataclass
class Stage:
    """A stage of a training, as `stage` yields it.

    Attributes:
        name: what to call it in the log.
        freed: what leaving it freed; None before.
    """

    name: str
    freed: Freed | None = None
    _optimizers: "weakref.WeakSet[torch.optim.Optimizer]" = field(default_factory=weakref.WeakSet)
    _older: "weakref.WeakSet[torch.optim.Optimizer]" = field(default_factory=weakref.WeakSet)
    # by address, since sets compare tensors by their numbers
    _parameters: "dict[int, weakref.ref[torch.Tensor]]" = field(default_factory=dict)

    def _meets(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._optimizers or optimizer in self._older:
            return
        self._optimizers.add(optimizer)
        # the optimizer may be gone when the stage ends, its gradients are not
        for group in optimizer.param_groups:
            self._parameters.update((id(parameter), weakref.ref(parameter)) for parameter in group["params"])


@contextmanager
def stage(name: str, keep: Iterable[torch.optim.Optimizer] = ()) -> Iterator[Stage]:
    """One stage of a training: when it ends, its optimizers and their gradients are freed, and this is logged.

        with runtime.stage("decoder"):
            train(model, torch.optim.AdamW(model.decoder.parameters()), epochs=30)
        with runtime.stage("everything"):
            train(model, torch.optim.AdamW(model.parameters(), lr=1e-5), epochs=60)

    The optimizers of a stage are those that step in it and had no state when it began: one that goes on from a
    checkpoint belongs to the stage in which it was made.

    Args:
        name: for the log.
        keep: optimizers that outlive the stage.

    Raises:
        TypeError: `keep` is not a list of them.

    An error in the stage frees them too. A stage inside a stage frees its own.

    In a second stage of GPT-2 124M on one sample of 128 tokens, memory peaks at 2.34 GiB instead of 3.27, where a
    scheduler still refers to the optimizer of the first (simulated A100). Ending a stage collects garbage: two ends
    took 736 ms of a CPU (bench/results/stages-cpu.md).
    """
    if not isinstance(keep, Iterable):
        raise TypeError(f"keep: got {shown(keep)}, expected a list of optimizers")
    current = Stage(name)
    current._older.update(keep)
    current._older.update(
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer) and thing.state
    )
    handle = register_optimizer_step_pre_hook(current._meets)
    try:
        yield current
    finally:
        handle.remove()
        optimizers = list(current._optimizers)
        storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        parameters = [parameter for reference in current._parameters.values() if (parameter := reference()) is not None]
        _note((parameter.grad for parameter in parameters if parameter.grad is not None), storages)
        for parameter in parameters:
            parameter.grad = None
        for optimizer in optimizers:
            _note(_tensors_of(optimizer), storages)
            _empty(optimizer)
        current.freed = _collected(storages)
        _log.info("stage %s: %s (%d optimizers)", name, current.freed, len(optimizers))


def _check(thing: Any) -> None:
    if isinstance(thing, list | dict):
        for item in _items(thing):
            _check(item)
    elif not isinstance(thing, _FREED) and thing is not None and not isinstance(thing, str | int | float | bool):
        raise TypeError(
            f"things: got {type(thing).__name__}, expected optimizers, modules, tensors, and lists and "
            "dictionaries of these; drop your own references to other things"
        )


def _tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.optim.Optimizer):
        yield from trees.tensors(list(thing.state.values()))
        parameters: Iterable[torch.Tensor] = (p for group in thing.param_groups for p in group["params"])
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    elif isinstance(thing, nn.Module):
        parameters = list(thing.parameters())
        yield from parameters
        yield from thing.buffers()
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    elif isinstance(thing, torch.Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, list | dict):
        for item in _items(thing):
            yield from _tensors_of(item)


def _empty(thing: Any) -> None:
    if isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
            group["params"] = []
        thing.state.clear()
        thing.step = _refuses_to_step  # type: ignore[method-assign, assignment]
    elif isinstance(thing, nn.Module):
        thing.to("meta")
    elif isinstance(thing, torch.Tensor):
        thing.grad = None
        if thing.grad_fn is not None and not thing._is_view():
            thing.detach_()
        thing.data = thing.new_empty(0)
    elif isinstance(thing, list | dict):
        for item in _items(thing):
            _empty(item)
        thing.clear()


def _items(container: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


def _refuses_to_step(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "this optimizer was freed, by runtime.free or at the end of a runtime.stage; make a new one, or pass it as "
        "stage(..., keep=[optimizer])"
    )


def _note(tensors: Iterable[torch.Tensor], storages: dict[int, tuple[weakref.ref[Any], int]]) -> None:
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())


def _collected(storages: dict[int, tuple[weakref.ref[Any], int]]) -> Freed:
    free_what_is_left(thorough=True)
    freed = sum(nbytes for storage, nbytes in storages.values() if storage() is None)
    return Freed(freed, sum(nbytes for _, nbytes in storages.values()) - freed)
