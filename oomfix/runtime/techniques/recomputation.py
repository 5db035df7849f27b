"""Running a block a second time, in backward, as if it had run once.

A forward may do more than compute its output: update running statistics, draw random numbers, count in an
attribute. `observe` sees what a block does; `recomputation_contexts` undoes in the second run what can be
undone. A block that writes what its second run would read (its input, its parameters, other buffers) cannot
be recomputed at all.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from oomfix.runtime.modules import modules_in
from oomfix.runtime.state.attributes import Attributes
from oomfix.runtime.state.random_state import OutsideTorch


@dataclass(frozen=True)
class Conduct:
    """What a block was seen to do besides computing its output.

    Attributes:
        fault: why the block cannot be run twice, as a sentence without its subject; None: it can.
        draws_outside_torch: it takes random numbers from Python's or NumPy's generator.
        assigns_attributes: it assigns attributes of its modules, or changes their lists, dictionaries or
            sets.
    """

    fault: str | None = None
    draws_outside_torch: bool = False
    assigns_attributes: bool = False


def observe(block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Conduct:
    """Run `block` on copies of its inputs and see what it writes; everything but its parameters is put back.

    Costs one forward of the block and holds no more memory than its recomputation in backward will.

    Args:
        block: the module, with gradients enabled and in the mode it trains in.
        run: the block's own forward.
        args, kwargs: what the block was called with; never written.
    """
    inner = (module for module in modules_in(block) if module is not block)
    if any(not _runs_twice_unseen(hook) for module in inner for hook in module._forward_hooks.values()):
        return Conduct(fault="has forward hooks inside, which would run twice")
    copies, named_copies = tree_map_only(torch.Tensor, _independent_copy, (args, kwargs))
    inputs = [leaf for leaf in tree_leaves((copies, named_copies)) if isinstance(leaf, torch.Tensor)]
    parameters = list(block.parameters())
    input_versions, parameter_versions = _versions(inputs), _versions(parameters)
    with undone(block) as changes:
        run(*copies, **named_copies)
    if _versions(inputs) != input_versions:
        return Conduct(fault="writes its input")
    if _versions(parameters) != parameter_versions or "_parameters" in changes.attributes:
        return Conduct(fault="writes its parameters")
    if "_buffers" in changes.attributes:
        return Conduct(fault="writes its buffers")
    return Conduct(None, changes.draws, bool(changes.attributes))


def _runs_twice_unseen(hook: Any) -> bool:
    return bool(getattr(getattr(hook, "__self__", None), "hooks_run_twice_unseen", False))


@dataclass
class Changes:
    """What a context of `undone` put back.

    Attributes:
        attributes: names of changed attributes; "_buffers" and "_parameters" where one of these was replaced,
            and "_buffers" where one was written.
        draws: random numbers were taken from Python's or NumPy's generator.
    """

    attributes: set[str] = field(default_factory=set)
    draws: bool = False


@contextmanager
def undone(module: nn.Module) -> Iterator[Changes]:
    """Put back, on leaving, what ran inside: random generators, buffers, running statistics, attributes.

    Written parameters stay written. Yields `Changes`, filled in when the context is left.
    """
    changes = Changes()
    attributes, draws = Attributes(modules_in(module)), OutsideTorch()
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in _buffers_besides_statistics(module)]
    try:
        with torch.random.fork_rng(_cuda_devices(module)), _statistics_kept(module):
            yield changes
    finally:
        changes.draws = draws.moved()
        draws.restore()
        changes.attributes = attributes.restore()
        with torch.no_grad():
            for buffer, version, value in buffers:
                # a copy without need would spoil what an earlier block saved of a buffer that both share
                if buffer._version != version:
                    buffer.copy_(value)
                    changes.attributes.add("_buffers")


def recomputation_contexts(
    block: nn.Module, conduct: Conduct
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the forward (nothing) and its recomputations: the `context_fn` of torch's checkpoint."""
    draws_of_forward = OutsideTorch() if conduct.draws_outside_torch else None
    return nullcontext(), _EnteredAgain(lambda: _without_trace(block, conduct, draws_of_forward))


class _EnteredAgain(AbstractContextManager[None]):
    """A context made anew each time it is entered: torch enters the one it was given in every backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._made = self._make()
        self._made.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._made.__exit__(*error)


@contextmanager
def _without_trace(block: nn.Module, conduct: Conduct, draws_of_forward: OutsideTorch | None) -> Iterator[None]:
    attributes = Attributes(modules_in(block)) if conduct.assigns_attributes else None
    draws = OutsideTorch() if draws_of_forward else None
    if draws_of_forward:
        draws_of_forward.restore()
    try:
        with _statistics_kept(block):
            yield
    finally:
        if draws:
            draws.restore()
        if attributes:
            attributes.restore()


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Normalisation layers update copies of their running statistics while the context is active."""
    # copies, not None: checkpoint counts what the second run saves for backward, running statistics included
    originals = [(norm._buffers, dict(norm._buffers)) for norm in _norms(block) if norm.training]
    for buffers, original in originals:
        buffers.update({name: None if value is None else value.clone() for name, value in original.items()})
    try:
        yield
    finally:
        for buffers, original in originals:
            buffers.update(original)


def updates_statistics(block: nn.Module) -> bool:
    """Whether a forward of `block` updates running statistics of a layer inside."""
    return any(norm.training for norm in _norms(block))


def _norms(block: nn.Module) -> list[_NormBase]:
    return [module for module in modules_in(block) if isinstance(module, _NormBase) and module.track_running_stats]


def _buffers_besides_statistics(block: nn.Module) -> list[torch.Tensor]:
    statistics = {id(buffer) for norm in _norms(block) for buffer in norm.buffers(recurse=False)}
    return [buffer for buffer in block.buffers() if id(buffer) not in statistics]


def _cuda_devices(module: nn.Module) -> set[torch.device]:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def _independent_copy(tensor: torch.Tensor) -> torch.Tensor:
    # not a leaf: a block may write into its input, as it may into what an earlier block returned
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _versions(tensors: list[Any]) -> list[int]:
    return [tensor._version for tensor in tensors]
