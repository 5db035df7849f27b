"""A simulated card: counts the bytes that live tensors hold and refuses what does not fit.

Works on real CPU tensors, so that running out of memory, and recovering from it, is tested by memory that is
really held: by graphs, gradients, optimizer state, or by the frames of an exception that nobody let go of.
"""

import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.out_of_memory import refusal


class SimulatedCard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which every new tensor storage counts against a budget, on the CPU as it would on a card.

    Each storage is counted once, however many views share it, from the operation that made it to the moment
    the last reference to it goes: gradients, tensors saved for backward, optimizer state and tensors held by
    the frames of a live exception included. Tensors that exist before are counted after `track`. Sizes are
    exact, not rounded to an allocator's blocks; scratch memory inside a kernel is not seen.

    An allocation over the budget raises `OutOfMemoryError`, worded as torch words it, and what the operation
    returned is dropped uncounted. Side effects of that operation stay (random numbers drawn, running
    statistics updated), which is more than a real card leaves behind: recovery is tested on the harder case.

    Storages that die after the context is left are still subtracted; new ones are no longer seen.

    Args:
        budget_bytes: bytes the card can hold; None: no limit. May be changed at any time.

    Attributes:
        budget_bytes: as above.
        allocations: number of storages allocated so far inside the context.

    Source: one weak reference per storage, as in torch.distributed._tools.mem_tracker.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes: got {budget_bytes!r}, expected at least 0 bytes, or None")
        self.budget_bytes = budget_bytes
        self.allocations = 0
        self._live: dict[int, _Storage] = {}
        self._current_bytes = 0
        self._peak_bytes = 0
        self._fail_at: int | None = None

    @property
    def current_bytes(self) -> int:
        """Bytes of all live storages that were allocated inside the context or given to `track`."""
        self._measure_again()
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once since the start or the last `reset_peak`."""
        self._measure_again()
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Let the peak start again from what is live now."""
        self._peak_bytes = self.current_bytes

    def fail_at(self, allocation: int) -> None:
        """Refuse one allocation whatever the budget: the first from now is 1. The later ones succeed again.

        Raises:
            ValueError: `allocation` is below 1.
        """
        if allocation < 1:
            raise ValueError(f"allocation: got {allocation!r}, expected a whole number of at least 1")
        self._fail_at = self.allocations + allocation

    def track(self, *things: object) -> None:
        """Count tensors that exist already. Never refuses: they are there, the next allocation may fail.

        Args:
            things: tensors, modules (parameters, buffers, gradients), optimizers (their state), and lists,
                tuples and mappings of these. Anything else is ignored.
        """
        for thing in things:
            if isinstance(thing, torch.Tensor):
                self._count_existing(thing)
            elif isinstance(thing, torch.nn.Module):
                self.track(*thing.parameters(), *thing.buffers())
            elif isinstance(thing, torch.optim.Optimizer):
                self.track(*thing.state.values())
            elif isinstance(thing, Mapping):
                self.track(*thing.values())
            elif isinstance(thing, list | tuple):
                self.track(*thing)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in frames that hold its arguments, and a traceback holds these
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        refused_bytes = self._admit(func, result)
        if refused_bytes is not None:
            # the traceback keeps this frame alive: it must not hold what a real card would not hold
            del result, args, kwargs
            raise OutOfMemoryError(self._message(refused_bytes))
        return result

    def _admit(self, func: Any, result: object) -> int | None:
        """Count what an operation allocated; the bytes of the first allocation that is refused, if one is."""
        for storage, is_alias in _storages(func, result):
            known = self._live.get(storage._cdata)
            if known is None and is_alias:
                continue
            grown_bytes = storage.nbytes() - (known.nbytes if known else 0)
            admitted = grown_bytes <= 0 or self._may_allocate(grown_bytes)
            if known is not None:
                # a resize in place has happened, admitted or not: it cannot be dropped
                self._resize(known, storage.nbytes())
            elif admitted:
                self._count(storage)
            if not admitted:
                return grown_bytes
        return None

    def _may_allocate(self, nbytes: int) -> bool:
        self.allocations += 1
        return self.allocations != self._fail_at and self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        if self.budget_bytes is None or self._current_bytes + nbytes <= self.budget_bytes:
            return True
        self._measure_again()
        return self._current_bytes + nbytes <= self.budget_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata

        def freed(_: object) -> None:
            self._current_bytes -= self._live.pop(address).nbytes

        self._live[address] = _Storage(weakref.ref(storage, freed), storage.nbytes())
        self._grow(storage.nbytes())

    def _count_existing(self, tensor: torch.Tensor) -> None:
        if not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._count(storage)
        if tensor.is_leaf and tensor.grad is not None:
            self._count_existing(tensor.grad)

    def _resize(self, known: "_Storage", nbytes: int) -> None:
        if nbytes != known.nbytes:
            grown, known.nbytes = nbytes - known.nbytes, nbytes
            self._grow(grown)

    def _grow(self, nbytes: int) -> None:
        self._current_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _measure_again(self) -> None:
        # a storage can be resized directly, without an operation that passes through here
        for known in list(self._live.values()):
            storage = known.reference()
            if storage is not None:
                self._resize(known, storage.nbytes())

    def _message(self, nbytes: int) -> str:
        in_use = self._current_bytes
        return refusal(nbytes, in_use if self.budget_bytes is None else self.budget_bytes, in_use, in_use)


class _Storage:
    """A live storage: a weak reference to it and the bytes counted for it."""

    __slots__ = ("nbytes", "reference")

    def __init__(self, reference: "weakref.ref[torch.UntypedStorage]", nbytes: int) -> None:
        self.reference = reference
        self.nbytes = nbytes


@cache
def _returns_aliases(func: Any) -> tuple[bool, ...]:
    """For each value that an operation returns, whether it shares the storage of an argument."""
    # these bring a storage that was filled outside the dispatcher, as torch.tensor and deepcopy do
    if func.overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten.set_):
        return (False,)
    return tuple(value.alias_info is not None for value in func._schema.returns)


def _storages(func: Any, result: object) -> Iterator[tuple[torch.UntypedStorage, bool]]:
    """The storages in the result of an operation, each with whether it is an argument's."""
    aliases = _returns_aliases(func)
    outputs: Any = (result,) if len(aliases) == 1 else result or ()
    for output, is_alias in zip(outputs, aliases, strict=True):
        for tensor in output if isinstance(output, list | tuple) else (output,):
            if _has_storage(tensor):
                yield tensor.untyped_storage(), is_alias


def _has_storage(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
