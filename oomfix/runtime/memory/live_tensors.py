"""What was on the card when memory ran out: who holds it, where it was made, and what to do about it."""

import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from oomfix.runtime import compat, simulation, trees
from oomfix.runtime.arguments import shown
from oomfix.runtime.memory.origins import is_users, live_origins

_MIB = 2**20
WEIGHTS, GRADIENTS, STATE, VARIABLES = "weights", "gradients", "optimizer state", "variables"
SAVED, OTHER, UNSEEN = "kept for backward", "other tensors", "not seen from Python"
_MANY_CLASSES = 10_000
_MANY_GRAPHS = 8
_DEPTH = 5  # a list of dictionaries that an object of a variable holds
_NO_DATA = (types.ModuleType, type, types.FunctionType, types.MethodType, str, bytes, int, float)


@dataclass
class Held:
    """Memory that one thing holds.

    Attributes:
        name: a parameter, a variable with its function, or an operation.
        role: one of "weights", "gradients", "optimizer state", "variables", "kept for backward", "other tensors".
        nbytes: of all its storages that nothing named before holds (bytes).
        count: how many storages.
        graphs: how many of its tensors hold a graph.
        shape, dtype: of the largest tensor.
        line: "file:line" that made the largest, where `record_origins` saw it.
    """

    name: str
    role: str
    nbytes: int = 0
    count: int = 0
    graphs: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""
    _largest_bytes: int = -1

    def _add(self, nbytes: int, shape: tuple[int, ...], dtype: str, line: str, has_graph: bool) -> None:
        self.nbytes += nbytes
        self.count += 1
        self.graphs += has_graph
        if nbytes > self._largest_bytes:
            self._largest_bytes, self.shape, self.dtype, self.line = nbytes, shape, dtype, line

    def __str__(self) -> str:
        what = f"{self.count} tensors, the largest " if self.count > 1 else ""
        where = f", made at {self.line}" if self.line else ""
        return f"{self.nbytes / _MIB:9.1f} MiB  {self.name} ({what}{list(self.shape)} {self.dtype}{where})"


@dataclass(frozen=True)
class OomReport:
    """What `oom_report` found; `str` of it is a page for a log.

    Attributes:
        message: the first line of the error; "" without one.
        by_role: bytes for each role, the largest first.
        largest: what holds most, the largest first.
        advice: what to do, in sentences.
    """

    message: str
    by_role: dict[str, int]
    largest: list[Held] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = sum(self.by_role.values())
        lines = [self.message] if self.message else []
        lines.append(f"{total / _MIB:.1f} MiB in tensors:")
        lines += [f"  {nbytes / _MIB:9.1f} MiB  {role}" for role, nbytes in self.by_role.items()]
        lines.append("The largest:")
        lines += [f"  {held}" for held in self.largest]
        lines += [f"- {sentence}" for sentence in self.advice]
        return "\n".join(lines)


def oom_report(error: BaseException | None = None, *, top: int = 10, device_type: str | None = None) -> OomReport:
    """Find what holds the memory now: best inside the `except` that caught the error, where it is still held.

        try:
            with runtime.record_origins():
                train_one_iteration()
        except torch.cuda.OutOfMemoryError as error:
            print(runtime.oom_report(error))
            raise

    Parameters, gradients and optimizer state are found through the modules and optimizers that exist, other
    tensors through the variables of the functions that were running (those of `error`, and the caller's). What
    autograd keeps has no names: it is listed by operation and line where `record_origins` was active, and is
    otherwise the rest, "not seen from Python" (CUDA only). Each storage counts once.

    Args:
        error: the exception, for its message and its frames.
        top: how many things to list.
        device_type: which tensors count; None: those on the GPU if CUDA runs, else all.

    Raises:
        TypeError: `error` is not an exception.
        ValueError: `top` is below 1.

    Looks at every object of the process, which takes up to seconds: not for every step.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top: got {top!r}, expected a whole number of at least 1")
    if error is not None and not isinstance(error, BaseException):
        raise TypeError(f"error: got {shown(error)}, expected the exception, or None")
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device_type is None and on_cuda:
        device_type = "cuda"
    census = _Census(device_type)
    objects = gc.get_objects()
    census.count_named(objects)
    census.count_variables([*_frames_of(error), *_frames_from(sys._getframe(1))])
    census.count_recorded()
    census.count_rest(objects)
    del objects
    held = sorted(census.held.values(), key=lambda item: -item.nbytes)
    roles: dict[str, int] = {}
    for item in held:
        roles[item.role] = roles.get(item.role, 0) + item.nbytes
    reserved = 0
    if on_cuda and device_type == "cuda":
        reserved = torch.cuda.memory_reserved()
        unseen = torch.cuda.memory_allocated() - sum(roles.values())
        if unseen > 0:
            roles[UNSEEN] = unseen
    by_role = dict(sorted(roles.items(), key=lambda role: -role[1]))
    message = "" if error is None else str(error).split("\n", 1)[0]
    return OomReport(message, by_role, held[:top], list(_advice(held, by_role, reserved)))


class _Census:
    """Counts storages, each under the first thing that is found to hold it."""

    def __init__(self, device_type: str | None) -> None:
        self.held: dict[tuple[str, str], Held] = {}
        self._device_type = device_type
        self._seen: set[int] = set()
        self._origins = {storage._cdata: (storage, origin) for storage, origin in live_origins()}

    def count_named(self, objects: list[Any]) -> None:
        """Parameters, gradients and optimizer state."""
        modules = [thing for thing in objects if issubclass(type(thing), nn.Module)]
        inner = {id(child) for module in modules for child in module._modules.values()}
        names: dict[int, str] = {}
        # outermost modules first: what is part of another is called by its place there
        for module in sorted(modules, key=lambda module: id(module) in inner):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                names.setdefault(id(tensor), f"{type(module).__name__}.{name}")
                self._count(tensor, names[id(tensor)], WEIGHTS)
                if tensor.is_leaf and tensor.grad is not None:
                    self._count(tensor.grad, f"gradient of {names[id(tensor)]}", GRADIENTS)
        for optimizer in (thing for thing in objects if issubclass(type(thing), torch.optim.Optimizer)):
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter), "a parameter")
                for tensor in trees.tensors(state):
                    self._count(tensor, f"{type(optimizer).__name__} state of {name}", STATE)
                if parameter.grad is not None:
                    self._count(parameter.grad, f"gradient of {name}", GRADIENTS)

    def count_variables(self, frames: Iterable[FrameType]) -> None:
        """What the variables of functions that run, or were running, refer to."""
        depths: dict[int, int] = {}
        for frame in frames:
            code = frame.f_code
            if not is_users(code.co_filename):
                continue
            where = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
            for name, value in list(frame.f_locals.items()):
                for place, tensor in _tensors_in(name, value, _DEPTH, depths):
                    self._count(tensor, f"`{place}` of {where}", VARIABLES)

    def count_recorded(self) -> None:
        """What was recorded, and is held by nothing that has a name."""
        for address, (storage, origin) in self._origins.items():
            if address in self._seen or not self._is_on_device(storage.device):
                continue
            self._seen.add(address)
            role = OTHER if origin.in_backward else SAVED
            held = self._thing(f"made by {origin.operation} at {origin.line or 'an unknown line'}", role)
            held._add(storage.nbytes(), origin.shape, origin.dtype, "", False)

    def count_rest(self, objects: list[Any]) -> None:
        """Tensors that Python objects hold, though no variable of a running function does."""
        for thing in objects:
            if issubclass(type(thing), torch.Tensor):
                self._count(thing, "held by an object", OTHER)

    def _thing(self, name: str, role: str) -> Held:
        return self.held.setdefault((name, role), Held(name, role))

    def _is_on_device(self, device: torch.device) -> bool:
        return device.type != "meta" and self._device_type in (None, device.type)

    def _count(self, tensor: torch.Tensor, name: str, role: str) -> None:
        if compat.is_cleared(tensor):
            return
        # the layout of a nested one cannot be asked in torch 2.3 while origins are recorded; its compiler keeps one
        if tensor.is_nested or tensor.layout is not torch.strided or not self._is_on_device(tensor.device):
            return
        storage = tensor.untyped_storage()
        # what a compiler has left is a shape alone; tensors of a simulated card stand for memory
        is_memory = storage.device.type != "meta" or simulation.assumption is not None
        if storage._cdata in self._seen or not is_memory:
            return
        self._seen.add(storage._cdata)
        _, origin = self._origins.get(storage._cdata, (None, None))
        dtype = str(tensor.dtype).removeprefix("torch.")
        has_graph = tensor.grad_fn is not None
        self._thing(name, role)._add(
            storage.nbytes(), tuple(tensor.shape), dtype, origin.line if origin else "", has_graph
        )


def _tensors_in(place: str, value: Any, depth: int, depths: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a variable, with what to call its place: a container, or an attribute of an object.

    `depths` says how deep each thing was looked into, by its id: many functions refer to the same ones.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield place, value
        return
    if depth <= depths.get(id(value), 0) or issubclass(kind, _NO_DATA):
        return
    if kind in (list, tuple, dict):
        depths[id(value)] = depth
        for item in list(value.values() if kind is dict else value):
            yield from _tensors_in(place, item, depth - 1, depths)
    elif kind.__dictoffset__:
        depths[id(value)] = depth
        for name, item in list(vars(value).items()):
            yield from _tensors_in(f"{place}.{name}", item, depth - 1, depths)


def _frames_of(error: BaseException | None) -> Iterator[FrameType]:
    """The frames that an exception holds, the innermost last; of its causes too."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _advice(held: list[Held], by_role: dict[str, int], reserved: int) -> Iterator[str]:
    total = sum(by_role.values()) or 1
    for item in held:
        if item.role == VARIABLES and item.graphs >= _MANY_GRAPHS:
            yield (
                f"{item.name} holds {item.graphs} tensors with their graphs, and these the activations of as many "
                "iterations: store `tensor.detach()`."
            )
    logits = next((item for item in held if len(item.shape) > 1 and item.shape[-1] >= _MANY_CLASSES), None)
    if logits is not None and logits.role not in (WEIGHTS, GRADIENTS, STATE):
        yield (
            f"{logits.name} is {list(logits.shape)}: logits over {logits.shape[-1]} classes; "
            "runtime.linear_cross_entropy never makes them as a whole."
        )
    activations = sum(by_role.get(role, 0) for role in (SAVED, UNSEEN, VARIABLES))
    if activations > 0.4 * total:
        yield (
            "Most is activations: memory.forward_backward runs the batch in micro-batches, "
            "runtime.enable_checkpointing keeps only the inputs of blocks."
        )
    if by_role.get(STATE, 0) > 0.4 * total:
        yield "Most is optimizer state: runtime.adamw_8bit keeps a quarter of it, SGD with momentum half."
    if by_role.get(GRADIENTS, 0) > 0.2 * total:
        yield "Gradients are a good part: runtime.optimizer_in_backward frees each as soon as it is used."
    if reserved and reserved - total > 0.2 * reserved:
        yield (
            f"{(reserved - total) / _MIB:.0f} MiB are reserved and not in use (fragmentation): call "
            "runtime.configure_allocator() before CUDA starts."
        )
