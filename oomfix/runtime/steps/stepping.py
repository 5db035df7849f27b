"""Stepping an optimizer: what is refused, and clipping after unscaling."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from oomfix.runtime.steps.loss_scaling import LossScaler
from oomfix.runtime.steps.optimizers import parameters_of


def check_norm(clip_norm: Any) -> None:
    """Refuse what is no gradient norm.

    Raises:
        TypeError: `clip_norm` is no number.
        ValueError: it is not above 0.
    """
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, Real):
        raise TypeError(f"clip_norm: got {clip_norm!r}, expected a norm above 0, or None")
    if math.isnan(clip_norm) or clip_norm <= 0:
        raise ValueError(f"clip_norm: got {clip_norm!r}, expected a norm above 0, or None")


def clip_and_step(
    optimizer: Any,
    scaler: LossScaler,
    clip_norm: float | None,
    preset_norm: float | None,
    schedulers: Sequence[Any],
) -> None:
    """Unscale, clip, step; schedulers follow once it is known that the optimizer did.

    Args:
        optimizer: any object with `step`; wrappers are asked for the optimizer inside them.
        scaler: disabled unless gradients come from fp16.
        clip_norm: the caller's largest gradient norm.
        preset_norm: the preset's, which counts only where the caller does not clip.
        schedulers: stepped after the optimizer, or just before its next step where that is when it is known.
    """
    if clip_norm is None and preset_norm is not None and not scaler.unscaled_by_user(optimizer):
        clip_norm = preset_norm
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), float(clip_norm))
    scaler.step(optimizer, schedulers=schedulers)
