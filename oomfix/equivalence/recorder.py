"""Records what a training script trains, without a change to it: its optimizer steps, and the losses of each."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from oomfix.equivalence.comparison import SKETCH_LENGTH, Recording, Step
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.manager import MemoryManager
from oomfix.runtime.state.running_statistics import uses_batch_statistics


class Recorder:
    """Context in which every optimizer step of the process is recorded, in any thread and by any script.

    The weights of a step, a vector that may be long, are kept as a hash of their bits and as a sketch: each weight is
    added to or taken from one of `SKETCH_LENGTH` sums, by signs that are the same in every run. The square of the
    distance between two sketches is that between the vectors on average over the signs, within a few percent
    (Alon, Matias, Szegedy: The space complexity of approximating the frequency moments, 1996).

    Random generators of the script are left alone.

    Args:
        on_step: called with each step as soon as it is made.
    """

    def __init__(self, on_step: Callable[[Step], object] = lambda step: None) -> None:
        self.steps: list[Step] = []
        self.seen: set[str] = set()
        self.calls_in_parts = 0
        self._on_step = on_step
        self._optimizers: dict[int, tuple[int, torch.optim.Optimizer]] = {}
        self._losses: list[torch.Tensor] = []
        self._depth = 0
        self._signs: dict[tuple[int, int], torch.Tensor] = {}
        self._undo: list[Callable[[], object]] = []

    @property
    def recording(self) -> Recording:
        """What was recorded so far; without files, which only a process as a whole can tell."""
        return Recording(tuple(self.steps), frozenset(self.seen), self.calls_in_parts)

    def __enter__(self) -> Recorder:
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)
        self._undo.append(register_module_forward_pre_hook(self._forward).remove)
        self._wrap(torch.Tensor, "backward", self._around_backward)
        self._wrap(torch.autograd, "backward", self._around_backward)
        self._wrap(torch.amp.GradScaler, "scale", self._around_scale)
        self._wrap(torch.autocast, "__enter__", self._around_autocast)
        self._wrap(MemoryManager, "forward_backward", self._around_forward_backward)
        self._wrap(MemoryManager, "loss", self._around_loss)
        self._wrap(MemoryManager, "backward", self._around_manager_backward)
        self._wrap(Iteration, "run", self._around_iteration)
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(lambda: setattr(owner, name, original))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # the optimizer is kept, so that no other one gets its address
        number = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))[0]
        weights = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        losses = tuple(float(loss) for loss in self._losses)
        self._losses.clear()
        with torch.no_grad():
            step = Step(number, losses, _digest(weights), self._sketch(weights))
        self.steps.append(step)
        self._on_step(step)

    def _sketch(self, weights: list[torch.Tensor]) -> tuple[float, ...]:
        total = torch.zeros(SKETCH_LENGTH, dtype=torch.float64)
        for index, weight in enumerate(weights):
            plain = torch.view_as_real(weight) if weight.is_complex() else weight
            signed = plain.double().flatten() * self._signs_of(index, plain)
            rows = nn.functional.pad(signed, (0, -len(signed) % SKETCH_LENGTH)).view(-1, SKETCH_LENGTH)
            total += rows.sum(0).cpu()
        return tuple(total.tolist())

    def _signs_of(self, index: int, weight: torch.Tensor) -> torch.Tensor:
        key = (index, weight.numel())
        if key not in self._signs:
            generator = torch.Generator().manual_seed(index)
            signs = torch.randint(2, (weight.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
            self._signs[key] = signs.to(weight.device)
        return self._signs[key]

    # -- losses --------------------------------------------------------------------------------------------------

    def _backpropagated(self, loss: object, window: int = 1) -> None:
        """Note a loss, as its share of a window of so many batches."""
        loss = getattr(loss, "_oomfix_unscaled", loss)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone() / window)

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("tensors")
        if not self._depth:
            for loss in first if isinstance(first, tuple | list) else (first,):
                self._backpropagated(loss)
        return self._inside(original, *args, **kwargs)

    def _around_manager_backward(self, original: Callable[..., Any], manager: Any, loss: Any, **kwargs: Any) -> Any:
        self._backpropagated(loss, manager._window.length)
        return self._inside(original, manager, loss, **kwargs)

    def _around_loss(self, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        state = None if "random draws" in self.seen else _random_state()
        result = self._inside(original, manager, *args, **kwargs)
        if state is not None and not all(map(torch.equal, state, _random_state())):
            self.seen.add("random draws")
        return result

    def _around_forward_backward(self, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._around_loss(original, manager, *args, **kwargs)
        loss = result.get("loss") if isinstance(result, dict) else result
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        self._backpropagated(loss, manager._window.length)
        return result

    def _inside(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what may backpropagate parts or scaled copies of a loss that has been noted."""
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _around_scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            scaled._oomfix_unscaled = outputs  # type: ignore[attr-defined]
        return scaled

    # -- what makes runs differ ----------------------------------------------------------------------------------

    def _forward(self, module: nn.Module, inputs: object) -> None:
        if uses_batch_statistics([module]):
            self.seen.add("batch statistics")

    def _around_autocast(self, original: Callable[..., Any], context: Any) -> Any:
        # a device that is not there disables its autocast
        if context._enabled:
            self.seen.add("mixed precision")
        return original(context)

    def _around_iteration(self, original: Callable[..., Any], iteration: Any, parts: int, *args: Any) -> Any:
        self.calls_in_parts += parts > 1
        return original(iteration, parts, *args)


def _digest(weights: list[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for weight in weights:
        plain = weight.cpu().contiguous()
        digest.update(repr((plain.dtype, tuple(plain.shape))).encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _random_state() -> tuple[torch.Tensor, ...]:
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return (torch.get_rng_state(), *on_cuda)
