"""Fake tensors that present themselves as tensors on "cuda:0" to the code that uses them."""

import mmap
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomfix.profile.answers import bring_along, brought_along
from oomfix.profile.boundary import CUDA, CardTrace, is_cuda
from oomfix.profile.patches import Patches

aten = torch.ops.aten

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_UNTOUCHED_BYTES = 2**20
# torch asks the driver what a bare number stands for, where none of the operations is reached yet
_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye",
)  # fmt: skip


def fakes_on_cuda(patches: Patches, trace: CardTrace) -> None:
    """Let fake tensors say that they are on "cuda:0", and move between card and host."""
    _say_that_they_are_on_the_card(patches, trace)
    _move(patches, trace)
    _are_made(patches, trace)
    _are_finite(patches)


def _say_that_they_are_on_the_card(patches: Patches, trace: CardTrace) -> None:
    device = vars(FakeTensor)["device"].fget

    def host_array(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if name != "tolist" and not kwargs.get("force", False):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                    "host memory first."
                )
            return method(to_host(trace, self).detach(), *args, **kwargs)

        return read

    patches.set(
        FakeTensor,
        device=property(lambda self: device(self) if trace.running else CUDA),
        is_cuda=property(lambda self: not trace.running),
        get_device=lambda self: 0,
        cpu=lambda self, *args, **kwargs: to_host(trace, self),
        pin_memory=lambda self, *args: self,
        record_stream=lambda self, stream: None,
        numpy=host_array("numpy"),
        tolist=host_array("tolist"),
        __array__=host_array("__array__"),
        new_tensor=_new_tensor,
        __format__=_formatted,
    )


def _new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **kwargs})


def _formatted(self: torch.Tensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _move(patches: Patches, trace: CardTrace) -> None:
    parse_to = torch._C._nn._parse_to  # type: ignore[attr-defined]
    plain_to, plain_type = torch.Tensor.to, torch.Tensor.type

    def parse(*args: Any, **kwargs: Any) -> Any:
        # torch asks the driver what a bare number stands for
        args = tuple(_numbered(argument) for argument in args)
        return parse_to(*args, **{name: _numbered(value) for name, value in kwargs.items()})

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if trace.running:
            # code of torch that works on fake tensors, for which all of them are on the host
            return plain_to(self, *args, **kwargs)
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            args, kwargs = (other.device, other.dtype), {}
        copy = kwargs.pop("copy", False)
        target, dtype, _, memory_format = parse(*args, **kwargs)
        options: dict[str, Any] = {"dtype": dtype or self.dtype, "copy": copy}
        if memory_format is not None:
            options["memory_format"] = memory_format
        if isinstance(self, FakeTensor):
            if target is not None and target.type == "cpu":
                # a copy already
                options["copy"] = False
                return plain_to(to_host(trace, self), **options)
            return plain_to(self, **options)
        if target is None or not is_cuda(target):
            return plain_to(self, **options, **({} if target is None else {"device": target}))
        del options["copy"]
        return _arrive(trace, self, **options)

    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_cuda(torch.device("cuda", device) if isinstance(device, int) else device)
        return self if isinstance(self, FakeTensor) else _arrive(trace, self)

    def as_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            return plain_type(to(self, CUDA), dtype.replace("torch.cuda.", "torch."))
        name = plain_type(self, dtype, **kwargs) if dtype is not None else plain_type(self)
        return name.replace("torch.", "torch.cuda.") if dtype is None and isinstance(self, FakeTensor) else name

    patches.set(torch.Tensor, to=to, cuda=cuda, type=as_type)
    patches.set(torch._C._nn, _parse_to=parse)


def _arrive(trace: CardTrace, here: torch.Tensor, **options: Any) -> torch.Tensor:
    """A tensor of the host, moved to the card."""
    # not `to`: in inference mode that would reach the trace with its arguments in another order
    there: torch.Tensor = aten._to_copy(here, device=CUDA, **options)
    bring_along(here, there)
    trace.claim((there,), "weights" if isinstance(here, torch.nn.Parameter) else "inputs")
    return there


def _are_made(patches: Patches, trace: CardTrace) -> None:
    for name in _FACTORIES:
        patches.set(torch, **{name: _on_numbered_card(getattr(torch, name))})
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, **{name: _made_on_host(trace, getattr(torch, name))})
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"):
        patches.set(torch, **{name: _like(getattr(torch, name))})
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        patches.set(torch.Tensor, **{name: _like(getattr(torch.Tensor, name))})


def _made_on_host(trace: CardTrace, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # torch makes these from Python data below the dispatcher, where a simulated card is not seen
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = _numbered(kwargs.get("device"))
        if device is None or not is_cuda(torch.device(device)):
            return make(*args, **kwargs)
        wants_gradient = kwargs.pop("requires_grad", False)
        return trace.to_card(make(*args, **{**kwargs, "device": "cpu"})).requires_grad_(wants_gradient)

    return made


def _like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # not among the operations: below Python, fake tensors are on the host, and say so to each other
    def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if not isinstance(tensor, FakeTensor) or device is None or torch.device(device).type != "cpu":
            return make(tensor, *args, **kwargs)
        shaped = make(tensor, *args, **{**kwargs, "device": None, "pin_memory": False})
        # in memory that nobody has touched
        return torch.empty_strided(shaped.size(), shaped.stride(), dtype=shaped.dtype)

    return made


def _on_numbered_card(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _numbered(kwargs["device"])
        return make(*args, **kwargs)

    return made


def _are_finite(patches: Patches) -> None:
    """Let whoever asks whether all numbers are finite hear that they are."""
    is_finite = torch.isfinite

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        result = is_finite(tensor)
        result._oomfix_all = True  # type: ignore[attr-defined]
        return result

    patches.set(torch, isfinite=finite)
    patches.set(torch.Tensor, isfinite=finite)


def _numbered(value: Any) -> Any:
    """A card given by its number as a device; anything else as it is."""
    return torch.device("cuda", value) if isinstance(value, int) and not isinstance(value, bool) else value


class _ToHost(torch.autograd.Function):
    """Copy to the host as zeros; the gradient comes back as a tensor of the card."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _zeros(tensor.shape, tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.to(CUDA)


def to_host(trace: CardTrace, tensor: torch.Tensor) -> torch.Tensor:
    """What a small tensor brought along from the host; else zeros in its shape, still connected to its graph."""
    if (brought := brought_along(tensor)) is not None:
        trace.values_read += 1
        return brought.clone()
    if not _asked_by_torch():
        trace.assume("data copied from the card are zeros")
    result: torch.Tensor = _ToHost.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host; large ones in memory that the system only provides where it is touched."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _UNTOUCHED_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY), dtype=dtype).view(shape)


def _asked_by_torch() -> bool:
    """Whether code of torch asked, as gradient clipping does for its factor: no choice of the script hangs on it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER)
