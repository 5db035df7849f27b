"""How the forward of one call is called: its models under autocast, and inside of what a technique puts around it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from oomfix.runtime.precision import ModelCalls


class ForwardCalls:
    """Calls of one forward.

    Args:
        forward: the caller's function.

    Attributes:
        around: makes the context that each call is made in; None: there is nothing around it.
        model_calls: run its models under autocast; None: it computes in fp32.
        is_inside: a call has begun, and has not ended well.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.around: Callable[[], AbstractContextManager[None]] | None = None
        self.model_calls: ModelCalls | None = None
        self.is_inside = False
        self._forward = forward

    @property
    def in_half(self) -> bool:
        """Whether its models run under autocast."""
        return self.model_calls is not None

    def precision(self) -> str:
        """What its models compute in, for a log."""
        return "fp32" if self.model_calls is None else f"{self.model_calls.dtype_name} autocast"

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward returns."""
        self.is_inside = True
        # casts of weights that an autocast around the call keeps belong to the graph that they were first used in
        torch.clear_autocast_cache()
        if self.around is None and self.model_calls is None:
            result = self._forward(*args, **kwargs)
        else:
            with nullcontext() if self.around is None else self.around():
                result = self.in_its_precision(*args, **kwargs)
        self.is_inside = False
        return result

    def in_its_precision(self, *args: Any, **kwargs: Any) -> Any:
        """What the forward returns with nothing around it, its models under autocast where this call uses it."""
        if self.model_calls is None:
            return self._forward(*args, **kwargs)
        with self.model_calls.active():
            return self._forward(*args, **kwargs)
