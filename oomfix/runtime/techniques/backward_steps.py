"""The optimizer's step inside backward: each parameter is updated, and its gradient freed, when that is complete."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

active: list[object] = []
"""One entry for each `optimizer_in_backward` that is entered: what every backward asks without calling anything."""


@contextmanager
def optimizer_in_backward(*optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Gradients then never exist all at once. Put it around the one backward that completes the gradients: with
    accumulation around the last of a window. There is no `step` and no `zero_grad` to call afterwards::

        for number, (x, y) in enumerate(micro_batches, start=1):
            loss = criterion(model(x), y) / len(micro_batches)
            with runtime.optimizer_in_backward(optimizer) if number == len(micro_batches) else nullcontext():
                loss.backward()

    Parameters that hold a gradient of an earlier backward and got none in this one are stepped at the end. State,
    `state_dict` and learning rate schedulers of the optimizers are as with `optimizer.step()`, and so, bitwise,
    are the updates.

    What it saves shrinks with accumulation: the gradients of a window exist before its last backward begins, and
    what is left is that the peak of that backward is not on top of them. For batches that
    `memory.forward_backward` splits, call `memory.step` instead; inside the context it runs batches whole.

    Incompatible with it: clipping by the norm of all gradients, a GradScaler (fp16), gradients that processes
    exchange after backward (DDP, FSDP), and windows of `memory.accumulate`. All are refused inside, but for a
    `clip_grad_norm_` of your own: behind the context it finds no gradients, and returns 0.

    Args:
        optimizers: every optimizer whose parameters are to be stepped.

    Raises:
        TypeError: not a torch optimizer, or one that needs all its gradients at once (LBFGS).
        RuntimeError: several processes train together; a GradScaler scales the loss inside; a parameter gets a second
            gradient after its step (two backwards in one context, or a retry after out of memory); the optimizer keeps
            counts per group, which stepping parameters one at a time would change. Parameters stepped before the error
            stay stepped: go back to a checkpoint.

    Parameters that several of the optimizers hold are stepped by each of them, in the order given.

    It saves where gradients are at the peak, in training with few activations: GPT-2 124M on one sample of 128 tokens
    peaks at 1.91 GiB instead of 2.34, and not at all at batch 16 of 1024 tokens (simulated A100); on a CPU a smaller
    version takes 1.09 times as long (bench/results/techniques-cpu.md).

    Source: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"; torch's hooks
    behind gradient accumulation.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                f"optimizers: got {type(optimizer).__name__}, expected torch optimizers that update each parameter "
                "by its own gradient"
            )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_world_size() > 1:
            raise RuntimeError(
                "optimizer_in_backward: several processes train together, and a gradient is complete only after they "
                "have exchanged it; call optimizer.step() after backward"
            )
    stepped: set[torch.Tensor] = set()
    places: dict[torch.Tensor, list[tuple[torch.optim.Optimizer, int]]] = {}
    for optimizer in dict.fromkeys(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                places.setdefault(parameter, []).append((optimizer, index))

    def step(parameter: torch.Tensor) -> None:
        if parameter in stepped:
            raise RuntimeError(
                "optimizer_in_backward: a parameter got a gradient after it was stepped; one context is for one "
                "backward. Some parameters hold this step already: load a checkpoint, or start again."
            )
        stepped.add(parameter)
        for optimizer, index in places[parameter]:
            _step_alone(optimizer, index, parameter)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        for parameter in places
        if parameter.requires_grad
    ]
    active.append(stepped)
    try:
        with _no_scale():
            yield
        for parameter in places:
            if parameter.grad is not None:
                step(parameter)
    finally:
        active.pop()
        for handle in handles:
            handle.remove()


def check_gradients_are_final(scaled: bool, clipped: bool, windowed: bool) -> None:
    """Refuse a backward inside of `optimizer_in_backward` whose gradients are not what a step may take yet.

    Args:
        scaled: they are those of a loss that a scaler has multiplied.
        clipped: they are to be clipped before the step.
        windowed: they belong to an accumulation window.

    Raises:
        RuntimeError: one of these inside of the context.
    """
    reasons = {
        "multiplied by the loss scale (precision fp16)": scaled,
        "clipped by the norm of all (clip_norm)": clipped,
        "weighed when their accumulation window closes": windowed,
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        raise RuntimeError(
            f"optimizer_in_backward: gradients are {' and '.join(why)}, and it steps before that; call "
            "memory.step(optimizer) after backward instead"
        )


@contextmanager
def _no_scale() -> Iterator[None]:
    """Context in which a loss is not scaled: its gradients would be stepped with before they are unscaled."""
    scale = torch.amp.GradScaler.scale

    def refused(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise RuntimeError(
                "optimizer_in_backward: a GradScaler multiplies the loss, and gradients are stepped with before it can "
                "unscale them; use bf16 or fp32, or scaler.step(optimizer) after backward instead"
            )
        return scale(scaler, outputs)

    torch.amp.GradScaler.scale = refused  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def _step_alone(optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor) -> None:
    """One step of `optimizer` in which `parameter`, of the group at `index`, is all there is."""
    groups = optimizer.param_groups
    alone: dict[str, Any] = {**groups[index], "params": [parameter]}
    optimizer.param_groups = [alone]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    changed = [key for key, value in alone.items() if key != "params" and value is not groups[index].get(key)]
    if changed:
        raise RuntimeError(
            f"optimizer_in_backward: {type(optimizer).__name__} changes {', '.join(changed)} of its parameter groups "
            "in every step, so it cannot step parameters one at a time"
        )
