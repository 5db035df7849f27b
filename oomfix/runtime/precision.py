"""Mixed precision: which dtype a device gets, and autocast around the calls of models, nothing else.

Losses stay outside: `BCELoss` raises under CUDA autocast, and a loss of fp16 numbers overflows. What a model
returns is fp32 again, so `.numpy()`, sums and comparisons behind it work as they were written.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from oomfix.presets import Precision
from oomfix.runtime import compat, trees
from oomfix.runtime.modules import modules_in

_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def dtype_for(precision: Precision, device_type: str) -> torch.dtype | None:
    """The autocast dtype, None for fp32.

    "auto" is bf16 where the device has it, else fp16; "no-fp16" is fp32 there. Both are fp32 on the CPU.
    """
    if precision not in ("auto", "no-fp16"):
        return _DTYPES[precision]
    if device_type not in ("cuda", "xpu"):
        return None
    if compat.has_bf16(device_type):
        return torch.bfloat16
    return torch.float16 if precision == "auto" else None


def device_type_of(things: Iterable[torch.Tensor]) -> str:
    """The device that holds `things`: the first that is not the CPU, else the CPU."""
    return next((tensor.device.type for tensor in things if tensor.device.type != "cpu"), "cpu")


def is_model(module: nn.Module) -> bool:
    """Whether `module` computes with weights, rather than being a loss or an activation."""
    return not isinstance(module, _Loss) and next(module.parameters(), None) is not None


class ModelCalls:
    """Runs the outermost calls of models under autocast.

    The first run hooks every submodule, since a forward may call `model.encoder` and `model.head` rather than `model`;
    later runs hook what was called from outside and what may be in its place, such as the heads of other tasks. Hooks
    live for one run of the forward, so a model that is saved or copied shows none of them.

    Args:
        modules: the models that a forward may run.
        device_type: where they run.
        dtype: what autocast computes in.
    """

    # inside a model that is running they only count how deep they are: blocks with them may be checkpointed
    hooks_run_twice_unseen = True

    def __init__(self, modules: list[nn.Module], device_type: str, dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._device_type = device_type
        self._dtype = dtype
        self._outermost: dict[int, weakref.ref[nn.Module]] = {}
        self._entered: dict[int, weakref.ref[nn.Module]] = {}
        self._targets: list[weakref.ref[nn.Module]] | None = None
        self._depth = 0
        self._autocast: torch.autocast | None = None

    @property
    def dtype_name(self) -> str:
        """ "bf16" or "fp16"."""
        return "bf16" if self._dtype == torch.bfloat16 else "fp16"

    def computes_in(self, device_type: str, dtype: torch.dtype) -> bool:
        """Whether it runs models on such a device, in that dtype."""
        return (self._device_type, self._dtype) == (device_type, dtype)

    def discover(self) -> None:
        """Look at every submodule again in the next run: another one may be called from outside by now."""
        self._targets = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context around one run of the forward."""
        if self._targets is None:
            targets = self._candidates()
        else:
            targets = [module for place in self._targets if (module := place()) is not None]
        self._entered = {}
        handles: list[Any] = []
        for module in targets:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
            # a run that failed may not have come to all of them
            if self._targets is None or not self._entered.keys() <= self._outermost.keys():
                self._outermost |= self._entered
                self._targets = [weakref.ref(module) for module in self._called_or_beside()]
        finally:
            for handle in handles:
                handle.remove()
            self._depth = 0
            self._end_autocast()

    def _called_or_beside(self) -> Iterator[nn.Module]:
        """What was called from outside, what holds it, and what lies beside it: all that no other call covers."""
        waiting = [module for place in self._modules if (module := place()) is not None]
        while waiting:
            module = waiting.pop()
            if is_model(module):
                yield module
            called = id(module) in self._outermost or compat.is_compiled(module)
            if not called and any(id(part) in self._outermost for part in module.modules()):
                waiting += module.children()

    def _candidates(self) -> list[nn.Module]:
        found: dict[int, nn.Module] = {}
        for place in self._modules:
            module = place()
            if module is None:
                continue
            # hooks inside a compiled model would be compiled with it
            inner = [module] if compat.is_compiled(module) else modules_in(module)
            found.update((id(candidate), candidate) for candidate in inner if is_model(candidate))
        return list(found.values())

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered[id(module)] = weakref.ref(module)
            self._autocast = torch.autocast(self._device_type, dtype=self._dtype)
            self._autocast.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return output
        self._end_autocast()
        return trees.map_leaves(in_fp32, output)

    def _end_autocast(self) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None


def in_fp32(leaf: Any) -> Any:
    """`leaf` as fp32 if it is a tensor of half precision, else as it is."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALVES else leaf
