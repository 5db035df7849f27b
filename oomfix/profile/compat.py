"""Every difference between torch versions (2.3 and on) that the simulation meets, in one place."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

# torch 2.5 moved the exception; older versions only know the second name
OutOfMemoryError: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)

# torch that knows the word may refuse to replace a kernel without it
_REPLACING = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)


def replace_kernel(library: torch.library.Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    """Let the operation `name` run `kernel` where it is dispatched to `key`, until `library` is destroyed."""
    library.impl(name, kernel, key, **_REPLACING)  # type: ignore[no-untyped-call]


def has_autocast_of_cuda(name: str) -> bool:
    """Whether autocast on CUDA does anything with an operation (torch 2.3: nothing with upsampling)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def operation(name: str) -> Any:
    """The operation called "name" or "name.overload"; None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def step_without_data(library: torch.library.Library) -> None:
    """Let the steps of optimizers run on tensors without data, where torch would make real ones for them.

    These are fused steps in every version, and in torch 2.3 some operations on lists of tensors.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (*_FUSED, *_ON_LISTS):
        keys = ("Meta", "CompositeExplicitAutograd")
        if operation(name) is not None and not any(has_kernel(f"aten::{name}", key) for key in keys):
            in_place = name.partition(".")[0].endswith("_")
            library.impl(name, _nothing if in_place else _empty, "Meta")  # type: ignore[no-untyped-call]


_FUSED = [f"_fused_{kind}_{rate}" for kind in ("adam", "adamw", "sgd", "adagrad") for rate in ("", ".tensor_lr")]
_ON_LISTS = """_foreach_addcdiv.ScalarList _foreach_addcdiv.Tensor _foreach_addcdiv_.ScalarList _foreach_addcdiv_.Tensor
_foreach_addcmul.ScalarList _foreach_addcmul.Tensor _foreach_addcmul_.ScalarList _foreach_addcmul_.Tensor
_foreach_pow.List _foreach_pow.Scalar _foreach_pow.ScalarList
_foreach_pow_.List _foreach_pow_.Scalar _foreach_pow_.ScalarList""".split()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An operation in place."""


def _empty(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@dataclass(frozen=True)
class Structure:
    """How the containers of arguments are nested, as a key: torch compares `TreeSpec`s, and hashed none up to 2.6."""

    spec: TreeSpec

    def __hash__(self) -> int:
        return hash((self.spec.num_nodes, self.spec.num_leaves))


def grouped_heads(enabled: bool) -> dict[str, bool]:
    """The argument of attention for queries with more heads than keys, which torch 2.5 brought."""
    return {"enable_gqa": True} if enabled else {}


# The functions of torch itself, whatever a simulation puts in their place for a script.
autocast_enabled: Callable[[str], bool] = torch.is_autocast_enabled
if hasattr(torch, "get_autocast_dtype"):
    autocast_dtype: Callable[[str], torch.dtype] = torch.get_autocast_dtype
else:
    # torch 2.3 has one function for each device
    _ENABLED = {"cpu": torch.is_autocast_cpu_enabled, "cuda": torch.is_autocast_enabled}
    _DTYPE = {"cpu": torch.get_autocast_cpu_dtype, "cuda": torch.get_autocast_gpu_dtype}

    def autocast_enabled(device_type: str) -> bool:
        """Whether autocast is on for `device_type`."""
        return _ENABLED[device_type]()

    def autocast_dtype(device_type: str) -> torch.dtype:
        """What autocast computes in on `device_type`."""
        return _DTYPE[device_type]()
