"""One of several processes that train together: collectives that do nothing, and what they hold in memory.

`oomfix profile --ranks N` simulates the first of N processes, as torchrun would start it. DistributedDataParallel keeps
its buckets, which are as large as the gradients. For scripts that train alone, `shares` computes what each of N ranks
would hold.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed import device_mesh
from torch.nn import parallel

from oomfix.profile.boundary import CardTrace, onto_the_card
from oomfix.profile.ledger import Moment
from oomfix.profile.patches import Patches
from oomfix.profile.refusals import CannotSimulate

_NOTHING_TO_DO = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "broadcast_object_list",
)  # fmt: skip


class _Done:
    """The handle of a collective that is over already."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Ranks:
    """The first of `count` processes; with a count of 0, a script that wants several is refused.

    Attributes:
        joined: whether the script made itself one of several.
        blocks: `blocks_of` the largest model seen.
    """

    def __init__(self, patches: Patches, trace: CardTrace, count: int) -> None:
        self.count, self.joined = count, False
        self.blocks = 0, 0
        self._trace, self._watch = trace, trace.watch
        if count:
            patches.set(trace, watch=self._watched)
            places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": 29500}
            os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
            patches.set(torch.cuda, device_count=lambda: count)
            if hasattr(torch, "accelerator"):
                patches.set(torch.accelerator, device_count=lambda: count)
            self._wrappers(patches)
        self._collectives(patches)

    def _watched(self, model: nn.Module) -> None:
        self._watch(model)
        self.blocks = max(self.blocks, blocks_of(model), key=sum)

    def _collectives(self, patches: Patches) -> None:
        def join(*args: Any, **kwargs: Any) -> None:
            if not self.count:
                raise CannotSimulate(
                    "it trains in several processes (torch.distributed); `--ranks N` simulates one of N"
                )
            self.joined = True

        def nothing(*args: Any, **kwargs: Any) -> Any:
            return _Done() if kwargs.get("async_op") else None

        def gather_objects(found: list[Any], own: Any, *args: Any, **kwargs: Any) -> None:
            found[:] = [own] * len(found)

        def mesh(*args: Any, **kwargs: Any) -> None:
            raise CannotSimulate("it lays its model over a mesh of several cards (DeviceMesh), and one is simulated")

        def meet(*args: Any, **kwargs: Any) -> None:
            raise CannotSimulate("it waits for other processes (a store, or RPC), and one process is simulated")

        def spawned(function: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
            function(0, *args)

        patches.set(torch.multiprocessing, spawn=spawned)
        patches.set(device_mesh, init_device_mesh=mesh)
        patches.set(device_mesh.DeviceMesh, __init__=mesh)
        patches.set(
            torch.distributed,
            init_process_group=join,
            init_device_mesh=mesh,
            rendezvous=meet,
            TCPStore=meet,
            destroy_process_group=lambda *args: None,
            is_initialized=lambda: self.joined,
            get_rank=lambda *args, **kwargs: 0,
            get_world_size=lambda *args, **kwargs: self.count if self.joined else 1,
            get_backend=lambda *args, **kwargs: "nccl",
            new_group=lambda *args, **kwargs: None,
            all_gather_object=gather_objects,
            **dict.fromkeys(_NOTHING_TO_DO, nothing),
        )

    def _wrappers(self, patches: Patches) -> None:
        # a large import that few scripts need
        from torch.distributed import fsdp

        trace = self._trace
        wrapper = parallel.DistributedDataParallel

        def wrap(
            self: Any,
            module: nn.Module,
            device_ids: Any = None,
            *args: Any,
            gradient_as_bucket_view: bool = False,
            **kwargs: Any,
        ) -> None:
            nn.Module.__init__(self)
            self.module, self.require_backward_grad_sync, self.device_ids = module, True, device_ids
            self._buckets = _buckets(trace, module, gradient_as_bucket_view)

        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            if self.device_ids:
                inputs, kwargs = onto_the_card((inputs, kwargs))
            return self.module(*inputs, **kwargs)

        def not_synchronised(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            trace.assume("SyncBatchNorm counts as BatchNorm")
            return module

        def shard(*args: Any, **kwargs: Any) -> Any:
            raise CannotSimulate(
                "it shards its model (FSDP); without that call, `--ranks N` computes what each of N ranks would hold"
            )

        patches.set(wrapper, __init__=wrap, forward=forward)
        patches.set(nn.SyncBatchNorm, convert_sync_batchnorm=not_synchronised)
        patches.set(fsdp, FullyShardedDataParallel=shard, fully_shard=shard)


def _buckets(trace: CardTrace, module: nn.Module, hold_gradients: bool) -> list[torch.Tensor]:
    """The flat buffers that gradients are reduced in; one for each data type, whatever their number.

    With `hold_gradients` each gradient is a piece of them, else it is copied there.
    """
    of_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            of_type.setdefault(parameter.dtype, []).append(parameter)
    buckets = []
    for dtype, parameters in of_type.items():
        sizes = [parameter.numel() for parameter in parameters]
        bucket = torch.empty(sum(sizes), dtype=dtype, device="cuda")
        if hold_gradients:
            for parameter, piece in zip(parameters, torch.split(bucket, sizes), strict=True):
                parameter.register_post_accumulate_grad_hook(_move_to(piece.view(parameter.shape)))  # type: ignore[no-untyped-call]
        buckets.append(bucket)
    trace.claim(buckets, "gradients")
    return buckets


def _move_to(piece: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def move(parameter: torch.Tensor) -> None:
        parameter.grad = piece

    return move


@dataclass(frozen=True)
class Shares:
    """What one of several ranks allocates at its peak (bytes), computed from a run that trained alone.

    Attributes:
        ranks: how many there are.
        ddp_bytes: under DistributedDataParallel, whose buckets are as large as the gradients.
        fsdp2_bytes: under `fully_shard` on every block and on the whole: weights, gradients and optimizer state are
            divided; two blocks (the one that runs and the next) and what is outside of blocks are whole while the
            passes last, and in the backward the gradients of two blocks.
    """

    ranks: int
    ddp_bytes: int
    fsdp2_bytes: int


def shares(timeline: Sequence[Moment], block_bytes: int, outside_bytes: int, ranks: int) -> Shares:
    """The shares of `ranks` ranks that each have the batch of the run.

    Args:
        timeline: the moments of the run.
        block_bytes, outside_bytes: weights of the largest block, and of what is in no block (`blocks_of`).
        ranks: how many there are, at least 1.
    """
    gradients = max((moment.breakdown["gradients"] for moment in timeline), default=0)
    whole = [sum(moment.breakdown.values()) for moment in timeline]
    sharded = [_sharded(moment, block_bytes, outside_bytes, ranks) for moment in timeline]
    return Shares(ranks, max(whole, default=0) + gradients, max(sharded, default=0))


def _sharded(moment: Moment, block_bytes: int, outside_bytes: int, ranks: int) -> int:
    lasting = sum(moment.breakdown[name] for name in ("weights", "gradients", "optimizer state"))
    rest = sum(moment.breakdown.values()) - lasting
    if moment.phase == "optimizer":
        # what it makes on the way is as large as the parameters it works on
        return (lasting + moment.breakdown["temporaries"]) // ranks + rest - moment.breakdown["temporaries"]
    in_pass = moment.phase in ("forward", "backward")
    unsharded = 2 * block_bytes + outside_bytes if in_pass else 0
    return lasting // ranks + rest + unsharded + (2 * block_bytes if moment.phase == "backward" else 0)


def blocks_of(model: nn.Module) -> tuple[int, int]:
    """Bytes of the weights of a model's largest block, and of those in no block.

    Blocks are the children of the `ModuleList` or `Sequential` that holds the most weights; without one, the model
    is a single block.
    """
    lists = [module for module in nn.Module.modules(model) if isinstance(module, nn.ModuleList | nn.Sequential)]
    total = _weight_bytes(model)
    if not lists:
        return total, 0
    longest = max(lists, key=_weight_bytes)
    return max(map(_weight_bytes, longest.children()), default=0), total - _weight_bytes(longest)


def _weight_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
