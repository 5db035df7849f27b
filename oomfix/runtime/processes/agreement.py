"""What processes tell each other besides tensors: small whole numbers, from host to host."""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

_agreements: "weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement]" = weakref.WeakKeyDictionary()


class Agreement:
    """Numbers exchanged between the processes of a group, without waiting for what their devices compute.

    It has connections of its own (gloo), so that nothing it sends is mixed up with the tensors of the group.

    Args:
        group: the processes; all of them make their agreement at the same point of the program.
    """

    def __init__(self, group: "dist.ProcessGroup") -> None:
        ranks = dist.get_process_group_ranks(group)
        # making a group is a matter of all processes, unless it is said to be one of its members
        everyone = len(ranks) == dist.get_world_size()
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=not everyone)
        # torch holds it until destroy_process_group, and its threads shall end there
        self._group = weakref.ref(made)

    def largest(self, numbers: list[int], limit_s: float | None = None) -> list[int]:
        """The largest of what the processes give, place by place; all give as many numbers.

        Args:
            numbers: what this process gives.
            limit_s: how long to wait for the others (seconds); None: as long as the program set when it began.

        Raises:
            RuntimeError: another process is gone, or did not come in time.
        """
        together = torch.tensor(numbers, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if limit_s is not None:
            # of the operation, not of the wait for it: one that nobody waits for keeps the process from ending
            options.timeout = timedelta(seconds=limit_s)
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        try:
            group.allreduce([together], options).wait()
        except RuntimeError as error:
            raise RuntimeError(
                "another process is gone, or did not come here in time: it failed, as its own log says, or had fewer "
                f"batches, and all must make the same calls ({error})"
            ) from error
        return [int(number) for number in together.tolist()]


def agreement_in(group: "dist.ProcessGroup") -> Agreement:
    """The agreement of the processes in `group`, made at the first call."""
    if group not in _agreements:
        _agreements[group] = Agreement(group)
    return _agreements[group]
