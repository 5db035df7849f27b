"""Whether the step of an optimizer fits into the memory that is left, and a leaner form of it where it does not.

A step that runs out of memory half way has updated some parameters and not others, so it cannot be tried again: what it
needs is foreseen before the first one.
"""

import logging
from typing import Any

import torch

from oomfix.presets import Preset
from oomfix.runtime.processes.sharding import own_part
from oomfix.runtime.report import TechniqueReport
from oomfix.runtime.steps.optimizers import innermost
from oomfix.runtime.techniques.optimizer_choice import use_lean_step

_log = logging.getLogger("oomfix")
_GIB = 2**30

# Copies of all its parameters that an optimizer takes: the state of Adam, made at the first step, and the temporaries
# of a step over all parameters at once (bench/results/techniques-cpu.md).
_STATE = 2
_TEMPORARIES = 2


def make_step_fit(optimizer: Any, preset: Preset) -> TechniqueReport | None:
    """Give `optimizer` a form of its step without copies of all parameters, where the preset asks for it.

    "if-needed" does so where state and temporaries would be more than what the budget leaves on a GPU. An optimizer
    for which the script has chosen a form (`foreach=`, `fused=`) keeps it, and so does one that is not torch's.

    Args:
        optimizer: has gradients, and has not stepped yet.
        preset: with `lean_step` and the budget.

    Returns:
        What was done and why, for a report; None: nothing.
    """
    inner = innermost(optimizer)
    if preset.lean_step == "off" or not isinstance(inner, torch.optim.Optimizer):
        return None
    if any(group.get("foreach") is not None or group.get("fused") is not None for group in inner.param_groups):
        return None
    if preset.lean_step == "on":
        return _lean(inner, f"preset {preset.name} has it on")
    for device, wanted in _step_bytes(inner).items():
        left = bytes_left(device, preset)
        if left is None or wanted <= left:
            continue
        done = _lean(inner, f"its first step needs about {wanted / _GIB:.2f} GiB and {left / _GIB:.2f} GiB are left")
        if done is not None:
            _log.warning(f"{done.of}: {done.because}; it goes on with a {done.name}.")
        return done
    return None


def _lean(optimizer: torch.optim.Optimizer, because: str) -> TechniqueReport | None:
    form = use_lean_step(optimizer)
    if form == "as it was":
        return None
    name = "fused step" if form == "fused" else "step of one parameter at a time"
    return TechniqueReport(name, type(optimizer).__name__, "its first step", because)


def bytes_left(device: torch.device, preset: Preset) -> int | None:
    """Bytes of the budget that no tensor takes yet; None where there is no budget: on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    budget = preset.memory_fraction * (free + torch.cuda.memory_reserved(device))
    if preset.budget_gib is not None:
        budget = min(budget, preset.budget_gib * _GIB)
    return int(budget) - torch.cuda.memory_allocated(device)


def _step_bytes(optimizer: torch.optim.Optimizer) -> dict[torch.device, int]:
    """What the first step takes beyond parameters and gradients, in bytes on each device."""
    wanted: dict[torch.device, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                copies = _TEMPORARIES + (0 if optimizer.state.get(parameter) else _STATE)
                size = copies * own_part(parameter).numel() * parameter.element_size()
                wanted[parameter.device] = wanted.get(parameter.device, 0) + size
    return wanted
