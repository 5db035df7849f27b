"""Training steps of scripts that update their parameters without an optimizer of torch's."""

from collections.abc import Callable
from typing import Any

import torch

from oomfix.profile.patches import Patches
from oomfix.profile.trace import MemoryTrace


class StepsByHand:
    """Sees the steps of `p.data.add_(p.grad, alpha=-lr)` and of optimizers that are no `torch.optim.Optimizer`.

    Nothing marks where such a step ends. It has ended where, after a backward pass, a model's next forward begins.

    Args:
        patches: where torch is patched.
        trace: where the steps are written down.
        alone: whether the script has built no optimizer of torch's, whose steps would count instead.
        stepped: called after every step.
    """

    def __init__(
        self, patches: Patches, trace: MemoryTrace, alone: Callable[[], bool], stepped: Callable[[], None]
    ) -> None:
        self._trace, self._alone, self._stepped = trace, alone, stepped
        self._backward_done = False
        backward = torch.autograd.backward

        def backward_and_note(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._trace.claim_gradients()
            self._backward_done = True

        patches.set(torch.autograd, backward=backward_and_note)
        trace.before_forward = self._forward_begins

    def _forward_begins(self) -> None:
        if self._backward_done and self._alone():
            self._trace.end_step(0)
            self._stepped()
        self._backward_done = False
