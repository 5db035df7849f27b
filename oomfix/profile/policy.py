"""What CUDA would do, on fake CPU tensors: the operations whose choice of kernel or number format decides memory.

Fake tensors that say they are on a GPU need a torch built for CUDA. Fake CPU tensors work on every torch, but
take the CPU's decisions: other autocast lists, a dropout that keeps a float mask, attention and recurrent layers of its
own, optimizers without their multi-tensor form. Here these decisions become CUDA's.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.optim import optimizer as optimizers

from oomfix.profile import autocast, compat, recurrent
from oomfix.profile.attention import attention_for, choice_for
from oomfix.profile.patches import Patches

aten = torch.ops.aten


@contextmanager
def cuda_policy(capability: tuple[int, int], recurrent_seen: Callable[[], object]) -> Iterator[None]:
    """Context in which CPU operations decide as a card of `capability` would. Affects the whole process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with Patches() as patches:
            autocast.install(library)
            recurrent.install(library, recurrent_seen)
            _install_kernels(library, capability)
            compat.step_without_data(library)
            # fake tensors remember what an operation returned, on another card it may be
            FakeTensorMode.cache_clear()
            _autocast_for_cuda(patches)
            _multi_tensor_optimizers(patches)
            # the scaler reads from the card whether gradients overflowed: they did not
            patches.set(torch.amp.GradScaler, _maybe_opt_step=_step)
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _install_kernels(library: torch.library.Library, capability: tuple[int, int]) -> None:
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "scaled_dot_product_attention": attention_for(capability),
        "_fused_sdp_choice": choice_for(capability),
    }
    for name, kernel in kernels.items():
        compat.replace_kernel(library, name, kernel, "CompositeImplicitAutograd")


def _dropout(inputs: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not inputs.numel():
        return inputs
    if p == 1:
        return inputs * torch.zeros((), dtype=inputs.dtype)
    # the fused kernel of CUDA keeps a mask of one byte per element
    result: torch.Tensor = aten.native_dropout(inputs, p, train)[0]
    return result


def _step(scaler: object, optimizer: torch.optim.Optimizer, state: object, *args: Any, **kwargs: Any) -> float | None:
    return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]


def _autocast_for_cuda(patches: Patches) -> None:
    init = autocast_mode.autocast.__init__
    is_enabled, get_dtype = compat.autocast_enabled, compat.autocast_dtype

    def init_on_cpu(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or get_dtype("cuda")
        init(self, device_type, dtype, enabled, cache_enabled)

    def on_cpu(device_type: str | None) -> str:
        return "cpu" if device_type in (None, "cuda") else device_type or "cpu"

    def cuda_dtype(device_type: str) -> torch.dtype:
        # outside autocast, CUDA's default must not turn into the CPU's
        return get_dtype("cpu") if device_type == "cuda" and is_enabled("cpu") else get_dtype(device_type)

    patches.set(autocast_mode.autocast, __init__=init_on_cpu)
    patches.set(
        torch,
        is_autocast_enabled=lambda device_type=None: is_enabled(on_cpu(device_type)),
        get_autocast_gpu_dtype=lambda: cuda_dtype("cuda"),
    )
    if hasattr(torch, "get_autocast_dtype"):
        patches.set(torch, get_autocast_dtype=cuda_dtype)


def _multi_tensor_optimizers(patches: Patches) -> None:
    patches.set(optimizers, _get_foreach_kernels_supported_devices=lambda: ["cuda", "cpu"])
    supported = [*optimizers._foreach_supported_types, FakeTensor]
    patches.set(optimizers, _foreach_supported_types=supported)


def replace_parameters(patches: Patches, moved: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
    """Let `Module.to`, `cuda`, `half`, ... put new parameters into modules; `moved(old, new)` is told of each.

    On a real card the parameter object stays and its data is exchanged, which fake tensors do not allow. Tied
    parameters stay tied: one old parameter becomes one new one.
    """
    replaced: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    depth = 0

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        try:
            for child in self.children() if recurse else ():
                child._apply(fn)  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._parameters[name] = convert(parameter, fn)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if depth == 0:
                replaced.clear()
        return self

    def convert(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
        old, new = replaced.get(id(parameter), (None, parameter))
        if old is not None and old() is parameter:
            return new
        with torch.no_grad():
            data = fn(parameter)
        if data is parameter:
            return parameter
        new = nn.Parameter(data.detach(), parameter.requires_grad)
        if parameter.grad is not None:
            with torch.no_grad():
                new.grad = fn(parameter.grad)
        # the old one is freed as soon as nobody needs it; its id may then be given to another
        replaced[id(parameter)] = weakref.ref(parameter), new
        moved(parameter, new)
        return new

    patches.set(nn.Module, _apply=apply)
