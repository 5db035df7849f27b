"""DistributedDataParallel models around one call: silent while it runs, and averaged once when it is over."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.processes.gradient_averages import average_gradients

# replicas with gradients that were made in an accumulation window and are not averaged yet, in the order of their calls
_waiting: "weakref.WeakKeyDictionary[nn.Module, None]" = weakref.WeakKeyDictionary()


class Replica:
    """One DistributedDataParallel model during one call of a forward.

    While it trains, it exchanges nothing by itself from `enter` to `leave`, so a process may cut its batch as it likes,
    run a forward to check it, and start again after an out-of-memory error, without another one waiting for it. What
    DistributedDataParallel does otherwise is done once: buffers come from the first process before the call, gradients
    are averaged after it.

    Args:
        model: the wrapper.

    Attributes:
        exchanges: the program is not inside `model.no_sync()`.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        refuse_what_is_not_honoured(model)
        self._model = model
        self._needs_buffers = model.require_forward_param_sync
        self._taken_over: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.exchanges = model.require_backward_grad_sync

    @property
    def group(self) -> "dist.ProcessGroup":
        """The processes that hold a replica."""
        return self._model.process_group  # type: ignore[no-any-return]

    def enter(self) -> None:
        """Take over the buffers of the first process where the model would do so, and silence the model."""
        if self._needs_buffers and self._model.broadcast_buffers:
            _broadcast(_buffers(self._model), self.group)
        self._speak(False, False)

    def enter_evaluation(self, around_buffers: Callable[[], AbstractContextManager[None]]) -> None:
        """Let the model take over the buffers of the first process by itself, in its first forward, if it has one.

        Without gradients it does so once, however many pieces there are. A process that evaluates alone, what is
        inside of the wrapper for example, waits for nobody.

        Args:
            around_buffers: makes the context that it does so in.
        """
        take_over: Callable[[], None] = self._model._sync_buffers

        def noted() -> None:
            with around_buffers():
                take_over()
            # as at the end of a forward without gradients, which this one may not reach
            self._model.require_forward_param_sync = False
            self._taken_over = [(buffer, buffer.clone()) for buffer in _buffers(self._model)]

        self._model._sync_buffers = noted  # type: ignore[method-assign]
        self._model.require_backward_grad_sync = False

    def begin_try(self) -> None:
        """Have the buffers that were taken over in a try which failed, and was put back."""
        for buffer, taken_over in self._taken_over:
            buffer.data.copy_(taken_over)

    def leave_evaluation(self) -> None:
        """Give the model its voice back."""
        del self._model._sync_buffers
        self._taken_over = []
        self._model.require_backward_grad_sync = self.exchanges

    def leave(self, synchronised: bool) -> None:
        """Give the model its voice back.

        Args:
            synchronised: its gradients are averaged after this call, so the next one begins with the buffers of the
                first process, as after a backward of the model outside of `no_sync`.
        """
        self._speak(self.exchanges, synchronised)

    def forget_call(self) -> None:
        """Give the model its voice back after a call that failed."""
        self._speak(self.exchanges, self._needs_buffers)

    def _speak(self, gradients: bool, buffers: bool) -> None:
        self._model.require_backward_grad_sync = gradients
        self._model.require_forward_param_sync = buffers

    def wait(self) -> None:
        """Average the gradients later, when the accumulation window closes or its optimizer steps."""
        _waiting[self._model] = None

    def average(self) -> None:
        """Average the gradients over the processes."""
        _average(self._model)


def average_waiting(parameters: Iterable[torch.Tensor]) -> None:
    """Average what an accumulation window left, in every replica that has one of `parameters`."""
    if not _waiting:
        return
    stepped = {id(parameter) for parameter in parameters}
    for model in list(_waiting):
        if any(id(parameter) in stepped for parameter in model.parameters()):
            _average(model)


def refuse_what_is_not_honoured(model: DistributedDataParallel) -> None:
    """Refuse features of DistributedDataParallel that work inside of its own backward.

    Raises:
        RuntimeError: a static graph, a communication hook, mixed precision of its own, or `Join`.
    """
    found = None
    if model.static_graph:
        # it counts the backwards of its first iteration, and would not average at all after a split one
        found = "static_graph=True"
    elif getattr(model, "_comm_hooks", None):
        found = "a communication hook (register_comm_hook)"
    elif getattr(model, "mixed_precision", None) is not None:
        found = "mixed_precision"
    elif model._join_config.enable:
        found = "join(), for processes with different numbers of batches,"
    if found is not None:
        raise RuntimeError(
            f"DistributedDataParallel: {found} works inside of its own backward, which oomfix replaces by one average "
            "after the last micro-batch; do without it, or call loss.backward() by yourself"
        )


def _average(model: Any) -> None:
    _waiting.pop(model, None)
    if dist.get_world_size(model.process_group) == 1:
        return
    ignored = model.parameters_to_ignore
    trained = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    average_gradients(trained, model.process_group)


def _buffers(model: DistributedDataParallel) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.module.named_buffers() if name not in model.parameters_to_ignore]


def _broadcast(tensors: list[torch.Tensor], group: "dist.ProcessGroup") -> None:
    """Give `tensors` the values they have in the first process of `group`, together by dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for some in alike.values():
            together = torch.cat([tensor.reshape(-1) for tensor in some])
            dist.broadcast(together, dist.get_global_rank(group, 0), group=group)
            parts = torch.split(together, [tensor.numel() for tensor in some])
            # through `data`, which leaves their versions alone: this is no write of the forward
            torch._foreach_copy_(
                [tensor.data for tensor in some],
                [part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True)],
            )
