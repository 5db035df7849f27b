"""What the manager takes for an optimizer: a torch optimizer, or any object with `step` that wraps one."""

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from oomfix.runtime.arguments import shown

_INSIDE = ("optimizer", "base_optimizer")


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be stepped by the manager.

    Raises:
        TypeError: `optimizer` is no optimizer, or its step needs arguments (a closure).
    """
    if isinstance(optimizer, LRScheduler):
        raise TypeError(
            f"optimizer: got {shown(optimizer)}, expected an optimizer; schedulers come after it, as in "
            "memory.step(optimizer, scheduler)"
        )
    step = getattr(optimizer, "step", None)
    if not callable(step) or isinstance(optimizer, type):
        raise TypeError(
            f"optimizer: got {shown(optimizer)}, expected an optimizer, or a wrapper with `step` around one"
        )
    needed = _needed_by_step(type(optimizer))  # type: ignore[arg-type]
    if needed:
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer: {name}.step needs {needed[0]!r}, and the manager steps once after the backward; call "
            f"{name}.step by yourself, with backward in the closure and without oomfix"
        )
    innermost(optimizer)


def check_schedulers(schedulers: Iterable[Any]) -> None:
    """Refuse what cannot be stepped after an optimizer.

    Raises:
        TypeError: one of them is no scheduler, or its step needs arguments (a metric).
    """
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.Optimizer):
            raise TypeError(
                f"schedulers: got {type(scheduler).__name__}, expected learning rate schedulers; each optimizer has a "
                "memory.step of its own"
            )
        if not callable(getattr(scheduler, "step", None)):
            hint = f"; a norm is clip_norm={scheduler}" if isinstance(scheduler, int | float) else ""
            raise TypeError(f"schedulers: got {shown(scheduler)}, expected learning rate schedulers{hint}")
        needed = _needed_by_step(type(scheduler))  # type: ignore[arg-type]
        if needed:
            name = type(scheduler).__name__
            raise TypeError(
                f"schedulers: {name}.step needs {needed[0]!r}; call scheduler.step({needed[0]}) by yourself"
            )


def innermost(optimizer: Any) -> Any:
    """`optimizer`, or the one inside a wrapper: what holds the parameter groups.

    Raises:
        TypeError: there are none.
    """
    inner = optimizer
    while not hasattr(inner, "param_groups"):
        inner = next((getattr(inner, name) for name in _INSIDE if hasattr(inner, name)), None)
        if inner is None:
            raise TypeError(f"optimizer: got {shown(optimizer)}, expected an object with param_groups, or around one")
    return inner


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Every tensor that `optimizer` (or the optimizer inside a wrapper) updates."""
    return (parameter for group in innermost(optimizer).param_groups for parameter in group["params"])


def has_gradients(optimizer: Any) -> bool:
    """Whether any of its parameters has a gradient."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


class ScalerView:
    """Shows a wrapper around an optimizer (Lookahead and the like) to a GradScaler as an optimizer."""

    def __init__(self, wrapper: Any) -> None:
        # weak: this is kept in a table under the wrapper
        self._wrapper = weakref.ref(wrapper)
        self._hook: Any = None

    @property
    def param_groups(self) -> Any:
        """The groups of the optimizer inside."""
        return innermost(self._wrapper()).param_groups

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the wrapper, then call the hook."""
        wrapper = self._wrapper()
        assert wrapper is not None
        result = wrapper.step(*args, **kwargs)
        self._hook(self)
        return result

    def register_step_post_hook(self, hook: Any) -> "ScalerView":
        """Have `hook` called after a step; returns what removes it again."""
        self._hook = hook
        return self

    def remove(self) -> None:
        """Remove the hook."""
        self._hook = None


@functools.cache
def _needed_by_step(kind: type) -> tuple[str, ...]:
    """Names of the arguments without which `kind.step` cannot be called."""
    parameters = list(inspect.signature(kind.step).parameters.values())  # type: ignore[attr-defined]
    catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters[1:] if p.default is p.empty and p.kind not in catch_all)
