"""FSDP2 models (`fully_shard`) around one call: their shards, and the way back after a try that failed half way."""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oomfix.runtime.compat import parameter_groups


class Shards:
    """The modules that `fully_shard` was applied to, of the models that a forward may run.

    Args:
        modules: every module that the forward may run.

    Raises:
        RuntimeError: parameters are distributed in a way that is not supported.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._places = [weakref.ref(module) for module in modules if is_sharded(module)]
        self._groups: dict[Any, None] = {}
        _refuse_other_parallelism(modules, bool(self._places))

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def _modules(self) -> list[Any]:
        return [module for place in self._places if (module := place()) is not None]

    def gather_nothing(self) -> None:
        """Give up whole parameters that an evaluation has left, so that all processes begin with shards."""
        for module in self._modules:
            module.reshard()

    def parameters(self) -> list[torch.Tensor]:
        """The shards that this process holds; their gradients appear when a backward is over."""
        found = {id(parameter): parameter for module in self._modules for parameter in module.parameters()}
        return [parameter for parameter in found.values() if is_distributed(parameter)]

    def groups(self) -> list["dist.ProcessGroup"]:
        """The processes that parameters are shared among, each group once; looked up once."""
        if not self._groups:
            for parameter in self.parameters():
                self._groups.update(dict.fromkeys(parameter.device_mesh.get_all_groups()))  # type: ignore[attr-defined]
        return list(self._groups)

    @property
    def can_begin_again(self) -> bool:
        """Whether this torch (2.13 and on) can bring the modules back to a clean state after an error."""
        return all(hasattr(module, "reset_iter_state") for module in self._modules)

    def begin_again(self) -> None:
        """Bring the modules back to the state that they have between iterations."""
        for module in self._modules:
            try:
                module.reset_iter_state()
            except RuntimeError:
                continue  # part of a larger model, which resets it

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Context in which every backward exchanges gradients, also where the program has put that off.

        What waits to be exchanged (`set_requires_gradient_sync(False)`) cannot be told from the gradients of a try that
        fails, and is lost with them; what was exchanged adds up to the same.

        Raises:
            RuntimeError: gradients wait already.
        """
        states = [module._get_fsdp_state() for module in self._modules]
        groups = [group for module in self._modules for group in parameter_groups(module)]
        if any(_waits(group) for group in groups):
            raise RuntimeError(
                "FSDP2: a backward under set_requires_gradient_sync(False) has left gradients that are not exchanged "
                "yet, and that a second try could not put back; run all backwards of an optimizer step through "
                "memory.forward_backward, or none"
            )
        put_off = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
        not_last = [(state._state_ctx, state._state_ctx.is_last_backward) for state in states]
        for group, _, _ in put_off:
            group.reduce_grads = group.all_reduce_grads = True
        for context, _ in not_last:
            context.is_last_backward = True
        try:
            yield
        finally:
            for group, reduces, reduces_all in put_off:
                group.reduce_grads, group.all_reduce_grads = reduces, reduces_all
            for context, is_last in not_last:
                context.is_last_backward = is_last

    @contextmanager
    def leaving_out(self, count: int) -> Iterator[None]:
        """Context in which the first `count` exchanges are not made: they were, before this process failed.

        What they would have brought is left undefined.
        """
        quiet = _Quiet(count)
        owners = [group for module in self._modules for group in parameter_groups(module)]
        before = [(owner, owner._all_gather_comm, owner._reduce_scatter_comm) for owner in owners]
        for owner, gather, scatter in before:
            owner._all_gather_comm = quiet.around(gather)
            owner._reduce_scatter_comm = quiet.around(scatter)
        try:
            yield
        finally:
            for owner, gather, scatter in before:
                owner._all_gather_comm, owner._reduce_scatter_comm = gather, scatter


class _Quiet:
    """Counts exchanges, and leaves out the first ones."""

    def __init__(self, left: int) -> None:
        self.left = left

    def around(self, exchange: Any) -> "_QuietExchange":
        """`exchange`, to be made once those to leave out have passed."""
        return _QuietExchange(self, exchange)


class _QuietExchange:
    """An all-gather or reduce-scatter of FSDP2 that may be left out; memory is that of the exchange inside."""

    def __init__(self, quiet: _Quiet, exchange: Any) -> None:
        self._quiet = quiet
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Make the exchange, or nothing where it was made before."""
        if self._quiet.left > 0:
            self._quiet.left -= 1
            return None
        return self._exchange(*args, **named)


def _waits(group: Any) -> bool:
    """Whether gradients of a parameter group of FSDP2 wait to be exchanged."""
    whole = [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]
    return (
        any(parameter is not None and parameter.grad is not None for parameter in whole)
        or any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params)
        or group._partial_reduce_output is not None
    )


def is_sharded(module: Any) -> bool:
    """Whether `module` is one that `fully_shard` was applied to."""
    # whoever shards has imported this; importing it for nobody takes a good part of a second
    if "torch.distributed.fsdp" not in sys.modules and "torch.distributed._composable" not in sys.modules:
        return False
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_distributed(parameter: torch.Tensor) -> bool:
    """Whether `parameter` is a DTensor: each process holds a part of it."""
    return hasattr(parameter, "placements") and hasattr(parameter, "device_mesh")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this process holds: all of it, unless it is a DTensor."""
    return tensor.detach().to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def _refuse_other_parallelism(modules: list[nn.Module], sharded: bool) -> None:
    for module in modules:
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel":
            raise RuntimeError(
                "FullyShardedDataParallel (FSDP1) is not supported: use fully_shard from torch.distributed.fsdp"
            )
        if kind.__module__.split(".")[0] == "deepspeed":
            raise RuntimeError(
                f"{kind.__name__}: DeepSpeed splits batches and averages gradients by itself; set its own "
                "train_micro_batch_size_per_gpu, without oomfix"
            )
        for name, parameter in module._parameters.items():
            if parameter is None or not is_distributed(parameter):
                continue
            split = sum(placement.is_shard() for placement in parameter.placements)  # type: ignore[attr-defined]
            if not sharded or split > 1:
                raise RuntimeError(
                    f"{kind.__name__}.{name} is a DTensor of a tensor-parallel plan, which is not supported: only "
                    "DistributedDataParallel and fully_shard are"
                )
