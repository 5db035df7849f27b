"""Activations in host memory: what forward saves for backward waits there, off the card."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from oomfix.runtime.compat import left_by_compiler

_MIB = 2**20
_COPIES_IN_FLIGHT = 2


@contextmanager
def offload_activations(min_bytes: int = _MIB) -> Iterator["HostMemory"]:
    """Keep what is saved for backward in host memory (page-locked on CUDA) while the context is active.

    Put it around the forward; backward may run after it. A tensor that several operations save is copied once.
    On CUDA, copies to the host run beside the computation, at most two at a time; copies back do not.

    Args:
        min_bytes: tensors smaller than this stay on the device (bytes).

    Yields:
        The memory they wait in, whose `moved_bytes` says how much has left the device so far.

    Raises:
        ValueError: `min_bytes` is negative.

    Parameters, views of them, their copies made by autocast, expanded tensors and tensors on the host are
    never moved. Gradients are bitwise those without. An error in forward or backward leaves nothing behind:
    the context can be entered again at once. Inside checkpointed blocks only the inputs of blocks are saved,
    and so only they are moved.

    ViT-B/16 at batch 64 peaks at 1.67 GiB instead of 5.69, with 4.60 GiB copied each way in every step; together with
    checkpointing 0.49 GiB are copied for a peak of 1.83 (simulated A100, bench/results/techniques-cpu.md). It pays
    where the copies take less time than computing again.

    Source: the hooks of torch.autograd.graph.save_on_cpu, which moves parameters too, and every use apart.
    """
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise ValueError(f"min_bytes: got {min_bytes!r}, expected a number of bytes, at least 0")
    host = HostMemory(min_bytes)
    try:
        # torch 2.6 fails when it compiles them, later ones only waste time
        with saved_tensors_hooks(left_by_compiler(host.pack), left_by_compiler(_unpack)):
            yield host
    finally:
        host.finish_copies()


class _Parked:
    """A tensor in host memory, its device, and the event after which it has arrived there (None: it has)."""

    __slots__ = ("__weakref__", "arrived", "device", "host")

    def __init__(self, host: torch.Tensor, device: torch.device, arrived: torch.cuda.Event | None) -> None:
        self.host, self.device, self.arrived = host, device, arrived

    def restored(self) -> torch.Tensor:
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        return torch.empty_like(self.host, device=self.device, pin_memory=False).copy_(self.host, non_blocking=True)


class _Kept:
    """A tensor that stays on the device.

    It is cut off from its graph: an operation that saves its own output would keep itself alive for ever. And torch
    looks for writes in place only where nothing packs what it saves.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version

    def restored(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"offload_activations: a tensor {list(self.tensor.shape)} of {self.tensor.dtype} that backward needs "
                "was written in place after forward; run backward before the write, or write to a copy"
            )
        return self.tensor


class HostMemory:
    """Where the tensors of one context go.

    Attributes:
        moved_bytes: what has left the device (bytes); all of it is off the device when forward ends.
    """

    def __init__(self, min_bytes: int) -> None:
        self.moved_bytes = 0
        self._min_bytes = min_bytes
        # the storage stands beside the copy: the address of a dead one may have been given to another
        self._parked: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Parked]]] = {}
        self._in_flight: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pack(self, tensor: torch.Tensor) -> _Kept | _Parked:
        """What autograd keeps instead of `tensor`."""
        if not is_movable(tensor) or nbytes(tensor) < self._min_bytes or is_weight(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in self._parked:
            its_storage, its_copy = self._parked[key]
            parked = its_copy()
            if parked is not None and its_storage() is storage:
                return parked
        parked = self._copied(tensor)
        self.moved_bytes += nbytes(tensor)
        self._parked[key] = (weakref.ref(storage), weakref.ref(parked))
        return parked

    def finish_copies(self) -> None:
        """Let go of the tensors that are being copied; what comes next on their devices waits for the copies."""
        while self._in_flight:
            self._finish_oldest()
        self._parked.clear()

    def _copied(self, tensor: torch.Tensor) -> _Parked:
        tensor = tensor.detach()
        on_cuda = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=on_cuda)
        if not on_cuda:
            return _Parked(host.copy_(tensor), tensor.device, None)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            arrived = stream.record_event()
        # held, not recorded on the stream: memory is then reused in the same order in every run
        self._in_flight.append((tensor, arrived))
        if len(self._in_flight) > _COPIES_IN_FLIGHT:
            self._finish_oldest()
        return _Parked(host, tensor.device, arrived)

    def _finish_oldest(self) -> None:
        tensor, arrived = self._in_flight.popleft()
        torch.cuda.current_stream(tensor.device).wait_event(arrived)


def _unpack(packed: _Kept | _Parked) -> torch.Tensor:
    return packed.restored()


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one that can go to the host: dense, and on a device."""
    return tensor.layout is torch.strided and not tensor.is_nested and _on_accelerator(tensor)


def _on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that moving `tensor` can save; 0 for an expanded one, whose copy would be larger than itself."""
    nbytes = tensor.numel() * tensor.element_size()
    return 0 if nbytes > tensor.untyped_storage().nbytes() else nbytes


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter, a view of one, or what autocast has made of one and keeps."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), nn.Parameter)
