"""Host-side work that a simulated run can do without: files, compilers, initial values of large weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn import parallel as data_parallel

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches

_LARGE_BYTES = 2**20


def lighten_host(patches: Patches, trace: CardTrace) -> None:
    """Leave out what costs time or host memory and makes no difference to the card.

    Checkpoints are not written. `torch.compile` returns its
    argument. Initialisers skip weights of 1 MiB and more: on the host, untouched memory costs nothing.
    """
    _skip_initialisers(patches)
    _no_compiler(patches, trace)
    _wrappers(patches, trace)

    def not_saved(*args: Any, **kwargs: Any) -> None:
        trace.assume("torch.save wrote nothing")

    patches.set(torch, save=not_saved)
    patches.set(torch.Tensor, pin_memory=lambda tensor, *args: tensor)


def _skip_initialisers(patches: Patches) -> None:
    def is_large(tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() >= _LARGE_BYTES

    def skipping(function: Callable[..., Any]) -> Callable[..., Any]:
        def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if is_large(tensor) else function(tensor, *args, **kwargs)

        return initialise

    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            patches.set(init, **{name: skipping(getattr(init, name))})
    for name in ("normal_", "uniform_"):
        patches.set(torch.Tensor, **{name: skipping(getattr(torch.Tensor, name))})


def _no_compiler(patches: Patches, trace: CardTrace) -> None:
    def compile(model: Any = None, **options: Any) -> Any:
        trace.assume("torch.compile was left out: the run is reckoned as eager")
        return model if model is not None else lambda function: function

    patches.set(torch, compile=compile)
    patches.set(nn.Module, compile=lambda module, *args, **kwargs: compile(module) and None)


def _wrappers(patches: Patches, trace: CardTrace) -> None:
    forward = data_parallel.DataParallel.forward

    def alone(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        trace.assume("nn.DataParallel ran on one card")
        return self.module(*inputs, **kwargs) if self.device_ids else forward(self, *inputs, **kwargs)

    patches.set(data_parallel.DataParallel, forward=alone)
