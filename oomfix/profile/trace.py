"""What a block of code allocates and frees on a card: every storage, with its size, purpose, module and line."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomfix.profile.allocator import Block, CachingAllocator, rounded, segment_bytes
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.out_of_memory import refusal
from oomfix.profile.patches import Patches
from oomfix.profile.user_code import user_line

Scratch = Callable[[Any, tuple[Any, ...], Any], int]


class Storage:
    """One allocation, from birth to death.

    Attributes:
        nbytes: what the allocator handed out (bytes), `requested_bytes` what was asked for.
        category: "weights", "inputs", "gradients", "optimizer state" or "workspaces" where that is known, else "".
        phase: "setup", "forward", "backward", "optimizer" or "between" (steps), when it was born.
        operation, module, shape, dtype, line: who made it, and what; `line` is (file, line number) or None.
        born, died: positions in the trace's events; died is None while it lives.
    """

    __slots__ = (
        "block", "born", "category", "died", "dtype", "line", "module", "nbytes", "operation", "phase",
        "requested_bytes", "shape",
    )  # fmt: skip

    def __init__(self, block: Block, requested_bytes: int, born: int) -> None:
        self.block: Block | None = block
        self.nbytes = block.nbytes
        self.requested_bytes = requested_bytes
        self.born = born
        self.died: int | None = None
        self.category = self.phase = self.operation = self.module = ""
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype | None = None
        self.line: tuple[str, int] | None = None


class _Thread(threading.local):
    """What one thread is at."""

    def __init__(self) -> None:
        self.running = 0
        self.modules: list[str] = []


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which every new tensor storage is put into a simulated allocator and written down.

    Each storage counts once, however many views share it, from the operation that made it until its last reference
    goes. Works on fake tensors, and on real ones of any device.

        with MemoryTrace() as trace:
            train_one_step()
        trace.allocator.peak_allocated_bytes, trace.peak_phase
        largest = max(trace.storages, key=lambda storage: storage.nbytes)
        largest.nbytes, largest.operation, largest.module, largest.line

    Args:
        allocator: where the memory comes from; default: one without a limit. If it refuses, the operation raises
            `torch.OutOfMemoryError`.
        counts: which tensors are on the card; default: all that have a storage.
        scratch: bytes that an operation needs only while it runs, from (operation, arguments, result).
        keeps: bytes that an operation makes a library hold for good, from (operation, whether in backward).

    Attributes:
        storages: every storage so far; `events` holds their indices in order, i at birth and ~i at death.
        phases: (position in `events`, phase) at every change.
        reserved: (position in `events`, bytes that the allocator has reserved) at every change.
        peak_event: the position in `events` right after the peak was reached, `peak_phase` the phase it was in.
        steps: (position in `events`, bytes live, number of the optimizer) after every optimizer step.
        start_event: the position in `events` from which on peaks, steps and phases count.
        end_event: the position up to which they count; None: to the last.
        refused_event: the position at the last request that was refused; None: none was.
        context_bytes: what a CUDA context holds beside the allocator, for the words of a refusal.
        before_forward: called where a model's forward begins, those of its submodules and of backwards left out.
        forward_ends: the positions in `events` where such forwards ended.
        run_forward: runs such a forward, as `call(module, *args, **kwargs)`.

    Source: one weak reference per storage, as in torch.distributed._tools.mem_tracker.
    """

    def __init__(
        self,
        allocator: CachingAllocator | None = None,
        counts: Callable[[torch.Tensor], bool] = lambda tensor: True,
        scratch: Scratch | None = None,
        keeps: Callable[[Any, bool], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator or CachingAllocator()
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[tuple[int, str]] = [(0, "setup")]
        self.reserved: list[tuple[int, int]] = [(0, 0)]
        self.start_event = self.peak_event = 0
        self.end_event: int | None = None
        self.refused_event: int | None = None
        self.context_bytes = 0
        self.peak_phase = "setup"
        self._thread = _Thread()
        self._lock = threading.RLock()
        self.before_forward: Callable[[], None] = lambda: None
        self.run_forward: Callable[..., Any] = lambda call, module, args, kwargs: call(module, *args, **kwargs)
        self.forward_ends: list[int] = []
        self._peak_bytes = 0
        self.steps: list[tuple[int, int, int]] = []
        self._optimizers: dict[int, int] = {}
        self._counts, self._scratch, self._keeps = counts, scratch, keeps
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._names: dict[int, str] = {}
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._handles: list[Any] = []
        self._patches = Patches()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def start_again(self) -> None:
        """Measure peaks and steps anew from here; what is on the card stays there."""
        self.allocator.reset_peaks()
        self._peak_bytes = self.allocator.allocated_bytes
        self.start_event = self.peak_event = len(self.events)
        self.peak_phase = self.phase
        self.steps.clear()

    def end_here(self) -> None:
        """What is freed or made from here on, as a stopped script unwinds, is no part of the course of the run."""
        self.end_event = len(self.events)

    # what is what

    def watch(self, model: nn.Module) -> None:
        """Count a model's parameters, buffers and gradients, and name its modules in what follows."""
        self._watched.add(model)
        root = type(model).__name__
        for name, module in model.named_modules():
            self._names.setdefault(id(module), f"{root}.{name}" if name else root)
        self.claim(_in_order_of_move(model), "weights")
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._parameters[id(parameter)] = weakref.ref(parameter)
        self.claim_gradients()

    def claim(self, tensors: Iterable[object], category: str) -> None:
        """Say what tensors are for; those that no operation of the trace made are counted from now on."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and self._on_card(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live and not self._count(tensor, category):
                    raise OutOfMemoryError(self._refusal(storage.nbytes()))
                if storage._cdata in self._live:
                    self.storages[self._live[storage._cdata][1]].category = category

    def claim_gradients(self) -> None:
        """Find the gradients of all parameters seen so far."""
        for reference in list(self._parameters.values()):
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self.claim((parameter.grad,), "gradients")

    def claim_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Find an optimizer's parameters and state. Scalars of the state live on the CPU, as torch makes them."""
        for group in optimizer.param_groups:
            self.claim(group["params"], "weights")
            for parameter in group["params"]:
                self._parameters.setdefault(id(parameter), weakref.ref(parameter))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                # LBFGS keeps lists of directions
                self.claim(tree_leaves(state), "optimizer state")

    def enter_phase(self, phase: str) -> None:
        """From here on storages are born in `phase`."""
        if self.phases[-1][1] != phase:
            self.phases.append((len(self.events), phase))

    def end_step(self, optimizer: int) -> None:
        """A training step ends here, of the optimizer of this number."""
        self.steps.append((len(self.events), self.allocator.allocated_bytes, optimizer))
        self.enter_phase("between")

    @property
    def phase(self) -> str:
        """The phase that is under way."""
        return self.phases[-1][1]

    @property
    def running(self) -> int:
        """How many operations of this thread are under way, above 0 inside an operation's own code."""
        return self._thread.running

    # the mode

    def __enter__(self) -> "MemoryTrace":
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        # not by hooks: code that looks for hooks on modules must find none
        self._patches.set(nn.Module, _call_impl=self._named(nn.Module._call_impl))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._patches.__exit__()
        self.claim_gradients()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in frames that hold its arguments, and a traceback holds these
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # fake tensors are made by one thread at a time
        with self._lock:
            self._thread.running += 1
            try:
                result = self.run(func, args, kwargs)
            finally:
                self._thread.running -= 1
            refused_bytes = self._admit(func, args, result)
        if refused_bytes is not None:
            # the traceback keeps this frame alive: it must not hold what a real card would not hold
            del result, args, kwargs
            raise OutOfMemoryError(self._refusal(refused_bytes))
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; a simulated card answers here what fake tensors cannot."""
        return func(*args, **kwargs)

    def _admit(self, func: Any, args: tuple[Any, ...], result: object) -> int | None:
        """Count what an operation allocated; the bytes of the first request that is refused, if one is."""
        outputs = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        on_card = [output for output in outputs if isinstance(output, torch.Tensor) and self._on_card(output)]
        for tensor in on_card:
            if tensor.untyped_storage()._cdata not in self._live and not self._count(tensor, "", func):
                return tensor.untyped_storage().nbytes()
        # kernels make their results first, then ask their libraries for scratch memory
        return self._admit_scratch(func, args, result) if on_card else None

    def _admit_scratch(self, func: Any, args: tuple[Any, ...], result: object) -> int | None:
        if self._keeps is not None and (kept := self._keeps(func, in_backward())):
            if not self._add(kept, "workspaces", f"{func}", (), None):
                return kept
        if self._scratch is not None and (scratch := self._scratch(func, args, result)):
            if not self._add(scratch, "workspaces", f"{func}", (), None):
                return scratch
            self.remove(len(self.storages) - 1)
        return None

    def _on_card(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and self._counts(tensor)

    def _count(self, tensor: torch.Tensor, category: str, operation: Any = "") -> bool:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == 0:
            return True
        if not self._add(nbytes, category, str(operation), tuple(tensor.shape), tensor.dtype):
            return False
        self.bind(tensor, len(self.storages) - 1)
        return True

    def bind(self, tensor: torch.Tensor, index: int) -> None:
        """Let a storage of the trace be that of `tensor`, and live as long."""
        storage = tensor.untyped_storage()
        address = storage._cdata

        def freed(_: object) -> None:
            self._live.pop(address, None)
            self.remove(index)

        self._live[address] = (weakref.ref(storage, freed), index)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of `tensor`; None where it was not made on the card."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def add_again(self, like: Storage, address: int, small: bool) -> int | None:
        """Put a storage like an earlier one where that one was; its index, or None where the place is taken."""
        block = self.allocator.allocate_at(address, like.nbytes, small)
        if block is None:
            return None
        storage = Storage(block, like.requested_bytes, len(self.events))
        for name in ("category", "operation", "module", "shape", "dtype", "line"):
            setattr(storage, name, getattr(like, name))
        storage.phase = self._current_phase()
        self.storages.append(storage)
        self.events.append(len(self.storages) - 1)
        return len(self.storages) - 1

    def _add(
        self, nbytes: int, category: str, operation: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> bool:
        block = self.allocator.allocate(nbytes)
        if block is None:
            self.refused_event = len(self.events)
            return False
        storage = Storage(block, nbytes, len(self.events))
        storage.category, storage.operation, storage.shape, storage.dtype = category, operation, shape, dtype
        storage.phase = self._current_phase()
        storage.module = self._thread.modules[-1] if self._thread.modules else ""
        storage.line = user_line(sys._getframe(2))
        self.storages.append(storage)
        self.events.append(len(self.storages) - 1)
        if self.allocator.reserved_bytes != self.reserved[-1][1]:
            self.reserved.append((len(self.events), self.allocator.reserved_bytes))
        if self.allocator.peak_allocated_bytes > self._peak_bytes:
            self._peak_bytes = self.allocator.peak_allocated_bytes
            self.peak_event, self.peak_phase = len(self.events), storage.phase
        return True

    def remove(self, index: int) -> None:
        """A storage of the trace is freed; once."""
        with self._lock:
            storage = self.storages[index]
            if storage.block is not None:
                storage.died = len(self.events)
                self.events.append(~index)
                self.allocator.free(storage.block)
                storage.block = None

    def _current_phase(self) -> str:
        if in_backward():
            self.enter_phase("backward")
        elif self.phase == "backward":
            self.enter_phase("between")
        return self.phase

    def _refusal(self, nbytes: int) -> str:
        allocator = self.allocator
        reserved, allocated = allocator.reserved_bytes, allocator.allocated_bytes
        # torch names the segment that it asked the driver for, not the tensor
        asked, capacity = segment_bytes(rounded(nbytes)), allocator.capacity_bytes or reserved
        context = self.context_bytes
        return refusal(asked, capacity + context, reserved + context, allocated, reserved - allocated)

    # hooks

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.claim_optimizer(optimizer)
        self.claim_gradients()
        self.enter_phase("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.claim_optimizer(optimizer)
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self.end_step(number)

    def _named(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A module's call that says which module is running."""

        def call_named(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._thread.modules and not in_backward()
            if outermost:
                self.before_forward()
                if module not in self._watched:
                    self.watch(module)
                self.enter_phase("forward")
            self._thread.modules.append(self._names.get(id(module)) or type(module).__name__)
            try:
                return self.run_forward(call, module, args, kwargs) if outermost else call(module, *args, **kwargs)
            finally:
                self._thread.modules.pop()
                if outermost:
                    self.forward_ends.append(len(self.events))

        return call_named


def _in_order_of_move(module: nn.Module) -> Iterator[torch.Tensor]:
    """A model's parameters and buffers in the order in which `Module.to` moves them: children first."""
    for child in module.children():
        yield from _in_order_of_move(child)
    yield from (tensor for tensor in module._parameters.values() if tensor is not None)
    yield from (tensor for tensor in module._buffers.values() if tensor is not None)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
