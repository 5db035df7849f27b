"""Optimizers that need less memory in their step, or for their state."""

import importlib
from collections.abc import Iterable
from typing import Any, Literal

import torch

from oomfix.runtime import compat
from oomfix.runtime.arguments import shown

Step = Literal["fused", "for-loop", "as it was"]

_EIGHT_BIT = (
    ("bitsandbytes.optim", "AdamW8bit"),
    ("torchao.optim", "AdamW8bit"),
    ("torchao.prototype.low_bit_optim", "AdamW8bit"),
)


def use_lean_step(optimizer: torch.optim.Optimizer) -> Step:
    """Let `optimizer` step without copies of all its parameters, from its next step on.

    On a GPU torch steps all parameters together (`foreach`), with temporary tensors as large as all of them. The
    fused form has none; the loop over parameters those of one parameter at a time. State, checkpoints, schedulers
    and the optimizer object stay.

    Args:
        optimizer: one of torch.optim, before or between steps. Others are left as they are.

    Returns:
        "fused" where the optimizer has that form on the devices and for the types of its parameters; "for-loop"
        where it has none, or is asked for something (`differentiable`, `capturable`) that excludes it;
        "as it was" for optimizers without such a choice.

    Raises:
        TypeError: `optimizer` is not an optimizer.

    The forms differ by rounding. It saves where the step is the peak, in training with few
    activations: GPT-2 124M on one sample of 128 tokens peaks at 2.17 GiB instead of 2.34, and not at all at batch 16
    of 1024 tokens (simulated A100); on a CPU a smaller version takes 0.77 times as long
    (bench/results/techniques-cpu.md).
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: got {shown(optimizer)}, expected a torch optimizer")
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim") or not all("foreach" in group for group in groups):
        return "as it was"
    fused = all(_can_fuse(optimizer, group) for group in groups)
    for group in groups:
        group["foreach"] = False
        if "fused" in group:
            group["fused"] = fused
    if fused:
        _move_step_counts(optimizer)
    return "fused" if fused else "for-loop"


def adamw_8bit(
    parameters: Iterable[Any],
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> torch.optim.Optimizer:
    """AdamW whose state takes 2 bytes per parameter instead of 8, from bitsandbytes or torchao.

    Args:
        parameters: what `torch.optim.AdamW` takes: parameters, or groups of them.
        lr, betas, eps, weight_decay: as for `torch.optim.AdamW`.

    Returns:
        The optimizer of the first package that is installed: bitsandbytes, then torchao. Both keep tensors
        below 4096 numbers in fp32, and save 6 bytes per parameter otherwise.

    Raises:
        ImportError: neither is installed.

    The updates are those of AdamW with quantised state; the loss curve is close, not equal. What it saves and costs has
    not been measured: neither package was installed where the benches ran.

    Source: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization".
    """
    for module_name, class_name in _EIGHT_BIT:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        if hasattr(module, class_name):
            make = getattr(module, class_name)
            made: torch.optim.Optimizer = make(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
            return made
    raise ImportError(
        "adamw_8bit: neither bitsandbytes nor torchao is installed; `pip install bitsandbytes` (CUDA), or use "
        "torch.optim.AdamW with runtime.use_lean_step"
    )


def _can_fuse(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if "fused" not in group or group.get("differentiable") or group.get("capturable"):
        return False
    if not all(parameter.is_floating_point() for parameter in group["params"]):
        return False
    devices = {parameter.device for parameter in group["params"]}
    return all(compat.fuses_on(type(optimizer), device) for device in devices)


def _move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Bring the counts of steps to the parameters, where the fused form reads them; torch makes them on the CPU."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
