"""One call of `forward_backward` or `evaluate`: its micro-batches, and the way back if they fail.

What the call may change is kept before it begins: generators, buffers, attributes, its batch. Gradients that are
there are taken off, so that what a backward leaves when it fails half way belongs to this call alone. Forward and
backward run on the whole batch, or on one micro-batch after the other, whose losses are weighed (`weighing`), whose
random numbers are those of the whole batch (`whole_draws`), and whose results are put together by the rule that the
check found. A try that fails is undone by `put_back`, and the call starts again from its first micro-batch, as if it
had never begun; `give_up` undoes one whose error goes on to the caller. In the end `finish` adds the gradients to those
from before, and remembers what was learned.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch

from oomfix.runtime import compat
from oomfix.runtime.arguments import check_is_first_backward, has_hooks, without_graph
from oomfix.runtime.batches import outputs
from oomfix.runtime.batches.batch import Batch, balanced
from oomfix.runtime.batches.bounds import Bounds
from oomfix.runtime.batches.outputs import Unforeseen
from oomfix.runtime.batches.rows import in_two_parts
from oomfix.runtime.calls.accumulation import Window
from oomfix.runtime.calls.forward_calls import ForwardCalls
from oomfix.runtime.calls.known import Known
from oomfix.runtime.calls.sizing import OptimizerRoom
from oomfix.runtime.calls.weighing import CannotSplit, Shares, Weighing, loss_of_part
from oomfix.runtime.state.gradients import (
    CHANGES_GRADIENTS,
    GradientsAside,
    GradientsNoted,
    has_hook,
    next_node,
    reach,
)
from oomfix.runtime.state.kept_batch import KeptBatch
from oomfix.runtime.state.probe import Probe, Writes
from oomfix.runtime.state.random_state import RandomState, is_generator
from oomfix.runtime.state.referenced import leaves_in, owners_of
from oomfix.runtime.state.running_statistics import RunningStatistics
from oomfix.runtime.state.whole_draws import WholeDraws, most_bytes
from oomfix.runtime.verification.border import Border, Passing
from oomfix.runtime.verification.counted_first import CountedFirst
from oomfix.runtime.verification.divisors import Counted
from oomfix.runtime.verification.left_attributes import LeftBehind
from oomfix.runtime.verification.own_targets import OwnMeans
from oomfix.runtime.verification.truths import Truths
from oomfix.runtime.verification.verdict import Verdict


class Scales(Protocol):
    """What a loss is multiplied by, as by a `torch.amp.GradScaler`."""

    def scale(self, loss: torch.Tensor, /) -> torch.Tensor: ...


class Iteration:
    """The batch of one call. Made when the call begins: what it may change is remembered then.

    Args:
        known: what is known about the forward.
        forward: the caller's function.
        batch: its arguments.
        trains: run backward too.
        keeps_apart: do not add the gradients to those from before.

    Attributes:
        room: holds the memory of the optimizer's state while this is set.
        weighing: what its losses are divided by; None for a whole batch outside of a window, whose loss stays as it is.
        in_window: the loss shares its step with other calls.
        graph_is_spent: a backward that failed has come to a graph made before the call, which none can pass again.
        refused: why this call has to run whole, though its forward may be split elsewhere; None: it need not.
        calls: of the forward.
        apart: in the end, the leaves that got a gradient, each with it, if these are to be kept apart.
    """

    def __init__(
        self, known: Known, forward: Callable[..., Any], batch: Batch, trains: bool, keeps_apart: bool = False
    ) -> None:
        self.known = known
        self.forward = forward
        if known.reading is not None:
            batch.read(known.reading)
        self._tensors = batch.tensors()
        self._given = batch
        self.batch = batch
        self._border: Border | None = None
        with_graph = [tensor for tensor in self._tensors if tensor.grad_fn is not None]
        if trains and (with_graph or known.meets_graphs):
            self._border = Border(with_graph)
            self.batch = self._border.inside(batch)
            self._tensors = self.batch.tensors()
        self._others = [one for one in (*self.batch.args, *self.batch.kwargs.values()) if type(one) is not torch.Tensor]
        self.trains = trains
        self._keeps_apart = keeps_apart
        self.apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.room: OptimizerRoom | None = None
        self.weighing: Weighing | None = None
        self.in_window = False
        self._parts = 1
        self.calls = ForwardCalls(forward)
        self._gradients = GradientsAside()
        self._own_generators = [*known.generators, *filter(is_generator, self._others)]
        self._generators: RandomState | None = None
        self._kept_batch: KeptBatch | None = None
        self._first_node = 0
        self._cuts: list[tuple[int, int]] = []
        self._number = 0
        self._truths: tuple[bool, ...] = ()
        self.graph_is_spent = False
        self.refused: str | None = None

    def remember(self) -> None:
        """Keep what the run may change. May run out of memory, and be called again."""
        known = self.known
        explore = known.explores
        # on a CPU, where memory runs out rarely, only what it was seen to draw from at some call that explored; but a
        # call that is split may find that it takes another branch, and begin again
        every = explore or known.split_calls > 0
        self._generators = RandomState(
            outside_torch=every or known.draws_outside_torch,
            own=self._own_generators,
            of_cpu=every or known.keeps_cpu_generator,
        )
        known.state.keep(explore, self.forward)
        self._kept_batch = KeptBatch(self._others, self._tensors, copies=known.calls == 1 or known.writes_batch)
        if self.trains:
            self._gradients.cover(known.may_get_gradients())
            if self._gradients.held:
                # not the first call of a step: a layer that came since may hold a gradient too
                self._gradients.cover(known.newcomers())
            inputs = [tensor for tensor in self._tensors if tensor.requires_grad and tensor.is_leaf]
            if inputs:
                self._gradients.cover(inputs)

    def _owners(self) -> list[Any]:
        """Where the forward leaves attributes, numbered as in a check."""
        return owners_of(self.forward, self.known.modules())

    def device_type(self) -> str:
        """Where it runs."""
        return self.known.device_type(self._tensors)

    def failed_in_half(self) -> bool:
        """Whether autocast may be to blame for a failure: it was used, in a forward."""
        return self.calls.in_half and self.calls.is_inside and not self.known.fp32

    def join_window(self, window: Window) -> None:
        """Divide the loss by what the accumulation window holds, if there is one, not by this batch alone."""
        self.in_window = self.trains and window.length > 1
        if self.in_window:
            self.weighing = Weighing(self.known.name, self.batch, window)

    def run(self, parts: int, scaler: Scales) -> Any:
        """Forward and backward of `parts` micro-batches; returns the result as of the whole batch, detached.

        Raises:
            CannotSplit: only the whole batch gives the right gradients.
        """
        if self.known.fp32:
            self.calls.model_calls = None
        self._parts = parts
        self._first_node = next_node()
        if parts == 1:
            return self._run_whole(scaler)
        try:
            return self._run_parts(parts, scaler)
        except Unforeseen as error:
            # only its text leaves the `except`: an exception keeps the frames that failed, and they their tensors
            reason = str(error)
        raise CannotSplit(reason, Verdict(None, reason, undecided=True))

    def complete(self) -> None:
        """To be called when all micro-batches have run: the gradients get the right size, and flow on behind inputs.

        May run out of memory, where a graph behind the inputs does; `graph_is_spent` then.
        """
        self._cover_unseen()
        if self.weighing is not None:
            self.weighing.correct(self._gradients)
        if self._border is not None and self._border.leaves():
            self.graph_is_spent = True
            self._gradients.cover(self._border.leaves_behind())
            self._border.flow_on()

    def run_smallest(self, parts: int, scaler: Scales) -> None:
        """Forward and backward as often as `run` would, on the fewest samples: what other processes wait for."""
        for _ in range(parts):
            result = self.call_smallest()
            if self.trains:
                scaler.scale(outputs.the_loss(result)).backward()  # type: ignore[no-untyped-call]
            del result

    def call_smallest(self) -> Any:
        """Forward on the fewest samples."""
        args, kwargs = self.batch.rows(0, min(self.known.least_rows(), self.batch.size))
        return self.calls.run(args, kwargs)

    def put_back(self) -> list[str]:
        """Leave no trace of a run that failed; returns the names of tensors whose old contents are not known."""
        assert self._generators is not None
        self._generators.restore()
        lost = self.known.state.restore()
        if self._kept_batch is not None and not self._kept_batch.restore():
            lost.append("its batch")
            self.known.writes_batch = True
        self._cover_unseen()
        if not self._gradients.drop():
            lost.append("gradients of earlier calls")
            self.known.writes_gradients = True
        if self.weighing is not None:
            self.weighing.put_back()
        if self.room is not None:
            self.room.release()
        return lost

    def give_up(self) -> None:
        """Leave all as it was before the call; the error on its way is what to see, whatever a failed device says."""
        with suppress(RuntimeError):
            if self._kept_batch is not None:
                self.put_back()
        self._cover_unseen()
        self._gradients.put_back()
        if self.weighing is not None:
            self.weighing.withdraw()

    def _cover_unseen(self) -> None:
        if self.trains and self.known.unseen:
            # those that held a gradient before the call are covered already
            self._gradients.cover(self.known.unseen_with_gradients(), touched=True)

    def finish(self, parts: int) -> None:
        """Add the gradients to those that were there, and remember what was learned. To be called after `complete`."""
        known = self.known
        known.state.ran()
        known.writes_batch = known.writes_batch or (self._kept_batch is not None and self._kept_batch.written())
        if known.explores and self._generators is not None:
            known.keeps_cpu_generator = known.keeps_cpu_generator or self._generators.moved_on_cpu()
            known.draws_outside_torch = known.draws_outside_torch or self._generators.moved_outside_torch()
        known.split_calls += parts > 1
        if known.sizing.splits or parts > 1:
            known.sizing.fitted(self.batch.size, parts)
        if not self.trains:
            return
        if self.weighing is not None:
            self.weighing.meet(self._gradients)
        if self._keeps_apart:
            self.apart = self._gradients.take()
        else:
            self._gradients.merge()
        if self.weighing is not None:
            self.weighing.end()

    def _run_whole(self, scaler: Scales) -> Any:
        verdict = self.known.verdict
        bounds = Bounds() if self.weighing is not None and self.weighing.asks_for_bounds(verdict) else None
        # most calls find no gradients, and are known to leave none
        call = self._call_among_gradients if self._gradients.held or self.known.explores else self.calls.run
        with bounds or nullcontext():
            result = call(self.batch.args, self.batch.kwargs)
        if self.trains:
            loss = outputs.the_loss(result)
            if not loss.requires_grad:
                raise without_graph()
            share = 1.0 if self.weighing is None else self.weighing.share_of_whole(loss, verdict, bounds)
            if share:
                self._backward(loss, share, scaler)
        return outputs.detached(result)

    def _call_among_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the whole batch, which finds the gradients that were there before the call."""
        known = self.known
        if self._gradients.held:
            self._gradients.lend(copies=known.writes_gradients)
        noted = GradientsNoted(known.telling_leaves()) if self.trains and known.explores else None
        try:
            result = self.calls.run(args, kwargs)
        except BaseException:
            if noted is not None:
                noted.put_back()  # what the forward has added where no loss has been seen to
            raise
        known.writes_gradients = known.writes_gradients or (noted is not None and noted.grown())
        if self._gradients.held and self._gradients.take_back():
            known.writes_gradients = True
        return result

    def _run_parts(self, parts: int, scaler: Scales) -> Any:
        found = self.known.verdict
        assert found is not None and found.rule is not None
        if self.weighing is None:
            self.weighing = Weighing(self.known.name, self.batch)
        size = self.batch.size
        self._cuts = cuts = balanced(size, parts)
        own_means = self._own_means(found, cuts)
        verdict = self.weighing.begin_parts(found)
        self.known.begin_parts()
        collector = found.rule.collector(size)
        draws = self._whole_draws(verdict)
        left = LeftBehind(verdict.left, self._owners() if verdict.left else (), size)
        shares, went_backward, weighs = Shares(verdict), False, not self.in_window
        with RunningStatistics(self.known.modules(), parts) as statistics:
            for self._number, (start, stop) in enumerate(cuts):
                with draws.part(start, stop), own_means.part(stop - start):
                    result, divided_by = self._forward_rows(start, stop, verdict, shares)
                weight = shares.of(stop - start, divided_by)
                if self.trains:
                    share, loss = self.weighing.share(weight), outputs.the_loss(result)
                    weighs = weighs or bool(share)
                    # a part whose loss is a constant has nothing to add, unless all are
                    if share and loss.requires_grad:
                        self._backward(loss, share, scaler)
                        went_backward = True
                    elif self.known.ranks.in_step:
                        # it adds nothing, but other processes wait for its backward
                        self._backward(loss, share, scaler)
                    elif share:
                        self._expect_way(loss, 0)
                collector.add(result, weight)
                left.add(weight)
                del result
                statistics.after_first()
        # a batch of which nothing counts has nothing to add to its window
        if self.trains and weighs and not went_backward:
            reason = "no micro-batch has a loss with a graph, or anything that counts"
            raise CannotSplit(reason, Verdict(None, reason, undecided=True))
        if isinstance(own_means, OwnMeans):
            own_means.expect_all()
        elif own_means.differ():
            raise Unforeseen("a part of it takes other means when it runs again")
        left.put_together()
        return collector.result()

    def _own_means(self, verdict: Verdict, cuts: list[tuple[int, int]]) -> OwnMeans | CountedFirst:
        """What divides the means in each part by what the whole has; the parts run once if only that tells."""
        if not verdict.counted_means:
            placed = self.batch.placed(self.batch.args, self.batch.kwargs) if verdict.own_targets else {}
            return OwnMeans(verdict.own_targets, placed, self.batch.size)
        counted, draws = CountedFirst(verdict.counted_means, self.batch.size), self._whole_draws(verdict)
        with RunningStatistics(self.known.modules(), len(cuts)) as statistics:
            for start, stop in cuts:
                args, kwargs = self.batch.rows(start, stop)
                with torch.set_grad_enabled(verdict.needs_gradients), draws.part(start, stop), counted.first():
                    self.calls.run(args, kwargs)
                statistics.after_first()
        if lost := self.put_back():
            raise Unforeseen(f"it writes {', '.join(lost[:3])} itself, and would have to run twice")
        if reason := counted.add_up():
            raise CannotSplit(reason, verdict)  # it may be split elsewhere
        return counted

    def _whole_draws(self, verdict: Verdict) -> WholeDraws:
        """What the micro-batches draw, from the generators as they are now."""
        # a model that is compiled would be compiled together with what sees its functions
        draws = verdict.draws or verdict.once_outside
        compiled = draws and any(map(compat.is_compiled, self.known.modules()))
        outside = RandomState(own=self._own_generators, of_cpu=False) if verdict.once_outside else None
        return WholeDraws(None if compiled else verdict.draws, self.batch.size, most_bytes(self._tensors), outside)

    def _forward_rows(self, start: int, stop: int, verdict: Verdict, shares: Shares) -> tuple[Any, list[Counted]]:
        args, kwargs = self.batch.rows(start, stop)
        if self.trains:
            noted = GradientsNoted(self.known.telling_leaves())
            bounds = None if verdict.bound is None else Bounds()
            truths = Truths() if self.known.decides else None
            with bounds or nullcontext(), truths or nullcontext(), self._inside_border():
                result = self.calls.run(args, kwargs)
            self._truths = () if truths is None else tuple(truths.found)
            if noted.put_back():
                raise CannotSplit(CHANGES_GRADIENTS)
            loss = loss_of_part(result)
            divided_by = shares.divided_by(loss, stop - start, bounds)
            if divided_by:
                assert self.weighing is not None
                self.weighing.check_targets(loss, verdict, divided_by[0].amount)
            return result, divided_by
        if not verdict.nll_losses:
            return self.calls.run(args, kwargs), []
        # without a graph the divisors are read as they are computed
        with Probe(Writes(), None) as probe:
            result = self.calls.run(args, kwargs)
        return result, [Counted(weight, weight) for weight in probe.nll_weights]

    def _backward(self, loss: torch.Tensor, share: float, scaler: Scales) -> None:
        known = self.known
        explores = known.explores
        # what the loss reaches may change at any call; a whole call outside a window is put back as it failed
        if self._parts > 1 or self.in_window or self._border is not None or explores or self._keeps_apart:
            found = reach(loss)
            if self._keeps_apart and any(map(has_hook, found.leaves)):
                raise has_hooks()
            # what a reentrant checkpoint runs again in backward meets them as they are
            finds = self._border is not None and self._border.has_found_more
            if found.began_before(self._first_node) or (found.hides_leaves and finds):
                self._meet_graph_from_before()
            self._gradients.cover(found.leaves)
            self._expect_way(loss, found.shape)
            if self._parts > 1 and any(has_hook(leaf) for leaf in found.leaves):
                reason = "a parameter has a hook, which would see gradients of parts"
                raise CannotSplit(reason, Verdict(None, reason, shows_at_once=True))
            known.reaches([leaf for leaf in found.leaves if leaf.requires_grad])
            if explores:
                known.may_reach(leaves_in(self.forward, (self.batch.args, self.batch.kwargs)))
        if self.room is not None:
            self.room.hold([leaf for leaf in self._gradients.leaves if isinstance(leaf, torch.nn.Parameter)])
        scaled = loss if share == 1.0 else loss * share
        passing = Passing(loss, self._first_node) if known.passes_graphs and self._parts == 1 else None
        try:
            scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            # whatever ends a backward half way, Ctrl-C too, leaves gradients in leaves; those reached by this loss for
            # the first time hold nothing but gradients of this call
            found = reach(loss)
            self._gradients.cover(found.leaves, touched=True)
            self.graph_is_spent = passing.has_come if passing is not None else found.began_before(self._first_node)
            if not self.graph_is_spent:
                check_is_first_backward(error)
            raise
        finally:
            if passing is not None:
                passing.end()

    def _expect_way(self, loss: torch.Tensor, shape: int) -> None:
        """Refuse a micro-batch that may compute what no check has seen, until it has been checked with another one."""
        if self._parts == 1:
            return
        start, stop = self._cuts[self._number]
        reason = self.known.refuses_way(loss, shape, self._truths, stop - start)
        if reason is not None:
            first, second = (range(*cut) for cut in self._cuts[max(self._number - 1, 0) :][:2])
            self.known.doubt(in_two_parts(first, second))
            raise CannotSplit(reason, Verdict(None, reason, undecided=True))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Context around a check of the forward, which shows whether it meets graphs from before the call."""
        if not self.trains or not self.known.may_close_border():
            yield
            return
        self._border = self._border or Border(())
        with self._border.checked(self.batch.size):
            yield
        self.known.meets_graphs = self.known.meets_graphs or self._border.has_found_more

    def _inside_border(self) -> AbstractContextManager[Any]:
        border = self._border if self.known.meets_graphs else None
        return nullcontext() if border is None else border.closed(self.batch.size)

    def _meet_graph_from_before(self) -> None:
        """Refuse parts that use such a graph, until it ends at a border; or to end at the inputs of the whole."""
        self.known.passes_graphs = True
        self._border = self._border or Border(())
        if self._parts == 1 and not self._border.has_inputs:
            return
        reason = self._border.met_by(self.forward)
        if self._parts > 1 and not self.known.meets_graphs and self.known.may_close_border():
            self.known.meets_graphs = True
            self.known.doubt([])
            raise CannotSplit(reason, Verdict(None, reason, undecided=True))
        # the graphs behind the inputs are used from elsewhere too, so backward must pass them once
        self._border = None
        self._given.read(self.batch.reading)
        self.batch = self._given
        raise CannotSplit(reason, Verdict(None, reason, shows_at_once=True))
