"""Layers that treat a batch as one: normalisation by batch statistics, running statistics, dropout."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def uses_batch_statistics(modules: Iterable[nn.Module]) -> bool:
    """Whether some layer normalises by the samples it is given: BatchNorm, except a frozen one."""
    return any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in modules)


def iterates_power(modules: Iterable[nn.Module]) -> bool:
    """Whether some layer estimates its spectral norm a little better on each forward."""
    return any(m.training and any(True for _ in _power_iterations(m)) for m in modules)


def changes_its_code(modules: Iterable[nn.Module]) -> bool:
    """Whether a layer that `quiet` puts in eval mode is of the program's own: it may compute something else there.

    The layers of torch itself compute the same with other statistics.
    """
    return any(
        isinstance(m, _NormBase) and m.training and type(m).forward.__module__.partition(".")[0] != "torch"
        for m in modules
    )


@contextmanager
def quiet(modules: Iterable[nn.Module]) -> Iterator[None]:
    """BatchNorm and Dropout in eval mode, power iterations stopped, everything else in the mode it is in.

    Eval mode for all would hide what runs in training only (pairwise attention, balance losses).
    """
    modules = list(modules)
    silenced = [m for m in modules if isinstance(m, _NormBase | _DropoutNd) and m.training]
    counts = [(holder, holder.n_power_iterations) for m in modules for holder in _power_iterations(m)]
    for module in silenced:
        module.training = False
    for holder, _ in counts:
        holder.n_power_iterations = 0
    try:
        yield
    finally:
        for module in silenced:
            module.training = True
        for holder, count in counts:
            holder.n_power_iterations = count


class RunningStatistics:
    """Context for a batch in `parts` micro-batches: running statistics move as far as they would for one.

    After k updates with momentum 1 - (1 - m)^(1/k) a running mean has forgotten as much as after one with m. Without
    momentum statistics are averages over all batches so far, of which each counts as k. Batches are counted in the
    first micro-batch only, and power iterations start in each where they did in the first (`after_first`).

    Args:
        modules: every module the forward may run.
        parts: number of micro-batches.
    """

    def __init__(self, modules: Iterable[nn.Module], parts: int) -> None:
        self._parts = parts
        self._norms: list[tuple[Any, float]] = []
        self._counts: list[tuple[dict[str, Any], Any]] = []
        self._vectors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._averages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._left: list[torch.Tensor] = []
        if parts == 1:
            return
        for module in modules:
            if isinstance(module, _NormBase) and module.training:
                if module.momentum is not None:
                    self._norms.append((module, module.momentum))
                elif module.num_batches_tracked is not None:
                    self._averages.append((module.num_batches_tracked, module.num_batches_tracked.clone()))
            self._vectors += [(vector, vector.clone()) for vector in _vectors_of_power(module)]
        self._left = [before for _, before in self._vectors]

    def __enter__(self) -> "RunningStatistics":
        for norm, momentum in self._norms:
            norm.momentum = 1 - (1 - momentum) ** (1 / self._parts)
        for count, _ in self._averages:
            count.mul_(self._parts)
        return self

    def after_first(self) -> None:
        """To be called when the first micro-batch has run; has no effect after the others."""
        # they depend on weights alone: each part goes through those that the whole batch would
        self._left = [vector.clone() for vector, _ in self._vectors]
        for vector, before in self._vectors:
            vector.copy_(before)
        if self._counts:
            return
        self._counts = [(norm._buffers, norm.num_batches_tracked) for norm, _ in self._norms]
        for buffers, _ in self._counts:
            buffers["num_batches_tracked"] = None

    def __exit__(self, *_: object) -> None:
        for buffers, count in self._counts:
            buffers["num_batches_tracked"] = count
        for norm, momentum in self._norms:
            norm.momentum = momentum
        for count, batches in self._averages:
            count.copy_(batches + 1)
        for (vector, _before), reached in zip(self._vectors, self._left, strict=True):
            vector.copy_(reached)


def _power_iterations(module: nn.Module) -> Iterator[Any]:
    """What counts the power iterations of `module`: the parametrisation, or the hook of the older form."""
    if isinstance(module, _SpectralNorm):
        yield module
    yield from (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))


def _vectors_of_power(module: nn.Module) -> Iterator[torch.Tensor]:
    """What power iterations of `module` go on from."""
    if isinstance(module, _SpectralNorm):
        yield from (vector for name, vector in module.named_buffers(recurse=False) if name in ("_u", "_v"))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield from (getattr(module, f"{hook.name}_{end}") for end in "uv")
