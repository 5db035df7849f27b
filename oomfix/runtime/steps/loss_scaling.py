"""Loss scaling for fp16, where gradients outlive the scale that they were made with.

`torch.amp.GradScaler` has one scale, and takes every gradient for one that was multiplied by it, once, since the last
update. Loops with several optimizers break that: the scale changes after the step of one while another still holds
gradients, or gradients that are unscaled already get another backward on top. Here every gradient that is held when
the scale changes, or when another backward begins, is brought to the scale that comes. Scales are powers of two, so
this costs no precision.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from oomfix.runtime import trees
from oomfix.runtime.processes.sharding import own_part
from oomfix.runtime.state.gradients import reached_leaves
from oomfix.runtime.steps.optimizers import ScalerView, has_gradients, parameters_of


class LossScaler(torch.amp.GradScaler):
    """A GradScaler for any number of optimizers, which changes its scale when the next backward begins.

    Until then all optimizers of an iteration are unscaled by the factor that their gradients were scaled with.
    `update` may be called, as for a GradScaler, and need not be.

    Attributes:
        skipped: steps known to have been left out because gradients overflowed. Where the optimizer decides that on
            the device (fused ones), a step is counted when the next one is made: knowing at once would wait for it.
    """

    def __init__(self, device_type: str, enabled: bool) -> None:
        # set up as if enabled, so that `enable` finds everything
        super().__init__(device_type)
        self._enabled = enabled
        self.skipped = 0
        self._update_is_due = False
        self._reached: dict[int, weakref.ref[torch.Tensor]] = {}
        # what torch knows of an optimizer whose gradients are not scaled now: its next update forgets it
        self._unscaled: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # of those, the ones that made a step
        self._unscaled_by_user: weakref.WeakSet[Any] = weakref.WeakSet()
        self._views: weakref.WeakKeyDictionary[Any, ScalerView] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()

    def enable(self) -> None:
        """Scale from now on, with the state that was loaded if one was."""
        self._enabled = True

    def before_backward(self) -> None:
        """Make the update that is due, and bring all gradients that are held to the scale of the coming backward."""
        if not self.is_enabled():
            return
        if self._update_is_due:
            self.update()
        if self._unscaled:
            assert self._scale is not None
            # optimizers may share parameters
            held = {id(p): p for optimizer in self._unscaled for p in parameters_of(optimizer)}
            _multiply(held.values(), self._scale)
            for optimizer in self._unscaled:
                self._per_optimizer_states.pop(id(self._view(optimizer)), None)
            self._unscaled.clear()
            self._stepped.clear()

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or an iterable of tensors, multiplied by the scale."""
        if not self.is_enabled():
            return outputs
        self.before_backward()
        if not isinstance(outputs, torch.Tensor | list | tuple):
            outputs = list(outputs)
        for output in trees.tensors(outputs):
            for leaf in reached_leaves(output):
                if id(leaf) not in self._reached:
                    self._reached[id(leaf)] = weakref.ref(leaf)
        return super().scale(outputs)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of `optimizer` by the scale, unless that was done since the last backward."""
        self._unscaled_by_user.add(optimizer)
        if self.is_enabled() and has_gradients(optimizer):
            self._unscale(optimizer)

    def unscaled_by_user(self, optimizer: Any) -> bool:
        """Whether `unscale_` was called for `optimizer` since its last step."""
        return optimizer in self._unscaled_by_user

    def step(self, optimizer: Any, *args: Any, schedulers: Sequence[Any] = (), **kwargs: Any) -> Any:
        """Unscale the gradients of `optimizer` where that is left to do, and step it unless they overflowed.

        Args:
            optimizer: a torch optimizer, or a wrapper around one.
            args, kwargs: passed on to its `step`.
            schedulers: stepped once it is known that the optimizer was: at once, or just before its next step.

        Returns:
            What its `step` returned; None where it was left out.
        """
        enabled = self.is_enabled()
        if enabled:
            self.settle(optimizer)
        self._unscaled_by_user.discard(optimizer)
        if not enabled or not has_gradients(optimizer):
            result = optimizer.step(*args, **kwargs)
            for scheduler in schedulers:
                scheduler.step()
            return result
        view = self._view(optimizer)
        if optimizer in self._unscaled or not getattr(view, "_step_supports_amp_scaling", False):
            self._unscale(optimizer)
        else:
            self._scale_shared(optimizer)
        made = _Step(schedulers)
        handle = view.register_step_post_hook(made.note)
        try:
            result = super().step(view, *args, **kwargs)
        finally:
            handle.remove()
        self._update_is_due = True
        self._steps[optimizer] = made
        self._note_unscaled(optimizer, view)
        self._stepped.add(optimizer)
        if made.known_now:
            self.settle(optimizer)
        return result

    def settle(self, optimizer: Any) -> None:
        """Count the last step of `optimizer` as made or skipped, and let its schedulers follow."""
        made = self._steps.pop(optimizer, None)
        if made is None:
            return
        if made.overflowed():
            self.skipped += 1
            return
        for scheduler in made.schedulers:
            scheduler.step()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Let the scale follow what the steps since the last update met; without any, it stays."""
        if not self.is_enabled():
            return
        self._update_is_due = False
        if new_scale is None and not any(s["found_inf_per_device"] for s in self._per_optimizer_states.values()):
            return
        self._reached = {key: place for key, place in self._reached.items() if place() is not None}
        elsewhere = {id(p) for optimizer in self._unscaled for p in parameters_of(optimizer)}
        held = [leaf for key, place in self._reached.items() if key not in elsewhere and (leaf := place()) is not None]
        held = [leaf for leaf in held if leaf.grad is not None]
        before = self._scale.clone() if held and self._scale is not None else None
        super().update(new_scale)
        if before is not None and self._scale is not None:
            _multiply(held, self._scale / before)

    def state_dict(self) -> dict[str, Any]:
        """The state after the update that is due. Steps that are not yet known of are waited for."""
        for optimizer in list(self._steps):
            self.settle(optimizer)
        if self._update_is_due:
            self.update()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of another scaler, and forget what the steps so far have met."""
        if not state_dict and not self.is_enabled():
            return
        enabled, self._enabled = self._enabled, True
        try:
            super().load_state_dict(state_dict)
        finally:
            self._enabled = enabled
        self._update_is_due = False
        self._per_optimizer_states.clear()

    def _unscale(self, optimizer: Any) -> None:
        view = self._view(optimizer)
        if self._scale is None:
            raise RuntimeError(
                "its gradients were not scaled for fp16: run the backward through memory.forward_backward or "
                "memory.backward(loss), or choose precision='fp32' or 'bf16'"
            )
        if optimizer in self._unscaled:
            kept = self._unscaled[optimizer]
            found = self._found_now(view) if optimizer in self._stepped else kept["found_inf_per_device"]
            self._per_optimizer_states[id(view)] = {**kept, "found_inf_per_device": _copied(found)}
            return
        self._scale_shared(optimizer)
        super().unscale_(view)
        self._note_unscaled(optimizer, view)
        self._update_is_due = True

    def _found_now(self, view: Any) -> dict[torch.device, torch.Tensor]:
        """Whether unscaled gradients are infinite, by device: behind a step they may have been set to zero."""
        assert self._scale is not None
        one = torch.ones((), dtype=torch.float32, device=self._scale.device)
        return self._unscale_grads_(view, one, torch.zeros_like(one), False)

    def _scale_shared(self, optimizer: Any) -> None:
        """Multiply what another optimizer has unscaled of the gradients of `optimizer`, which will be divided again."""
        elsewhere = {id(p) for other in self._unscaled for p in parameters_of(other)}
        shared = [p for p in parameters_of(optimizer) if id(p) in elsewhere] if elsewhere else []
        if shared and self._scale is not None:
            _multiply(shared, self._scale)

    def _note_unscaled(self, optimizer: Any, view: Any) -> None:
        found = self._per_optimizer_states[id(view)]["found_inf_per_device"]
        self._unscaled[optimizer] = {"stage": OptState.UNSCALED, "found_inf_per_device": _copied(found)}

    def _view(self, optimizer: Any) -> Any:
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        if optimizer not in self._views:
            self._views[optimizer] = ScalerView(optimizer)
        return self._views[optimizer]


def _copied(found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
    """What was found, for torch: `update` adds all of it up in the tensor of the first optimizer."""
    return {device: flag.clone() for device, flag in found.items()}


class _Step:
    """Whether one step was made, and who waits to know.

    Args:
        schedulers: to be stepped if it was.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = schedulers
        self._made = False
        self._found: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def note(self, optimizer: Any, *_: Any) -> None:
        """Hook behind `optimizer.step`: it ran; a fused one holds on the device whether it did anything."""
        self._made = True
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

    def overflowed(self) -> bool:
        """Whether the step was left out; waits for the step itself at most, not for what came after it."""
        if not self._made:
            return True
        if self._copied is not None:
            self._copied.synchronize()
        return self._found is not None and bool(self._found)


def _multiply(leaves: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in (leaf.grad for leaf in leaves):
        if gradient is not None:
            numbers = gradient._values() if gradient.is_sparse else own_part(gradient)
            by_device.setdefault(numbers.device, []).append(numbers)
    with torch.no_grad():
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device))
