"""The boundary between the host and the simulated card.

Real tensors stay real until they are moved to "cuda", or made there: from then on they are fake tensors, which have a
shape and a type but no data. They say that they are on "cuda:0". Moved back, they are real tensors of zeros. What a
script reads from the card (`.item()`, `if loss > best`, boolean masks) has to be assumed, and is noted.
"""

import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.answers import ANSWERS, bring_along, brought_along
from oomfix.profile.patches import Patches
from oomfix.profile.refusals import CannotSimulate
from oomfix.profile.trace import MemoryTrace, Scratch
from oomfix.profile.user_code import user_line

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_UNTOUCHED_BYTES = 2**20
_MOST_QUESTIONS = 200_000
# torch asks the driver what a bare number stands for, where none of the operations is reached yet
_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye",
)  # fmt: skip

# operations whose tensors come from the script; operations between could have been given some that torch made
_OF_ONE_DEVICE = {
    getattr(aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_batch_norm", "native_layer_norm",
        "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "nll_loss_forward", "nll_loss2d_forward",
    )
}  # fmt: skip


class CardTrace(MemoryTrace):
    """A memory trace that counts fake tensors only, makes them, and answers for the data they do not have.

    Attributes:
        fake_mode: the mode that the fake tensors belong to.
        assumed: (what was assumed, (file, line) or None), with how often.
        values_read: how often numbers were read that tensors of the card have from the host.
        recording: False while fake tensors are made that are not on the card, as in a model's initialisers.
    """

    def __init__(
        self,
        allocator: CachingAllocator | None = None,
        scratch: Scratch | None = None,
        keeps: Callable[[Any, bool], int] | None = None,
    ) -> None:
        super().__init__(allocator, self._is_on_card, scratch, keeps)
        self.recording = True
        self.values_read = 0
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.assumed: Counter[tuple[str, tuple[str, int] | None]] = Counter()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            # page-locked memory is the driver's to give, and makes no difference to the card
            kwargs = {**kwargs, "pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            return self._on_card_operation(func, args, kwargs)
        if func is aten.copy_.default and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            return args[0]
        if self.recording and func.overloadpacket in _OF_ONE_DEVICE:
            refuse_two_devices(args)
        if (answer := ANSWERS.get(func)) is not None and any(isinstance(a, FakeTensor) for a in args):
            return answer(self, func, args, kwargs)
        return func(*args, **kwargs)

    def assume(self, what: str) -> None:
        """Note an assumption, with the line of user code that asked.

        Raises:
            CannotSimulate: the line has asked so often that it seems to wait for another answer.
        """
        if self.recording:
            line = user_line(sys._getframe(1))
            self.assumed[what, line] += 1
            if self.assumed[what, line] >= _MOST_QUESTIONS and line is not None:
                raise CannotSimulate(
                    f"{line[0]}:{line[1]} has read the card {_MOST_QUESTIONS} times: it seems to wait for its numbers "
                    "to change, and a simulated card has none"
                )

    def watch(self, model: torch.nn.Module) -> None:
        """As `MemoryTrace.watch`; refuses models that several devices share."""
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(places) > 1:
            raise CannotSimulate(
                f"its device map spreads a model over {', '.join(sorted(places))}: one card is simulated"
            )
        super().watch(model)

    def _is_on_card(self, tensor: torch.Tensor) -> bool:
        return self.recording and isinstance(tensor, FakeTensor)

    def to_card(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty fake tensor like `tensor`; a tensor that is on the card already is returned as it is."""
        return tensor if isinstance(tensor, FakeTensor) else tensor.cuda()

    def _on_card_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory or a copy whose result is to be on the card."""
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        with self.fake_mode:
            if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
                source = args[0]
                fake = torch.empty_strided(source.size(), source.stride(), dtype=kwargs.get("dtype") or source.dtype)
                wanted = kwargs.get("memory_format")
                if wanted not in (None, torch.preserve_format):
                    fake = fake.contiguous(memory_format=wanted)
                return fake
            return func(*args, **kwargs)


def onto_the_card(values: Any) -> Any:
    """Nested values with their tensors on the card, as wrappers that know their device move what they are given."""
    return tree_map_only(Tensor, Tensor.cuda, values)


def refuse_two_devices(args: tuple[Any, ...]) -> None:
    """Raise torch's own error where an operation is given tensors of the card and of the host."""
    tensors = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(a, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        # a single number on the host is a number to every device
        if any(
            tensor.dim() and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor) for tensor in tensors
        ):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )


def _is_cuda(device: object) -> bool:
    if not isinstance(device, torch.device) or device.type != "cuda":
        return False
    if device.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal {device.index}: one card is simulated")
    return True


def _numbered(value: Any) -> Any:
    """A card given by its number as a device; anything else as it is."""
    return torch.device("cuda", value) if isinstance(value, int) and not isinstance(value, bool) else value


# fake tensors that behave as tensors on cuda:0 for the code that uses them


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


def fakes_on_cuda(patches: Patches, trace: CardTrace) -> None:
    """Let fake tensors present themselves as tensors on "cuda:0", and move between card and host."""
    device = vars(FakeTensor)["device"].fget
    parse_to = torch._C._nn._parse_to  # type: ignore[attr-defined]
    plain_to = torch.Tensor.to

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
        if target is None or not _is_cuda(target):
            return plain_to(self, **options, **({} if target is None else {"device": target}))
        del options["copy"]
        return arrive(self, **options)

    def arrive(here: torch.Tensor, **options: Any) -> torch.Tensor:
        # not `to`: in inference mode that would reach the trace with its arguments in another order
        there: torch.Tensor = aten._to_copy(here, device=CUDA, **options)
        bring_along(here, there)
        trace.claim((there,), "weights" if isinstance(here, torch.nn.Parameter) else "inputs")
        return there

    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        _is_cuda(torch.device("cuda", device) if isinstance(device, int) else device)
        return self if isinstance(self, FakeTensor) else arrive(self)

    plain_type = torch.Tensor.type

    def as_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            return plain_type(to(self, CUDA), dtype.replace("torch.cuda.", "torch."))
        name = plain_type(self, dtype, **kwargs) if dtype is not None else plain_type(self)
        return name.replace("torch.", "torch.cuda.") if dtype is None and isinstance(self, FakeTensor) else name

    def made_on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # torch makes these from Python data below the dispatcher, where a simulated card is not seen
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = _numbered(kwargs.get("device"))
            if device is None or not _is_cuda(torch.device(device)):
                return make(*args, **kwargs)
            wants_gradient = kwargs.pop("requires_grad", False)
            return trace.to_card(make(*args, **{**kwargs, "device": "cpu"})).requires_grad_(wants_gradient)

        return made

    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **kwargs})

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

    def formatted(self: torch.Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

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
        new_tensor=new_tensor,
        __format__=formatted,
    )

    def finite(tensor: torch.Tensor) -> torch.Tensor:
        result = is_finite(tensor)
        result._oomfix_all = True  # type: ignore[attr-defined]
        return result

    is_finite = torch.isfinite
    patches.set(torch, isfinite=finite)
    patches.set(torch.Tensor, to=to, cuda=cuda, type=as_type, isfinite=finite)
    patches.set(torch._C._nn, _parse_to=parse)

    def like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # not among the operations: below Python, fake tensors are on the host, and say so to each other
        def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if not isinstance(tensor, FakeTensor) or device is None or torch.device(device).type != "cpu":
                return make(tensor, *args, **kwargs)
            shaped = make(tensor, *args, **{**kwargs, "device": None, "pin_memory": False})
            # in memory that nobody has touched
            return torch.empty_strided(shaped.size(), shaped.stride(), dtype=shaped.dtype)

        return made

    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"):
        patches.set(torch, **{name: like(getattr(torch, name))})
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        patches.set(torch.Tensor, **{name: like(getattr(torch.Tensor, name))})

    def on_numbered_card(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = _numbered(kwargs["device"])
            return make(*args, **kwargs)

        return made

    for name in _FACTORIES:
        patches.set(torch, **{name: on_numbered_card(getattr(torch, name))})
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, **{name: made_on_host(getattr(torch, name))})
