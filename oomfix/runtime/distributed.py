"""Training in several processes: what the calls of one forward do together with those of the other processes.

Under DistributedDataParallel every process runs its own micro-batches, as many as its own memory asks for, and
gradients are averaged once, after the last of them: splits may differ, and an out-of-memory error on one process costs
the others nothing but the wait. The price is that gradients are not sent while backward still runs.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.agreement import agreement_in
from oomfix.runtime.oom import DoesNotFitError, is_out_of_memory
from oomfix.runtime.replicas import Replica, average_waiting

__all__ = ["Ranks", "average_waiting", "ranks_of"]


class Ranks:
    """The processes that run the same forward, seen from one of them.

    Args:
        models: the DistributedDataParallel models that the forward may run.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        self._due: list[Replica] = []
        self._told = True

    @contextmanager
    def together(self, trains: bool, due: bool) -> Iterator[None]:
        """Context around one call of the forward, micro-batches, checks and second tries included.

        Args:
            trains: it runs backward too.
            due: what it adds to gradients is complete, and so averaged in the end; False inside of a window.

        Raises:
            RuntimeError: the models have features that work inside of their own backward only.
        """
        replicas = [Replica(model) for model in self._models]
        averaged = [replica for replica in replicas if trains and replica.exchanges]
        self._due, self._told = averaged if due else [], False
        for replica in replicas:
            replica.enter()
        try:
            yield
        except BaseException as error:
            for replica in replicas:
                replica.forget_call()
            # an interrupt reaches all processes, or none is left to be told
            if isinstance(error, Exception):
                self._tell(1 + is_out_of_memory(error) + isinstance(error, DoesNotFitError))
            raise
        for replica in replicas:
            replica.leave(synchronised=due and replica in averaged)
        for replica in averaged:
            if due:
                replica.average()
            else:
                replica.wait()

    def confirm(self) -> None:
        """To be called when the call went well here: wait until it did so everywhere.

        Raises:
            DoesNotFitError: another process ran out of memory and found no way out.
            RuntimeError: another process failed in some other way.
        """
        if not (failure := self._tell(0)):
            return
        rank, kind = divmod(failure, _KINDS)
        reason = f"forward: process {rank} failed in this call, and its own message says why"
        if kind == 1:
            raise RuntimeError(f"{reason}; gradients are as they were before the call")
        raise DoesNotFitError(f"{reason} (out of memory); gradients are as they were before the call")

    def _tell(self, kind: int) -> int:
        """Tell the others how the call went; returns the largest of what all tell, 0 where nobody failed."""
        if self._told or not self._due:
            return 0
        self._told = True
        group = self._due[0].group
        return agreement_in(group).largest([kind and dist.get_rank() * _KINDS + kind])[0]


_KINDS = 4  # numbers for what may become of a call on one process


def ranks_of(roots: Sequence[nn.Module]) -> Ranks | None:
    """The processes that run the forward of `roots` with this one; None where it trains alone.

    A wrapper that cannot be reached from the forward is found among all objects, since it would exchange gradients
    while micro-batches run; averaging those of a model twice does not change them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    found = {module: None for root in roots for module in root.modules() if isinstance(module, DistributedDataParallel)}
    models = list(found) or [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return Ranks(models) if models else None
