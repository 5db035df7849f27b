"""Where the samples of a tensor stand: in its first dimension, or behind time steps, as recurrent networks take them.

`nn.LSTM`, `nn.GRU` and `nn.Transformer` take [steps, samples, ...] unless they are told otherwise. Targets of all steps
are often flat then, [steps * samples], and lengths, masks of padding and classes have their samples first. Where inputs
are [samples, steps], flat targets are folded: [samples * steps], the steps of a sample side by side.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch

Reading = Literal["samples", "views", "steps", "folded", "input"]
Dim = Literal["first", "second", "flat", "folded"]


def samples_behind_steps(tensors: Sequence[torch.Tensor]) -> int | None:
    """How many samples a batch of these tensors has if steps come first; None where they do not look like that."""
    told = [tensor for tensor in tensors if not tensor.is_nested and tensor.dim()]
    first = next((tensor for tensor in told if tensor.dim() > 1), None)
    if first is None or (len(told) == 1 and first.is_floating_point()):
        return None
    steps, samples = first.shape[:2]
    if samples < 2 or steps < 2 or not all(_may_stand_beside(tensor, samples, steps) for tensor in told):
        return None
    return int(samples)


def _may_stand_beside(tensor: torch.Tensor, samples: int, steps: int) -> bool:
    if dim_of(tensor, samples, steps) is not None:
        return True
    # from every step to every step
    return tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] != samples


def dim_of(tensor: torch.Tensor, samples: int, steps: int) -> Dim | None:
    """The dimension that has the samples where steps come first; None: it has none."""
    if tensor.is_nested or not tensor.dim():
        return None
    if tensor.dim() > 1 and tensor.shape[1] == samples:
        return "second"
    if tensor.shape[0] == samples:
        return "first"
    return "flat" if tensor.shape[0] == samples * steps else None


def folded(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """How many samples a batch of these tensors has, and rows of each in what is folded; None where nothing is."""
    told = [tensor for tensor in tensors if not tensor.is_nested and tensor.dim()]
    shape = next((tensor.shape for tensor in told if tensor.dim() > 1), None)
    if shape is None or shape[0] < 2:
        return None
    per_sample = (rows for rows in (shape[1], math.prod(shape[2:])) if rows > 1)
    rows = next((rows for rows in per_sample if any(len(tensor) == shape[0] * rows for tensor in told)), None)
    return None if rows is None else (shape[0], rows)


def is_open(tensor: torch.Tensor, samples: int) -> bool:
    """Whether both dimensions may have the samples."""
    return not tensor.is_nested and tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] == samples


def samples_first(tensor: torch.Tensor, dim: Dim, samples: int) -> torch.Tensor:
    """A view [samples, ...] of `tensor`."""
    if dim == "first":
        return tensor
    if dim == "folded":
        return tensor.view(samples, len(tensor) // samples, *tensor.shape[1:])
    return (tensor if dim == "second" else tensor.view(-1, samples, *tensor.shape[1:])).transpose(0, 1)


def as_it_was(rows: torch.Tensor, dim: Dim) -> torch.Tensor:
    """Some rows of `samples_first` in the order of the tensor that they are of; a copy, unless samples came first."""
    if dim == "first":
        return rows
    if dim == "folded":
        return rows.flatten(0, 1)
    turned = rows.transpose(0, 1).contiguous()
    return turned if dim == "second" else turned.flatten(0, 1)


def by_row(tensor: torch.Tensor, rows: int, steps_first: bool) -> tuple[torch.Tensor, Dim] | None:
    """A view [rows, ...] of what a forward has made of so many samples, and where these stood; None: it has no rows.

    What belongs to one sample may be folded into the same dimension: its heads, its tokens.
    """
    if not tensor.dim() or not tensor.numel():
        return None
    if steps_first and tensor.dim() > 1 and tensor.shape[1] == rows:
        return tensor.transpose(0, 1), "second"
    if tensor.shape[0] % rows:
        return None
    if steps_first and tensor.shape[0] != rows:
        return samples_first(tensor, "flat", rows), "flat"
    return tensor.reshape(rows, -1), "first"
