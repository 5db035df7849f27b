"""A block that keeps only its inputs for backward and runs again when backward needs the rest.

A block is checkpointed by giving it a class: one generated from its own, with only `forward` replaced.
Nothing is stored on the block, so its attributes, state_dict and repr stay what they were; pickles name the
original class and load where oomfix is not installed; a deep copy is checkpointed in its own right, with its
own weights.
"""

import copy
import copyreg
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix.runtime import compat
from oomfix.runtime.techniques.recomputation import Conduct, observe, recomputation_contexts, updates_statistics

_logger = logging.getLogger(__name__)
_conducts: "weakref.WeakKeyDictionary[nn.Module, Conduct]" = weakref.WeakKeyDictionary()
_classes: dict[type[nn.Module], type[nn.Module]] = {}


class CheckpointedBlock:
    """The first base of every generated class; the second is the block's own class."""

    def __init_subclass__(cls, **_: object) -> None:
        """Keep the block's own class from hearing of this subclass, which it may register or change."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_original(self):
            rebuild, arguments, *state = self.__reduce_ex__(protocol)
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that this function names the class that the object has now
            rebuild = arguments[0].__new__
        return rebuild, arguments, *state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_original(self):
            twin = copy.deepcopy(self, memo)
        twin.__class__ = type(self)
        return twin


def wrap(block: nn.Module) -> None:
    """Checkpoint `block` from now on; a block that is checkpointed already stays as it is."""
    if not isinstance(block, CheckpointedBlock):
        block.__class__ = _checkpointed_class(type(block))


def unwrap(block: nn.Module) -> None:
    """Give `block` its own class back; a block that `wrap` never saw stays as it is."""
    if CheckpointedBlock in type(block).__bases__:
        block.__class__ = type(block).__bases__[1]


def can_be_wrapped(block: nn.Module) -> bool:
    """Whether another `forward` in the class of `block` would be called, and leave the block working."""
    # list-like containers are never called; a forward set on the instance is found before that of the class
    uncalled = isinstance(block, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule)
    return not uncalled and "forward" not in vars(block)


@contextmanager
def _as_original(block: Any) -> Iterator[None]:
    checkpointed = type(block)
    unwrap(block)
    try:
        yield
    finally:
        block.__class__ = checkpointed


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _classes:

        @functools.wraps(original.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _run(self, functools.partial(original.forward, self), args, kwargs)

        body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        # called through the metaclass, for classes that have one of their own
        metaclass: Any = type(original)
        _classes[original] = metaclass(original.__name__, (CheckpointedBlock, original), {**body, "forward": forward})
    return _classes[original]


def _run(block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)

    def run_positional(*values: Any) -> Any:
        return run(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    # by position: checkpoint looks only there for the devices whose random generators it restores
    checkpointed = functools.partial(checkpoint, run_positional, *args, *kwargs.values(), use_reentrant=False)
    if torch.compiler.is_compiling():
        runs_once = compat.RECOMPUTES_UNSEEN_WHERE_COMPILED or not updates_statistics(block)
        return checkpointed() if runs_once else run(*args, **kwargs)
    conduct = _conducts.get(block)
    if conduct is None:
        conduct = _conducts[block] = observe(block, run, args, kwargs)
        if conduct.fault:
            _logger.warning("a %s is not checkpointed: it %s", type(block).__name__, conduct.fault)
    if conduct.fault:
        return run(*args, **kwargs)
    return checkpointed(context_fn=functools.partial(recomputation_contexts, block, conduct))
