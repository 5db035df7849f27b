"""Where tensors are made: operation, file and line of every storage that is alive."""

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomfix.runtime import compat

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # all of oomfix.runtime

# By address of the storage, from its birth to its death.
_live: dict[int, tuple["weakref.ref[torch.UntypedStorage]", "Origin"]] = {}


@dataclass(frozen=True)
class Origin:
    """How a storage came to be.

    Attributes:
        operation: the torch operation that made it.
        shape, dtype: of the tensor that the operation returned.
        line: "file:line" of the innermost code that is neither torch's nor this package's; "" where there is none.
        in_backward: it was made while a backward ran.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    line: str
    in_backward: bool


@contextmanager
def record_origins() -> Iterator[None]:
    """Record where every tensor is made while the context is active, for `oom_report`.

    Only with it does a report see what autograd keeps for backward, which Python code has no names for. What was
    noted is known until the tensor dies, also after the context. It runs Python code in every operation, so it is
    for the iterations that run out of memory, not for a whole training; compiled code is not seen, or before torch
    2.13 runs as it was written.
    """
    with compat.beneath_recording(), _Recorder():  # type: ignore[no-untyped-call]
        yield


def live_origins() -> list[tuple[torch.UntypedStorage, Origin]]:
    """Every storage that was recorded and is alive, with its origin."""
    held = [(reference(), origin) for reference, origin in list(_live.values())]
    return [(storage, origin) for storage, origin in held if storage is not None]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in frames that hold its arguments, and a traceback holds these
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = _returns_aliases(func)
        outputs: Any = (result,) if len(aliases) == 1 else result or ()
        for output, is_alias in zip(outputs, aliases, strict=True):
            for tensor in () if is_alias else output if isinstance(output, list | tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    _note(func, tensor)
        return result


@cache
def _returns_aliases(func: Any) -> tuple[bool, ...]:
    # this one brings a storage that was filled outside the dispatcher, as torch.tensor does
    if func.overloadpacket is torch.ops.aten.lift_fresh:
        return (False,)
    return tuple(value.alias_info is not None for value in func._schema.returns)


def _note(func: Any, tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    address = storage._cdata
    if address in _live:
        return
    origin = Origin(
        func.overloadpacket.__name__,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        user_line(sys._getframe(2)),
        torch._C._current_graph_task_id() != -1,
    )
    _live[address] = (weakref.ref(storage, lambda _: _live.pop(address, None)), origin)


def user_line(frame: FrameType | None) -> str:
    """ "file:line" of the innermost of the frames from `frame` outwards that runs a user's code, or ""."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def is_users(file: str) -> bool:
    """Whether code in `file` is neither torch's nor this package's, nor made up at run time."""
    return not file.startswith((_TORCH, _OWN, "<"))
