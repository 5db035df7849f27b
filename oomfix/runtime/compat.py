"""Every difference between torch versions (2.3 and on) that the runtime meets, in one place."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CHECKPOINT = torch.utils.checkpoint
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_MODULE_FILE = torch.nn.modules.module.__file__

# torch 2.5 moved the exception; older versions only know the second name
OutOfMemoryError: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)

# numbers that torch 2.6 and before cannot index, and others of as many bits
_UNINDEXED = {
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8, torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2: torch.int8, torch.float8_e5m2fnuz: torch.int8,
}  # fmt: skip

# what torch 2.6 compiles together with a checkpoint updates running statistics again in backward
RECOMPUTES_UNSEEN_WHERE_COMPILED = torch.__version__ >= "2.13"


def force_eager() -> AbstractContextManager[Any]:
    """Context in which compiled functions run as they were written; no compilation is started or thrown away."""
    # importing the compiler takes seconds, and a program that has not done so has compiled nothing
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    set_stance = getattr(torch.compiler, "set_stance", None)
    return _uncompiled() if set_stance is None else set_stance("force_eager")  # type: ignore[no-any-return]


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What torch 2.6 calls a stance, for versions before: no frame is given to the compiler."""
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    set_eval_frame = frames.set_eval_frame
    frames.set_eval_frame = lambda callback: set_eval_frame(None)
    try:
        yield
    finally:
        frames.set_eval_frame = set_eval_frame


def left_by_compiler(function: _Function) -> _Function:
    """`function`, that torch's compiler neither takes for itself nor into what calls it."""
    # as in `force_eager`: without the import there is no compiler
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def beneath_recording() -> AbstractContextManager[Any]:
    """Context for a dispatch mode around a user's code, in which what is compiled runs as it was written, before 2.13.

    What torch 2.6 first meets under such a mode it never compiles again, and torch 2.3 compiles it in every call.
    """
    return force_eager() if torch.__version__ < "2.13" else nullcontext()


def is_cleared(tensor: torch.Tensor) -> bool:
    """Whether nothing can be asked of `tensor`: a fake one that torch 2.3 emptied but did not free."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor) and "fake_mode" not in vars(tensor)


def named_rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]`, a copy."""
    bits = _UNINDEXED.get(tensor.dtype)
    if bits is None or tensor.requires_grad:
        return tensor[rows]
    return tensor.view(bits)[rows].view(tensor.dtype)


def parameter_groups(sharded: Any) -> list[Any]:
    """What FSDP2 exchanges at once for a module that `fully_shard` was applied to; one group at most, before 2.13."""
    state = sharded._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` is the result of `torch.compile(module)` or was compiled in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def autocast_dtype(device_type: str) -> torch.dtype:
    """What autocast computes in on `device_type` when nothing is asked for (torch 2.3 has one function per device)."""
    ask = getattr(torch, "get_autocast_dtype", None)
    if ask is not None:
        return ask(device_type)  # type: ignore[no-any-return]
    return torch.get_autocast_cpu_dtype() if device_type == "cpu" else torch.get_autocast_gpu_dtype()


def has_bf16(device_type: str) -> bool:
    """Whether `device_type` computes in bf16 by itself, not by emulation (torch 2.4 says yes for a T4)."""
    if device_type != "cuda":
        return device_type in ("cpu", "xpu")
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def active_autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in on `device_type` right now, or None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):
        return autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    is_enabled = torch.is_autocast_cpu_enabled if device_type == "cpu" else torch.is_autocast_enabled
    return autocast_dtype(device_type) if is_enabled() else None  # type: ignore[no-untyped-call]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context in which an autocast that is on around it is off."""
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if active_autocast_dtype(device_type) is not None:
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def _entering_autocast(instead: Callable[[Callable[..., Any], torch.autocast], Any]) -> Iterator[None]:
    """Context in which blocks of autocast begin by `instead`, which is given how they begin, and the block."""
    enter = torch.autocast.__enter__

    def enter_otherwise(self: torch.autocast) -> Any:
        return instead(enter, self)

    torch.autocast.__enter__ = enter_otherwise  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def autocast_never_begins() -> Iterator[list[torch.autocast]]:
    """Context in which blocks of autocast do nothing; yields those that would have."""
    held_off: list[torch.autocast] = []

    def disabled(enter: Callable[..., Any], block: torch.autocast) -> Any:
        enabled = block._enabled
        if enabled:
            held_off.append(block)
        block._enabled = False
        try:
            return enter(block)
        finally:
            block._enabled = enabled

    with _entering_autocast(disabled):
        yield held_off


@contextmanager
def begun_autocasts() -> Iterator[set[torch.dtype]]:
    """Context that yields what blocks of autocast have begun in it, or were on around it, as a set of their dtypes."""
    found = {dtype for device_type in ("cpu", "cuda") if (dtype := active_autocast_dtype(device_type)) is not None}

    def noted(enter: Callable[..., Any], block: torch.autocast) -> Any:
        if block._enabled:
            found.add(block.fast_dtype)
        return enter(block)

    with _entering_autocast(noted):
        yield found


def is_inside_checkpoint() -> bool:
    """Whether what runs now may be run again in backward by torch.utils.checkpoint (without reentrance).

    Where the innermost hook on saved tensors is another's, or torch does not say whose it is (2.6 and before), a
    checkpoint is known by the functions that are running.
    """
    # a compiler that takes the walk over the frames for its own counts other frames (2.6)
    return left_by_compiler(_is_inside_checkpoint)()


def _is_inside_checkpoint() -> bool:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    if hooks is not None and hooks[0].__module__ == _CHECKPOINT.__name__:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_checkpointing(frame):
            return True
        frame = frame.f_back
    return False


def _is_checkpointing(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file != _MODULE_FILE or frame.f_code.co_name != "_call_impl":
        return file == _CHECKPOINT.__file__
    # the composable form is no function around the module, but two hooks on it
    hooks = frame.f_locals["self"]._forward_pre_hooks.values()
    return any(getattr(hook, "__module__", None) == _COMPOSABLE for hook in hooks)


def fuses_on(kind: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether an optimizer of torch.optim has a fused form on `device`."""
    probe = torch.zeros(1, device=device, requires_grad=True)
    try:
        # the constructor knows best: the devices that a version supports are listed nowhere else in public
        kind([probe], lr=1.0, fused=True)  # type: ignore[call-arg]
    except RuntimeError:
        return False
    # except that torch 2.3 lets SGD ask for what the CPU does not have
    operation = f"aten::_fused_{kind.__name__.lower()}_"
    return device.type != "cpu" or torch._C._dispatch_has_kernel_for_dispatch_key(operation, "CPU")


def is_inside_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `torch.func.grad` wraps; None for a slice that `vmap` shows, which is none by itself."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else tensor


def attention_is_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> bool:
    """Whether `scaled_dot_product_attention` has a kernel for these arguments that keeps no probabilities."""
    # torch's own way to choose; what is public tells of CUDA alone
    choice = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, scale=scale)
    return choice > SDPBackend.MATH.value  # type: ignore[no-any-return]
