"""Training in several processes: what the calls of one forward do together with those of the other processes.

Under DistributedDataParallel every process runs its own micro-batches, as many as its own memory asks for, and
gradients are averaged once, after the last of them: splits may differ, and an out-of-memory error on one process costs
the others nothing but the wait. The price is that gradients are not sent while backward still runs. A forward that
goes past the wrapper (`model.module(x)`) has its gradients averaged too, where DistributedDataParallel would let the
replicas drift apart.

Where processes wait for each other inside of a forward or a backward (FSDP2, SyncBatchNorm, losses that gather from
all), they go in step: they agree on the number of micro-batches before, and on how each try ended.
"""

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.memory.oom import DoesNotFitError, is_out_of_memory
from oomfix.runtime.modules import modules_in
from oomfix.runtime.processes.agreement import agreement_in
from oomfix.runtime.processes.exchanges import Exchanges
from oomfix.runtime.processes.replicas import Replica
from oomfix.runtime.processes.sharding import is_sharded
from oomfix.runtime.verification.verdict import Verdict


class Outcome(IntEnum):
    """How one try of a call ended; the larger decides where processes go in step."""

    FINE = 0
    IN_FP32 = 1  # it fails under autocast
    WHOLE = 2  # its micro-batches showed that it may not be split
    FINER = 3  # it ran out of memory
    FAILED = 4
    DOES_NOT_FIT = 5


_log = logging.getLogger("oomfix")
_FINE = 2**40  # parts of one that numbers are compared in
_NOBODY = nullcontext()  # to wait for
_WAIT_S = 60.0  # for processes that may be waiting themselves, for what this one cannot give any more


class Ranks:
    """The processes that run the same forward, seen from one of them: here the only one, with nobody to ask."""

    alone = True
    """Whether there are no others."""

    in_step = False
    """Whether they wait for each other inside of the forward or its backward."""

    whole_because: str | None = None
    """Why its batches may not be split, or None."""

    def together(self, trains: bool, due: bool) -> AbstractContextManager[None]:
        """Context around one call of the forward, micro-batches, checks and second tries included.

        Args:
            trains: it runs backward too.
            due: what it adds to gradients is complete, and so averaged in the end; False inside of a window.

        Raises:
            RuntimeError: the models have features that work inside of their own backward only.
        """
        return _NOBODY

    def same_parts(self, parts: int, most: int) -> int:
        """The number of micro-batches for all: the largest asked for, at most as many as all can make."""
        return max(1, min(parts, most))

    def any_of(self, flag: bool) -> bool:
        """Whether `flag` holds for any process in step."""
        return flag

    def all_have(self, factor: float) -> bool:
        """Whether `factor` is one that gradients may still be multiplied by, now that they are averaged in backward."""
        return True

    def check_together(
        self,
        forward: Callable[..., Any],
        check: Callable[[Callable[..., Any]], Verdict],
        smallest: Callable[[], Any],
    ) -> Verdict:
        """What `check` says of `forward`, which runs as often as the check of any process in step needs it.

        Args:
            forward: the caller's function.
            check: runs the function that it is given on some rows.
            smallest: runs `forward` on as few samples as possible.
        """
        return check(forward)

    def begin_try(self) -> None:
        """To be called before each try."""

    def agreed(self, outcome: Outcome, whole_try: Callable[[], None]) -> Outcome:
        """How a try ended, for all processes in step.

        Args:
            outcome: how it ended here.
            whole_try: makes every exchange of a whole try, on as few samples as possible.

        Raises:
            DoesNotFitError: another process ran out of memory and found no way out.
            RuntimeError: another process failed in some other way.
        """
        return outcome

    def shards(self) -> list[torch.Tensor]:
        """Parameters of which this process holds a part; no graph shows that backward gives them gradients."""
        return []


class Processes(Ranks):
    """Several processes, seen from one of them.

    Args:
        models: the DistributedDataParallel models that the forward may run.
        exchanges: what the forward exchanges with other processes while it runs.
    """

    alone = False

    def __init__(self, models: Sequence[DistributedDataParallel], exchanges: Exchanges) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._exchanges = exchanges
        self._evaluated: list[Replica] = []
        self._due: list[Replica] = []
        self._told = True

    @property
    def in_step(self) -> bool:  # type: ignore[override]
        """Whether they wait for each other inside of the forward or its backward."""
        return self._exchanges.happen

    @property
    def whole_because(self) -> str | None:  # type: ignore[override]
        """Why its batches may not be split, or None."""
        return self._exchanges.whole_because

    @contextmanager
    def together(self, trains: bool, due: bool) -> Iterator[None]:
        """Context around one call, in which DistributedDataParallel exchanges no gradients by itself."""
        replicas = [Replica(model) for place in self._models if (model := place()) is not None]
        self._exchanges.begin()
        self._told = False
        if not trains:
            with self._evaluating(replicas):
                yield
            return
        with self._exchanges.shards.exchanging(), self._training(replicas, due):
            yield

    @contextmanager
    def _evaluating(self, replicas: list[Replica]) -> Iterator[None]:
        self._evaluated = replicas
        for replica in replicas:
            replica.enter_evaluation(self._exchanges.apart)
        try:
            yield
        except Exception as error:  # the forward is the user's, and may fail in any way while others wait
            self._tell_of(error)
            raise
        finally:
            for replica in replicas:
                replica.leave_evaluation()
            self._evaluated = []

    @contextmanager
    def _training(self, replicas: list[Replica], due: bool) -> Iterator[None]:
        averaged = [replica for replica in replicas if replica.exchanges]
        self._due = averaged if due else []
        for replica in replicas:
            replica.enter()
        try:
            yield
        except BaseException as error:
            # whatever ended it, Ctrl-C in a notebook too: the models exchange gradients by themselves again
            for replica in replicas:
                replica.forget_call()
            # an interrupt reaches all processes, or none is left to be told
            if isinstance(error, Exception):
                self._tell_of(error)
            raise
        finally:
            # what is known of a forward does not keep its models alive
            self._due = []
        for replica in replicas:
            replica.leave(synchronised=due and replica in averaged)
        for replica in averaged:
            if due:
                replica.average()
            else:
                replica.wait()

    def same_parts(self, parts: int, most: int) -> int:
        """The number of micro-batches for all: the largest asked for, at most as many as all can make."""
        if not self.in_step:
            return super().same_parts(parts, most)
        _, wanted, fewest = self._meet(Outcome.FINE, parts, -most)
        return max(1, min(wanted, -fewest))

    def any_of(self, flag: bool) -> bool:
        """Whether `flag` holds for any process in step."""
        return bool(self._meet(Outcome.FINE, int(flag), 0)[1]) if self.in_step else flag

    def all_have(self, factor: float) -> bool:
        """Whether `factor` is one that gradients may still be multiplied by, now that they are averaged in backward."""
        if not self._exchanges.shards:
            return True
        number = round(factor * _FINE)
        _, largest, smallest = self._meet(Outcome.FINE, number, -number)
        return largest == -smallest

    def check_together(
        self,
        forward: Callable[..., Any],
        check: Callable[[Callable[..., Any]], Verdict],
        smallest: Callable[[], Any],
    ) -> Verdict:
        """What `check` says of `forward`, which runs as often as the check of any process in step needs it."""
        if not self.in_step:
            return check(forward)

        @functools.wraps(forward)
        def in_step(*args: Any, **kwargs: Any) -> Any:
            self.any_of(True)
            self._exchanges.begin()
            try:
                result = forward(*args, **kwargs)
                self._exchanges.shards.gather_nothing()
                return result
            except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
                # without the frames that failed, and the tensors that they keep
                failure = error.with_traceback(None)
            self._exchanges.finish(smallest)
            self._exchanges.reset()
            raise failure

        verdict = check(in_step)
        # others may need more runs, and this process is a part of them
        while self.any_of(False):
            self._exchanges.begin()
            with torch.no_grad():
                smallest()
        # one that may not split keeps all from it
        refused = self.any_of(verdict.rule is None)
        return Verdict(None, ELSEWHERE) if refused and verdict.rule is not None else verdict

    def begin_try(self) -> None:
        """To be called before each try."""
        for replica in self._evaluated:
            replica.begin_try()
        self._exchanges.begin()

    def agreed(self, outcome: Outcome, whole_try: Callable[[], None]) -> Outcome:
        """How a try ended, for all processes in step; where they are not, for this one."""
        if not self.in_step:
            if outcome is Outcome.FINE:
                self._exchanges.notice()
                self._wait_for_success()
            return outcome
        if outcome is not Outcome.FINE:
            self._exchanges.finish(whole_try)
        position = self._exchanges.position()
        worst, ahead, behind = self._meet(outcome, position, -position)
        if worst != Outcome.FINE and not (ahead == -behind and self._exchanges.reset()):
            self._told = True
            raise DoesNotFitError(_APART)
        return Outcome(worst)

    def shards(self) -> list[torch.Tensor]:
        """Parameters of which this process holds a part; no graph shows that backward gives them gradients."""
        return self._exchanges.shards.parameters()

    def _meet(self, outcome: Outcome, first: int, second: int) -> tuple[int, int, int]:
        """Meet the others, all at the same point: the worst outcome, and the largest of two numbers."""
        limit_s = None if outcome is Outcome.FINE else _WAIT_S
        try:
            code, *numbers = agreement_in(_everyone()).largest([_coded(outcome), first, second], limit_s)
        except RuntimeError as error:
            if limit_s is None:
                raise
            self._told = True
            raise DoesNotFitError(f"{_APART} ({error})") from None
        self._raise_for(code)
        return code // dist.get_world_size(), numbers[0], numbers[1]

    def _wait_for_success(self) -> None:
        """Wait until the call went well everywhere, where gradients are averaged after it."""
        if self._due:
            self._raise_for(agreement_in(self._due[0].group).largest([_coded(Outcome.FINE)])[0])
            # the others exchange gradients from here on, and would take a number for one of those
            self._told = True

    def _tell_of(self, error: Exception) -> None:
        """Tell those who wait that this process gives up."""
        if self._told:
            return
        self._told = True
        no_memory = is_out_of_memory(error) or isinstance(error, DoesNotFitError)
        outcome = Outcome.DOES_NOT_FIT if no_memory else Outcome.FAILED
        try:
            if self.in_step:
                agreement_in(_everyone()).largest([_coded(outcome), 0, 0], _WAIT_S)
            elif self._due:
                agreement_in(self._due[0].group).largest([_coded(outcome)])
        except RuntimeError as unheard:
            # the failure itself is on its way to the caller
            _log.warning(f"the other processes could not be told of it ({unheard})")

    def _raise_for(self, code: int) -> None:
        outcome, rank = divmod(code, dist.get_world_size())
        if outcome < Outcome.FAILED:
            return
        self._told = True
        said = f"process {rank} failed in this call, and its own message says why"
        if outcome == Outcome.DOES_NOT_FIT:
            raise DoesNotFitError(f"{said} (out of memory); gradients are as they were before the call")
        raise RuntimeError(f"{said}; gradients are as they were before the call")


ELSEWHERE = "another process could not go on like this"
_APART = (
    "forward: one process ran out of memory at a point where others wait inside of the forward or backward for it, so "
    "that they cannot start again together; set micro_batches=N, or checkpointing='on'"
)


def _everyone() -> "dist.ProcessGroup":
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _coded(outcome: Outcome) -> int:
    """The outcome with the number of this process, so that the largest tells who."""
    return outcome * dist.get_world_size() + dist.get_rank() if outcome else 0


@functools.cache
def _averages_in_backward() -> bool:
    """Whether a model of this program averages gradients by itself; looked up once, since it takes a while."""
    things = gc.get_objects()
    return any(issubclass(type(thing), DistributedDataParallel) or is_sharded(thing) for thing in things)


def same_everywhere(factor: float) -> bool:
    """Whether gradients that a plain backward has averaged over processes may be multiplied by `factor`.

    They may where all processes do so. To be called by all of them at the same point.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    number = round(factor * _FINE)
    largest, smallest = agreement_in(_everyone()).largest([number, -number])
    return largest == -smallest or not _averages_in_backward()


def _all_replicas(trains: bool) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel of the program; to train, in an order that is the same in all processes.

    Raises:
        RuntimeError: two have the same parameters, and nothing tells which comes first.
    """
    # what waits for the collector here may be gone already in another process
    gc.collect()
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    if not trains:
        return models
    # the collector lists objects in another order in each process
    shapes = {model: repr([(name, tuple(p.shape)) for name, p in model.named_parameters()]) for model in models}
    if len(set(shapes.values())) < len(models):
        raise RuntimeError(
            "forward: no DistributedDataParallel can be seen in what it uses, and of those that exist some have the "
            "same parameters; give the model that it runs to memory.prepare(model)"
        )
    return sorted(models, key=shapes.__getitem__)


def ranks_of(forward: Callable[..., Any], roots: Sequence[nn.Module], trains: bool) -> Ranks:
    """The processes that run `forward`, which may run the models `roots`, together with this one.

    Where no DistributedDataParallel can be reached from the forward, all that exist are taken: one that it runs would
    exchange gradients while micro-batches run, and averaging those of another twice does not change them.

    Raises:
        RuntimeError: the models are distributed in a way that is not supported, or cannot be told apart.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    modules = list({module: None for root in roots for module in modules_in(root)})
    models = [module for module in modules if isinstance(module, DistributedDataParallel)]
    return Processes(models or _all_replicas(trains), Exchanges(forward, modules))
