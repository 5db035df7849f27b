"""Host-side work that a simulated run can do without: files, compilers, initial values of large weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.nn import parallel as data_parallel

from oomfix.profile.boundary import CardTrace, onto_the_card
from oomfix.profile.patches import Patches

_LARGE_BYTES = 2**20
_CONVERSIONS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}


def lighten_host(patches: Patches, trace: CardTrace) -> None:
    """Leave out what costs time or host memory and makes no difference to the card.

    `torch.compile`, `torch.jit.script` and `torch.jit.trace` return their argument. Initialisers and changes of type
    skip weights of 1 MiB and more: on the host, untouched memory costs nothing.
    """
    _skip_initialisers(patches)
    _no_compiler(patches, trace)
    _wrappers(patches, trace)
    _skip_conversions(patches)
    patches.set(torch.Tensor, pin_memory=lambda tensor, *args: tensor)


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor's initial values are left out."""
    return tensor.numel() * tensor.element_size() >= _LARGE_BYTES


def _skip_conversions(patches: Patches) -> None:
    """Let `model.half()` and the like on the host give large weights their type, but no values."""

    def skipping(convert: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            on_host = isinstance(tensor, nn.Parameter) and not isinstance(tensor, FakeTensor)
            if on_host and not torch.is_grad_enabled() and is_large(tensor) and tensor.dtype is not dtype:
                return torch.empty_like(tensor, dtype=dtype)
            return convert(tensor, *args, **kwargs)

        return converted

    for name, dtype in _CONVERSIONS.items():
        patches.set(torch.Tensor, **{name: skipping(getattr(torch.Tensor, name), dtype)})
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # `model.to(dtype)` asks for no device
        wanted = args[1] if len(args) > 1 else None
        if args and args[0] is None and isinstance(wanted, torch.dtype):
            return skipping(move, wanted)(tensor, *args, **kwargs)
        return move(tensor, *args, **kwargs)

    patches.set(torch.Tensor, to=to)


def _skip_initialisers(patches: Patches) -> None:
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
        trace.assume("torch.compile was left out: the run counts as eager")
        return model if model is not None else lambda function: function

    def script(code: Any, *args: Any, **kwargs: Any) -> Any:
        trace.assume("torch.jit was left out: the run counts as eager")
        return code

    patches.set(torch, compile=compile)
    patches.set(nn.Module, compile=lambda module, *args, **kwargs: compile(module) and None)
    patches.set(torch.jit, script=script, trace=script)


def _wrappers(patches: Patches, trace: CardTrace) -> None:
    forward = data_parallel.DataParallel.forward

    def alone(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        trace.assume("nn.DataParallel ran on one card")
        if not self.device_ids:
            return forward(self, *inputs, **kwargs)
        inputs, kwargs = onto_the_card((inputs, kwargs))
        return self.module(*inputs, **kwargs)

    patches.set(data_parallel.DataParallel, forward=alone)
