"""What one run of a forward on a few rows of a batch, or on a part of them, leaves for a comparison."""

from dataclasses import dataclass
from typing import Any

import torch

from oomfix.runtime.state.drawing_calls import Shape
from oomfix.runtime.verification.divisors import Divisor
from oomfix.runtime.verification.left_attributes import Left
from oomfix.runtime.verification.watching import Watch


@dataclass
class OneRun:
    """What one run showed; see `Evidence` and `probe.Probe`.

    Attributes:
        drawn_shapes: see `whole_draws.DrawnShapes`; empty in a light run.
        added: containers of the program that were only added to, a record of what went by unless they are read.
        functions_tell: the functions called show the same cross entropies and selections as the operations that ran.
    """

    result: Any
    left: Left
    added: Left
    nll_weights: list[float]
    divisors: list[Divisor]
    selected_among: list[int]
    watch: Watch
    calls: int
    differentiates: bool
    terms: list[torch.Tensor]
    drawn_shapes: list[tuple[str, Shape]]
    functions_tell: bool
