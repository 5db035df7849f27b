"""What a forward exchanges with other processes while it runs, found without running it."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from oomfix.runtime.memory.oom import is_out_of_memory
from oomfix.runtime.processes.sharding import Shards
from oomfix.runtime.state.referenced import names_used

_COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_tensor",
        "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
        "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "gather_object", "broadcast_object_list",
    }
)  # fmt: skip


class Exchanges:
    """What one forward exchanges with other processes while it, or its backward, runs.

    Args:
        forward: the caller's function.
        modules: every module that it may run.

    Attributes:
        of_samples: that it exchanges samples, or what was made of them; None: it does not.
        shards: its FSDP2 modules.

    Raises:
        RuntimeError: its models are distributed in a way that is not supported.
    """

    def __init__(self, forward: Callable[..., Any], modules: list[nn.Module]) -> None:
        self.shards = Shards(modules)
        self._norms = [weakref.ref(module) for module in modules if isinstance(module, nn.SyncBatchNorm)]
        self.of_samples: str | None = None
        for name in sorted(names_used(forward, modules) & _COLLECTIVES):
            self.of_samples = f"it exchanges samples with other processes ({name})"
        self._begun_at = 0

    @property
    def happen(self) -> bool:
        """Whether processes wait for each other inside of the forward or its backward."""
        return bool(self.shards) or self.of_samples is not None or self._normalises_together()

    @property
    def whole_because(self) -> str | None:
        """Why its batches may not be split, or None."""
        if self.of_samples is None and self.shards and not self.shards.can_begin_again:
            return "FSDP2 can be brought back after an error only by torch 2.13 and on"
        return self.of_samples

    def _normalises_together(self) -> bool:
        return any(module.training for place in self._norms if (module := place()) is not None)

    def begin(self) -> None:
        """A try begins, everywhere with nothing but shards."""
        self.shards.gather_nothing()
        self._begun_at = self._total()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context whose exchanges are none of the forward's own."""
        before = self._total()
        yield
        self._begun_at += self._total() - before

    def position(self) -> int:
        """The exchanges since the try began."""
        return self._total() - self._begun_at

    def notice(self) -> None:
        """Learn from a try that went well whether it exchanged something that was not foreseen."""
        if self.position():
            self.of_samples = "it exchanges tensors with other processes"

    def can_finish(self) -> bool:
        """Whether a try that failed half way can be run to its end on a single sample, for those who wait for it."""
        only_shards = self.of_samples is None and not self._normalises_together()
        return bool(self.shards) and only_shards and self.shards.can_begin_again and len(self.shards.groups()) == 1

    def finish(self, run: Callable[[], None]) -> None:
        """Make what is left of the exchanges since `begin`, where that can be done; `run` makes all of them."""
        if not self.can_finish():
            return
        self.shards.begin_again()
        with self.shards.leaving_out(self.position()):
            try:
                run()
            except RuntimeError as error:
                # not even one sample fits; the position tells who got how far
                if not is_out_of_memory(error):
                    raise

    def reset(self) -> bool:
        """Bring models back to where they were before the try; whether that can be done."""
        if not self.shards:
            return True
        if not self.shards.can_begin_again:
            return False
        self.shards.begin_again()
        return True

    def _total(self) -> int:
        groups: Iterable[Any] = {dist.group.WORLD: None, **dict.fromkeys(self.shards.groups())}
        return sum(group._get_sequence_number_for_group() for group in groups)
