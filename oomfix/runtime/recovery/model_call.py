"""Single calls of models under the preset's precision, for loops that cannot be split."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomfix.presets import Precision
from oomfix.runtime import precision, trees
from oomfix.runtime.memory.oom import is_out_of_memory
from oomfix.runtime.state.random_state import RandomState

_log = logging.getLogger("oomfix")


class PreciseCalls:
    """Runs models under autocast, one call at a time; what they return is fp32 again.

    Args:
        wanted: the preset's precision.
    """

    def __init__(self, wanted: Precision) -> None:
        self._wanted = wanted
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._fp32: weakref.WeakSet[Any] = weakref.WeakSet()

    def run(self, model: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`model(*args, **named)`; one whose first call fails under autocast runs in fp32 from then on, said once."""
        owner = getattr(model, "__self__", model)
        device_type = _device_type(owner, (args, named))
        dtype = precision.dtype_for(self._wanted, device_type)
        if dtype is None or owner in self._fp32:
            return model(*args, **named)
        random = None if owner in self._proven else RandomState()
        said = None
        try:
            with torch.autocast(device_type, dtype=dtype):
                result = model(*args, **named)
        except (RuntimeError, TypeError, ValueError) as error:
            if random is None or is_out_of_memory(error):
                raise
            # an exception keeps the frames that failed, and they keep their tensors: only its text leaves here
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if said is None and random is not None and _is_opaque(result):
            said = f"it returned a {type(result).__name__}, whose tensors would stay in half precision"
        if said is None:
            self._proven.add(owner)
            return trees.map_leaves(precision.in_fp32, result)
        assert random is not None
        random.restore()
        result = model(*args, **named)
        self._fp32.add(owner)
        _log.warning(f"{type(owner).__name__}: runs in fp32, because under autocast: {said}")
        return result


def _is_opaque(result: Any) -> bool:
    """Whether an object that is not looked into is part of a result: a distribution, a batch of graphs."""
    inner = trees.children(result)
    if inner is not None:
        return any(_is_opaque(child) for _, child in inner)
    return not isinstance(result, torch.Tensor | bool | int | float | str | bytes | type(None))


def _device_type(owner: Any, given: Any) -> str:
    first = next(owner.parameters(), None) if isinstance(owner, nn.Module) else None
    return precision.device_type_of([*([] if first is None else [first]), *trees.tensors(given)])
