"""The optimizer's side: loss scaling, unscaling, clipping, the step, and what became of it."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Stepper:
    """Scales losses and steps optimizers.

    The scale changes at the next backward, not after a step, so that several optimizers of one iteration are
    unscaled by the factor their gradients were scaled with.

    Attributes:
        scaler: the loss scaler; disabled unless gradients come from fp16.
        skipped: steps known to have been left out because gradients overflowed. Where the optimizer decides
            that on the device (fused ones), a step is counted when the next one is made: knowing at once would
            wait for the device.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.skipped = 0
        self._scale_is_due = False
        self._clipped_by_user: weakref.WeakSet[Any] = weakref.WeakSet()
        self._adapters: weakref.WeakKeyDictionary[Any, _Wrapped] = weakref.WeakKeyDictionary()
        self._verdicts: weakref.WeakKeyDictionary[Any, _Overflow] = weakref.WeakKeyDictionary()
        self._schedulers: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def before_backward(self) -> None:
        """Let the scale follow the steps made since the last backward."""
        if self._scale_is_due:
            self._scale_is_due = False
            self.scaler.update()

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of `optimizer` by the scale, for a caller who will clip or read them."""
        self._clipped_by_user.add(optimizer)
        if self.scaler.is_enabled() and _has_gradients(optimizer):
            self.scaler.unscale_(self._adapter(optimizer))

    def step(self, optimizer: Any, clip_norm: float | None, preset_norm: float | None, schedulers: list[Any]) -> None:
        """Unscale, clip, step; schedulers follow once it is known that the optimizer did.

        Args:
            optimizer: any object with `step`; wrappers are asked for the optimizer inside them.
            clip_norm: the caller's largest gradient norm.
            preset_norm: the preset's, which counts only where the caller does not clip.
            schedulers: stepped after the optimizer, or just before its next step where that is when it is known.
        """
        self._settle(optimizer)
        if clip_norm is None and optimizer not in self._clipped_by_user:
            clip_norm = preset_norm
        scaled = self.scaler.is_enabled() and _has_gradients(optimizer)
        if clip_norm is not None:
            if scaled and optimizer not in self._clipped_by_user:
                self.scaler.unscale_(self._adapter(optimizer))
            torch.nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), clip_norm)
        self._clipped_by_user.discard(optimizer)
        if not scaled:
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            return
        self._scaled_step(optimizer, schedulers)

    def _scaled_step(self, optimizer: Any, schedulers: list[Any]) -> None:
        overflow = _Overflow()
        adapter = self._adapter(optimizer)
        handle = adapter.register_step_post_hook(overflow.note)
        try:
            self.scaler.step(adapter)
        finally:
            handle.remove()
        self._scale_is_due = True
        self._verdicts[optimizer] = overflow
        self._schedulers[optimizer] = schedulers
        if overflow.known_now:
            self._settle(optimizer)

    def _settle(self, optimizer: Any) -> None:
        """Count the last step of `optimizer` as made or skipped, and let its schedulers follow."""
        overflow = self._verdicts.pop(optimizer, None)
        if overflow is None:
            return
        schedulers = self._schedulers.pop(optimizer)
        if overflow.happened():
            self.skipped += 1
            return
        for scheduler in schedulers:
            scheduler.step()

    def _adapter(self, optimizer: Any) -> Any:
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        if optimizer not in self._adapters:
            self._adapters[optimizer] = _Wrapped(optimizer)
        return self._adapters[optimizer]


class _Overflow:
    """Whether one step met an overflow."""

    def __init__(self) -> None:
        self._stepped = False
        self._found: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def note(self, optimizer: Any, *_: Any) -> None:
        """Hook behind `optimizer.step`: it ran; a fused one holds on the device whether it did anything."""
        self._stepped = True
        found = getattr(optimizer, "found_inf", None)
        if not isinstance(found, torch.Tensor):
            return
        if found.device.type != "cuda":
            self._found = found.clone()
            return
        self._found = torch.empty((), dtype=found.dtype, pin_memory=True)
        self._found.copy_(found.reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    @property
    def known_now(self) -> bool:
        """Whether asking costs no wait for the device."""
        return self._copied is None

    def happened(self) -> bool:
        """Whether the step was skipped; waits for the step itself at most, not for what came after it."""
        if not self._stepped:
            return True
        if self._copied is not None:
            self._copied.synchronize()
        return self._found is not None and bool(self._found)


class _Wrapped:
    """Shows a wrapper around an optimizer (Lookahead and the like) to the scaler as an optimizer."""

    def __init__(self, wrapper: Any) -> None:
        # weak: this is kept in a table under the wrapper
        self._wrapper = weakref.ref(wrapper)
        self._hook: Any = None

    @property
    def param_groups(self) -> Any:
        return _innermost(self._wrapper()).param_groups

    def step(self) -> None:
        wrapper = self._wrapper()
        assert wrapper is not None
        wrapper.step()
        self._hook(self)

    def register_step_post_hook(self, hook: Any) -> "_Wrapped":
        self._hook = hook
        return self

    def remove(self) -> None:
        self._hook = None


def _innermost(optimizer: Any) -> Any:
    while not hasattr(optimizer, "param_groups"):
        inner = next((getattr(optimizer, n) for n in ("optimizer", "base_optimizer") if hasattr(optimizer, n)), None)
        if inner is None:
            raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected an object with param_groups")
        optimizer = inner
    return optimizer


def parameters_of(optimizer: Any) -> Iterable[torch.Tensor]:
    """Every tensor that `optimizer` (or the optimizer inside a wrapper) updates."""
    return (parameter for group in _innermost(optimizer).param_groups for parameter in group["params"])


def _has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))
