"""One call of `forward_backward` or `evaluate`: its micro-batches, and the way back if they fail."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from oomfix.runtime import outputs
from oomfix.runtime.accumulation import Divisor, Slot, Window
from oomfix.runtime.batch import Batch, balanced
from oomfix.runtime.gradients import Border, GradientsAside, next_node, reach
from oomfix.runtime.kept_batch import KeptBatch
from oomfix.runtime.known import Known, has_hook
from oomfix.runtime.left_attributes import LeftBehind
from oomfix.runtime.normaliser import mean_nll_weights, share_targets
from oomfix.runtime.outputs import NotZero, Weight
from oomfix.runtime.precision import ModelCalls
from oomfix.runtime.probe import Probe, Writes
from oomfix.runtime.random_state import RandomState, is_generator
from oomfix.runtime.referenced import graph_in, leaves_in, state_of
from oomfix.runtime.running_statistics import RunningStatistics
from oomfix.runtime.sizing import OptimizerRoom
from oomfix.runtime.verdict import Verdict


class CannotSplit(Exception):
    """The micro-batches showed what the check could not see; the batch has to be run whole.

    Attributes:
        verdict: to be used from now on.
    """

    def __init__(self, reason: str, verdict: Verdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = Verdict(None, reason) if verdict is None else verdict


class Iteration:
    """The batch of one call. Made when the call begins: what it may change is remembered then.

    Args:
        known: what is known about the forward.
        forward: the caller's function.
        batch: its arguments.
        trains: run backward too.

    Attributes:
        room: holds the memory of the optimizer's state while this is set.
        in_window: the loss shares its step with other calls.
        graph_is_spent: a backward that failed has passed a graph made before the call, which none can pass again.
        around_forward: makes the context that each forward runs in.
    """

    def __init__(self, known: Known, forward: Callable[..., Any], batch: Batch, trains: bool) -> None:
        self.known = known
        self.forward = forward
        self._tensors = list(batch.tensors())
        self._border = Border(self._tensors if trains else ())
        self._given = batch
        self.batch = batch
        if self._border:
            self.batch = self._border.inside(batch)
            self._tensors = list(self.batch.tensors())
        self.trains = trains
        self.room: OptimizerRoom | None = None
        self._window = Window()
        self._slot = Slot()
        self._divisor_before = Divisor()
        self._parts = 1
        self.in_window = False
        self.around_forward: Callable[[], AbstractContextManager[None]] = nullcontext
        self._model_calls: ModelCalls | None = None
        self._gradients = GradientsAside()
        self._generators: RandomState | None = None
        self._kept_batch: KeptBatch | None = None
        self._in_forward = False
        self._first_node = 0
        self.graph_is_spent = False

    def remember(self) -> None:
        """Keep what the run may change. May run out of memory, and be called again."""
        known = self.known
        explore = known.is_call_to_explore()
        self._generators = RandomState(explore or known.draws_outside_torch, self._own_generators())
        known.state.keep(explore, self.forward)
        self._kept_batch = KeptBatch(self.batch, self._tensors, copies=known.calls == 1 or known.writes_batch)
        if self.trains:
            self._gradients.cover(known.reached())
            self._gradients.cover(known.holding_gradients())
            self._gradients.cover(known.ranks.shards())
            self._gradients.cover(t for t in self._tensors if t.requires_grad and t.is_leaf)

    def _owners(self) -> list[Any]:
        """Where the forward leaves attributes, numbered as in a check."""
        return [*self.known.modules(), *state_of(self.forward)]

    def _own_generators(self) -> list[Any]:
        arguments = (*self.batch.args, *self.batch.kwargs.values())
        return [*self.known.generators, *filter(is_generator, arguments)]

    def device_type(self) -> str:
        """Where it runs."""
        return self.known.device_type(self._tensors)

    def use_half(self, device_type: str, dtype: torch.dtype) -> None:
        """Run the calls of models under autocast."""
        known = self.known
        if known.model_calls is None or known.is_call_to_explore():
            known.model_calls = ModelCalls(known.roots(), device_type, dtype)
        self._model_calls = known.model_calls

    def precision(self) -> str:
        """What its models compute in, for a log."""
        return "fp32" if self._model_calls is None else f"{self._model_calls.dtype_name} autocast"

    def failed_in_half(self) -> bool:
        """Whether autocast may be to blame for a failure: it was used, in a forward."""
        return self._model_calls is not None and self._in_forward and not self.known.fp32

    def join_window(self, window: Window) -> None:
        """Divide the loss by what the accumulation window holds, not by this batch alone."""
        self._window = window
        self.in_window = window.length > 1 and self.trains
        if self.in_window:
            self._slot = window.totals.begin(window.position)
            self._divisor_before = self._slot.divisor.copy()

    def run(self, parts: int, scaler: torch.amp.GradScaler) -> Any:
        """Forward and backward of `parts` micro-batches; returns the result as of the whole batch, detached.

        Raises:
            CannotSplit: only the whole batch gives the right gradients.
        """
        if self.known.fp32:
            self._model_calls = None
        self._parts = parts
        self._first_node = next_node()
        if parts == 1:
            return self._run_whole(scaler)
        verdict = self.known.verdict
        assert verdict is not None and verdict.rule is not None
        self._slot.units = self._slot.units or verdict.units
        if self._slot.units != verdict.units:
            raise CannotSplit("its window is averaged in another way, which was decided at its first batch", verdict)
        size = self.batch.size
        collector = verdict.rule.collector(size)
        left = LeftBehind(verdict.left, self._owners() if verdict.left else (), size)
        shares, went_backward = _Shares(verdict), False
        with RunningStatistics(self.known.modules(), parts) as statistics:
            for start, stop in balanced(size, parts):
                result, weights = self._forward_rows(start, stop, verdict)
                weight = shares.of(stop - start, weights)
                if self.trains:
                    share, loss = self._share(weight), self.loss_of(result)
                    # a part whose loss is a constant has nothing to add, unless all are
                    if share and loss.requires_grad:
                        self._backward(loss, share, scaler)
                        went_backward = True
                    elif self.known.ranks.in_step:
                        # it adds nothing, but other processes wait for its backward
                        self._backward(loss, share, scaler)
                collector.add(result, weight)
                left.add(weight)
                del result
                statistics.after_first()
        if self.trains and not went_backward:
            raise CannotSplit("no micro-batch has a loss with a graph")
        try:
            left.put_together()
            return collector.result()
        except NotZero:
            reason = "the rows checked left open how one of its results is put together"
        raise CannotSplit(reason, Verdict(None, reason, undecided=True))

    def complete(self) -> None:
        """To be called when all micro-batches have run: the gradients get the right size, and flow on behind inputs.

        May run out of memory, where a graph behind the inputs does; `graph_is_spent` then.
        """
        if self.trains and not self.in_window:
            self._gradients.scale(self._slot.divisor.correction())
        if self._border:
            self.graph_is_spent = True
            self._gradients.cover(self._border.leaves_behind())
            self._border.flow_on()

    def correction(self) -> float:
        """The factor by which gradients are off because batch or window held other amounts than its first part."""
        return self._slot.divisor.correction() if self.trains and self._window.closed else 1.0

    def expect_what_was_seen(self) -> None:
        """Divide by what the batch holds from the beginning, when it is run again.

        Raises:
            RuntimeError: it shares a window with batches that cannot be run again.
        """
        if self.in_window:
            raise RuntimeError(
                "accumulate: the batches of this window differ in size (or in targets that count) between processes, "
                "and FSDP2 has averaged their gradients already. Use batches of one size, drop_last=True, or one "
                "larger batch in place of a window; forward_backward splits it as memory asks for"
            )
        self._divisor_before = Divisor(expected=self._slot.divisor.total)

    def run_smallest(self, parts: int, scaler: torch.amp.GradScaler) -> None:
        """Forward and backward as often as `run` would, on the fewest samples: what other processes wait for."""
        for _ in range(parts):
            result = self.call_smallest()
            if self.trains:
                scaler.scale(self.loss_of(result)).backward()  # type: ignore[no-untyped-call]
            del result

    def call_smallest(self) -> Any:
        """Forward on the fewest samples."""
        args, kwargs = self.batch.rows(0, min(self.known.least_rows(), self.batch.size))
        return self._call(args, kwargs)

    def put_back(self) -> list[str]:
        """Leave no trace of a run that failed; returns the names of tensors whose old contents are not known."""
        assert self._generators is not None
        self._generators.restore()
        lost = self.known.state.restore()
        if self._kept_batch is not None and not self._kept_batch.restore():
            lost.append("its batch")
            self.known.writes_batch = True
        self._gradients.drop()
        self._slot.divisor = self._divisor_before.copy()
        if self.room is not None:
            self.room.release()
        return lost

    def give_up(self) -> None:
        """Leave gradients as they were before the call; an error is on its way to the caller."""
        self._gradients.put_back()
        if self.in_window:
            self._slot.divisor = self._divisor_before.copy()
            self._window.totals.withdraw(self._slot)

    def finish(self, parts: int) -> None:
        """Add the gradients to those that were there, and remember what was learned. To be called after `complete`."""
        known = self.known
        known.state.ran()
        known.writes_batch = known.writes_batch or (self._kept_batch is not None and self._kept_batch.written())
        if self._generators is not None and self._generators.moved_outside_torch():
            known.draws_outside_torch = True
        if known.sizing.splits or parts > 1:
            known.sizing.fitted(self.batch.size, parts)
        if not self.trains:
            return
        if self.in_window:
            self._window.totals.meets(self._gradients.leaves, self._gradients.earlier)
        self._gradients.merge()
        if self.in_window:
            self._window.totals.end(self._window)

    @staticmethod
    def loss_of(result: Any) -> torch.Tensor:
        """The loss in what the forward returned.

        Raises:
            ValueError: there is none, or it is not one number.
        """
        loss = outputs.loss_in(result)
        if loss is None or loss.numel() != 1:
            shape = type(result).__name__ if loss is None else f"a tensor of shape {tuple(loss.shape)}"
            raise ValueError(
                f"forward: returned {shape}, expected the loss as a tensor with one number, alone, first in a "
                "tuple, or under 'loss'"
            )
        return loss

    def _run_whole(self, scaler: torch.amp.GradScaler) -> Any:
        result = self._call(self.batch.args, self.batch.kwargs)
        if self.trains:
            loss = self.loss_of(result)
            if not loss.requires_grad:
                raise ValueError(
                    "forward: returned a loss without a graph (requires_grad is False); was it detached, made of "
                    "numbers, or computed under no_grad?"
                )
            share = 1.0
            if self.in_window:
                share = self._share(self._weight_of_whole(loss))
            if share:
                self._backward(loss, share, scaler)
        return outputs.detached(result)

    def _weight_of_whole(self, loss: torch.Tensor) -> Weight:
        """What a whole batch weighs in its window; decides the units of the window at its first call."""
        verdict, slot = self.known.verdict or Verdict(None, undecided=True), self._slot
        # a forward that takes no argument has its batch from elsewhere: that of the loader
        size = self.batch.size if any(True for _ in self.batch.layout()) else max(self._window.samples, 1)
        weights = mean_nll_weights(loss, max(verdict.nll_losses, 1))
        if not slot.units:
            # where the rows checked could not tell, a single cross entropy is what the loss is a mean of
            alone = verdict.undecided and len(weights) == 1 and len(mean_nll_weights(loss, 2)) == 1
            slot.units = "targets" if alone else verdict.units
            # compiled code and reentrant checkpoints hide what they divide by
            if slot.units == "targets" and (not weights or not share_targets(loss, verdict.nll_losses)):
                slot.units = "rows"
        if slot.units != "targets":
            return Weight(size, size)
        if not weights:
            raise RuntimeError(
                f"{self.known.name}: its loss was a mean over the targets of a cross entropy at the first call of this "
                "accumulation window, and what it divides by cannot be read now; use the same loss throughout a "
                "window, and compile the model without its loss"
            )
        if max(weights) != min(weights):
            raise RuntimeError(
                f"{self.known.name}: its cross entropies had the same targets at the first call of this accumulation "
                f"window, and now divide by {weights}, which cannot be weighed apart any more; use the same targets "
                "throughout a window"
            )
        return Weight(size, weights[0])

    def _forward_rows(self, start: int, stop: int, verdict: Verdict) -> tuple[Any, list[float]]:
        args, kwargs = self.batch.rows(start, stop)
        if self.trains:
            result = self._call(args, kwargs)
            if not verdict.nll_losses:
                return result, []
            loss = self.loss_of(result)
            if self._slot.units == "targets" and self.in_window and not share_targets(loss, verdict.nll_losses):
                if self._slot.calls == 1:
                    self._slot.units = "rows"
                reason = "its cross entropies have targets of their own, which no window can weigh apart"
                raise CannotSplit(reason, Verdict(None, reason, nll_losses=verdict.nll_losses))
            return result, mean_nll_weights(loss, verdict.nll_losses)
        if not verdict.nll_losses:
            return self._call(args, kwargs), []
        # without a graph the divisors are read as they are computed
        probe = Probe(Writes(), None)
        with probe:
            return self._call(args, kwargs), probe.nll_weights

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._in_forward = True
        with self.around_forward():
            result = self.in_its_precision(*args, **kwargs)
        self._in_forward = False
        return result

    def in_its_precision(self, *args: Any, **kwargs: Any) -> Any:
        """What the forward returns, with its models under autocast where this call uses it."""
        if self._model_calls is None:
            return self.forward(*args, **kwargs)
        with self._model_calls.active():
            return self.forward(*args, **kwargs)

    def _share(self, weight: Weight) -> float:
        """The factor for the loss of a micro-batch; 0 where it has nothing to add."""
        divisor, size = self._slot.divisor, self.batch.size
        length = self._window.length if self.in_window else 1
        if self._slot.units == "calls":
            # every part of a sum counts in full; a window averages the sums of its calls
            divisor.expected, divisor.total = length, max(self._slot.calls, 1)
            return 1.0 / length
        if self._slot.units == "rows":
            return divisor.share(weight.rows, length * size)
        # the mean loss of no targets is NaN, and NaN times 0 is NaN
        return divisor.share(weight.targets, length * weight.targets * size / weight.rows) if weight.targets else 0.0

    def _backward(self, loss: torch.Tensor, share: float, scaler: torch.amp.GradScaler) -> None:
        known = self.known
        explores = known.is_call_to_explore()
        # what the loss reaches may change at any call; a whole call outside a window is put back as it failed
        if self._parts > 1 or self.in_window or self._border or explores:
            found = reach(loss)
            if (self._parts > 1 or self._border) and found.began_before(self._first_node):
                self._open_border()
                name = graph_in(self.forward)
                what = "a tensor made before" if name is None else repr(name)
                raise CannotSplit(
                    f"it uses {what}, which has a graph of its own that only one backward can pass (give it as "
                    "argument)"
                )
            self._gradients.cover(found.leaves)
            if self._parts > 1 and any(has_hook(leaf) for leaf in found.leaves):
                raise CannotSplit("a parameter has a hook, which would see gradients of parts")
            known.reaches([leaf for leaf in found.leaves if leaf.requires_grad])
            if explores:
                known.may_reach(leaves_in(self.forward, (self.batch.args, self.batch.kwargs)))
        if self.room is not None:
            self.room.hold([leaf for leaf in self._gradients.leaves if isinstance(leaf, torch.nn.Parameter)])
        scaled = loss if share == 1.0 else loss * share
        try:
            scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            # whatever ends a backward half way, Ctrl-C too, leaves gradients in leaves; those reached by this loss for
            # the first time hold nothing but gradients of this call
            found = reach(loss)
            self._gradients.cover(found.leaves, touched=True)
            self.graph_is_spent = found.began_before(self._first_node)
            raise

    def _open_border(self) -> None:
        """Let backward pass the graphs behind the inputs: they are used from elsewhere too, so it must pass once."""
        self._border = Border(())
        self.batch = self._given


class _Shares:
    """The shares of micro-batches, as long as one share is right for all losses in each.

    Args:
        verdict: what the check found.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._first: list[float] | None = None

    def of(self, rows: int, targets: list[float]) -> Weight:
        """The share of a micro-batch of `rows` samples, whose cross entropies divide by `targets`.

        Raises:
            CannotSplit: another share would be right for another loss.
        """
        if not self._verdict.nll_losses:
            return Weight(rows, rows)
        if not targets:
            raise CannotSplit("its cross entropy is in compiled code, where what it divides by cannot be read")
        if self._verdict.units != "calls":
            # all in proportion to the first cross entropy, or to the samples
            base = targets[0] if self._verdict.units == "targets" else rows
            if self._first is None and base:
                self._first = [target / base for target in targets]
            if any(abs(t - first * base) > 1e-6 * base for t, first in zip(targets, self._first or (), strict=False)):
                raise CannotSplit("the parts of its loss are means over different numbers of targets")
        return Weight(rows, targets[0])
