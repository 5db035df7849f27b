"""The manager: one training iteration, from the batch to the step, in the memory there is."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from oomfix.presets import Preset
from oomfix.runtime import compat, precision
from oomfix.runtime.arguments import check_autocast, check_forward, check_loss, shown
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.outputs import detached, the_loss
from oomfix.runtime.calls.accumulation import Window, windows
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import KnownForwards
from oomfix.runtime.calls.late_backward import backward_of
from oomfix.runtime.gradients_ahead import GradientsAhead
from oomfix.runtime.memory.cache_janitor import CacheJanitor
from oomfix.runtime.memory.oom import note_choices
from oomfix.runtime.processes.replicas import average_waiting
from oomfix.runtime.recovery.ladder import Ladder
from oomfix.runtime.recovery.model_recovery import RecoveringCalls
from oomfix.runtime.recovery.step_memory import make_step_fit
from oomfix.runtime.report import Report, TechniqueReport, forward_reports
from oomfix.runtime.splitter import Splitter
from oomfix.runtime.steps.loss_scaling import LossScaler
from oomfix.runtime.steps.optimizers import check_optimizer, check_schedulers, innermost, parameters_of
from oomfix.runtime.steps.stepping import check_norm, clip_and_step
from oomfix.runtime.techniques import backward_steps
from oomfix.runtime.techniques.loading import loader_kwargs

_T = TypeVar("_T")


class MemoryManager:
    """Trains whole batches in less memory. Made by `oomfix.runtime.preset`, one per process.

        memory = runtime.preset("16gb")
        loss, out = memory.forward_backward(forward, x, y)
        memory.step(optimizer)

    Making one touches no CUDA.

    Args:
        preset: the budget and the policies.

    Attributes:
        preset: the same.
        off: whether the script runs as it was: in its own precision, in whole batches.
    """

    def __init__(self, preset: Preset) -> None:
        if not isinstance(preset, Preset):
            raise TypeError(
                f'preset: got {preset!r}, expected a Preset; runtime.preset("16gb") makes a manager of a name'
            )
        self.preset = preset
        self.off = preset.name == "off"
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._forwards = KnownForwards(preset.first_micro_batches)
        self._evaluations = KnownForwards(preset.first_micro_batches)
        self._window = Window()
        self._scaler: LossScaler | None = None
        self._ladder = Ladder(preset, self._prepared)
        self._splitter = Splitter(preset, self._ladder)
        self._ahead = GradientsAhead(preset, self._ladder)
        self._calls = RecoveringCalls(preset, self._ladder, self._prepared)
        self._steps = 0
        self._janitor = CacheJanitor()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lean_steps: list[TechniqueReport] = []

    def __copy__(self) -> "MemoryManager":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryManager":
        # one per process: what holds it may be copied (an average of a model, a teacher)
        return self

    def __reduce__(self) -> tuple[type["MemoryManager"], tuple[Preset]]:
        # to another process go the policies; what was learned here holds for these models and this memory
        return MemoryManager, (self.preset,)

    # -- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> nn.Module:
        """Enable activation checkpointing on `model` where the preset asks for it from the start.

        Where the preset has it "if-needed", `forward_backward` puts it on when a call does not fit and may not be split
        any finer, after chunked losses and before offloading (`recovery/ladder.py`), and `memory.forward` when a call
        of a model does not fit. `memory.backward` cannot: by then the graph exists.

        Returns:
            The same object. Its type, state_dict keys, pickles and deep copies stay as they are.

        Raises:
            TypeError: `model` is not a module.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._prepared.add(model)
        self._ladder.prepare(model)
        return model

    def loader_kwargs(self, num_workers: int | None = None) -> dict[str, Any]:
        """Arguments for a `DataLoader`, to be passed with `**`, by the preset's `pin_memory` and `prefetch_factor`.

        Args:
            num_workers: processes that load batches; None: as many as `oomfix.runtime.loader_kwargs` takes.

        Returns:
            Those of `oomfix.runtime.loader_kwargs`; nothing but `num_workers` where the preset is "off".

        Raises:
            ValueError: `num_workers` is out of its range.
        """
        if self.off:
            return {} if num_workers is None else {"num_workers": num_workers}
        arguments = loader_kwargs(num_workers, prefetch_factor=self.preset.prefetch_factor)
        return arguments if self.preset.pin_memory else {**arguments, "pin_memory": False}

    # -- training ----------------------------------------------------------------------------------------------

    def forward_backward(
        self, forward: Callable[..., Any], /, *batch: Any, batch_size: int | None = None, **named: Any
    ) -> Any:
        """Run `forward(*batch, **named)` and the backward of its loss, in as many pieces as memory requires.

        Gradients are those of the whole batch, added to what `.grad` holds. After an out-of-memory error the
        call starts again in smaller pieces, as if it had never begun. Pieces draw the random numbers of the whole
        batch, but for masks of dropout and what `multinomial` and `bernoulli` draw by the values of a tensor
        (`state/whole_draws.py`). Under DistributedDataParallel gradients are averaged over the processes when the call,
        or its accumulation window, is over; all processes make the same calls.

        Args:
            forward: returns the loss (one number, a mean or a sum over samples), or a tuple or mapping with the
                loss first or under "loss", and whatever else is wanted of the batch.
            batch: tensors of shape [samples, ...], lists with one entry per sample, containers of them; the rest
                is passed on whole. Tensors of shape [steps, samples, ...] are cut behind their time steps where
                these show that they depend on each other, and samples do not.
            batch_size: number of samples, where it cannot be told from the shapes. 1: all of it is one sample, an
                episode for example, or the forward keeps state of its own; it is never cut, and recovers all the same.
            named: more of the batch, by name.

        Returns:
            What `forward` returned, as for the whole batch, detached.

        Raises:
            DoesNotFitError: out of memory, and the batch cannot be cut any further; says what can be done.
            TypeError: `forward` is not a function.
            ValueError: `forward` returned no loss, or `batch_size` is out of its range.
            RuntimeError: another process failed in this call, or models are distributed in a way that is refused.

        Source: automatic micro-batches as Composer has them, here verified, weighed, and put back after a failure.
        """
        check_forward(forward)
        cut = Batch(batch, named, batch_size)
        self._before_backward()
        if self.off:
            return self._as_written(forward, cut)
        if self._window.length > 1 and not cut.size:
            return self._forward_of_nothing(forward, cut)
        known = self._forwards.about(forward, True, cut, self._prepared)
        return self._splitter.run(Iteration(known, forward, cut, trains=True), self._window, self.scaler)

    def loss(self, forward: Callable[..., Any], /, *batch: Any, batch_size: int | None = None, **named: Any) -> Any:
        """As `forward_backward`, where something else runs the backward: Accelerate, a scaler of timm.

            loss = memory.loss(forward, x, y)
            accelerator.backward(loss)

        Forward and backward run in this call, in as many pieces as memory requires. Their gradients are kept apart, in
        as much memory as `.grad` takes, until the backward of the loss multiplies them by what comes down to it (a loss
        scale, a division by the number of batches) and adds them to what `.grad` holds. The precision, the scaling and
        the accumulation stay those of whoever runs it. Arguments as for `forward_backward`.

        Where several processes train together, a parameter has a hook, or gradients are switched off, the forward runs
        as it is written.

        Returns:
            What `forward` returned, as for the whole batch, detached but for the loss.

        Raises:
            DoesNotFitError, TypeError, ValueError: as for `forward_backward`.
            RuntimeError: inside of `memory.accumulate`, whose window only `memory.forward_backward` knows of; or the
                loss reaches a tensor with a hook that is no parameter of a module; or, in its backward, the second one,
                or one with `create_graph`.
        """
        check_forward(forward)
        cut = Batch(batch, named, batch_size)
        if self._window.length > 1:
            raise RuntimeError(
                "memory.loss: its backward is not weighed in a window of memory.accumulate; divide the loss by the "
                "number of batches, or call memory.forward_backward"
            )
        if self.off or not torch.is_grad_enabled():
            return forward(*cut.args, **cut.kwargs)
        return self._ahead.result(forward, cut, self._prepared)

    def evaluate(self, forward: Callable[..., Any], /, *batch: Any, batch_size: int | None = None, **named: Any) -> Any:
        """Run `forward(*batch, **named)` without gradients, in pieces where the whole does not fit.

        Arguments as for `forward_backward`; `forward` may return anything. Modes of layers are the caller's.

        Returns:
            What `forward` returned, as for the whole batch.

        Raises:
            DoesNotFitError, TypeError, ValueError: as for `forward_backward`.
        """
        check_forward(forward)
        cut = Batch(batch, named, batch_size)
        with torch.no_grad():
            if self.off:
                return forward(*cut.args, **cut.kwargs)
            known = self._evaluations.about(forward, False, cut, self._prepared)
            return self._splitter.run(Iteration(known, forward, cut, trains=False), self._window, self.scaler)

    def forward(self, model: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """`model(*args, **named)` under the preset's precision, for loops that cannot be split.

        A call that runs out of memory starts again, with checkpointing and then with activations in host memory, as if
        it had never begun (`oomfix.runtime.recovery.model_recovery`).

        Returns:
            What the model returned, floating tensors of half precision as fp32: losses stay outside of autocast.

        Raises:
            OutOfMemoryError: torch's own, where that is not enough.
        """
        if not callable(model):
            raise TypeError(f"model: got {shown(model)}, expected a model or a function")
        if self.off:
            return model(*args, **named)
        try:
            return self._calls.run(model, args, named)
        except RuntimeError as error:
            on = "" if self.preset.checkpointing == "on" else "checkpointing='on', "
            note_choices(
                error,
                f"this loop runs whole batches. Choices: {on}a smaller batch, or memory.forward_backward(forward, "
                "*batch), which starts again in micro-batches",
            )
            raise

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, scaled as precision and accumulation ask, for loops that cannot be split.

        Raises:
            DoesNotFitError: out of memory; the graph is gone by then, so there is no second try. The next call of each
                model that went through `memory.forward` takes a technique more.
            TypeError: `loss` is not a tensor.
            ValueError: it has more than one number, or no graph.
            RuntimeError: inside of `accumulate`, it cannot be weighed: see there what else shares its window.
        """
        check_loss(loss, options)
        self._before_backward()
        backward_of(loss, options, self._window, self.scaler, not self.off, self._calls.after_failed_backward)

    def step(self, optimizer: Any, *schedulers: Any, clip_norm: float | None = None, zero_grad: bool = True) -> None:
        """Unscale, clip, step the optimizer, then its schedulers, and drop the gradients.

        An optimizer step is never retried. In fp16 a step whose gradients overflowed is skipped, and its
        schedulers with it; `memory.skipped_steps` counts them, one step late where knowing at once would make
        the device wait, and schedulers are then stepped just before the next step.

        Args:
            optimizer: a torch optimizer, or a wrapper with `step` around one.
            schedulers: learning rate schedulers to step after it.
            clip_norm: largest norm of its gradients; None takes the preset's, unless `unscale_` was called.
            zero_grad: False keeps the gradients.

        Raises:
            TypeError: no optimizer, one whose step needs a closure, or a scheduler that needs a metric.
            ValueError: `clip_norm` is not above 0.
            RuntimeError: in the middle of an accumulation window of this optimizer.

        Source of the loss scale: Micikevicius et al. 2018, "Mixed Precision Training".
        """
        is_new = optimizer not in self._stepped
        if is_new:
            check_optimizer(optimizer)
        check_schedulers(schedulers)
        check_norm(clip_norm)
        if self._window.count:
            self._check_window(optimizer)
            self._complete(optimizer)
        if is_new:
            self._stepped.add(optimizer)
            if (done := make_step_fit(optimizer, self.preset)) is not None:
                self._lean_steps.append(done)
        clip_and_step(optimizer, self.scaler, clip_norm, self.preset.clip_norm, schedulers)
        if zero_grad:
            optimizer.zero_grad()
        self._steps += 1
        self._notice_step(optimizer)
        self._tidy_cache()

    def zero_grad(self, optimizer: Any) -> None:
        """Drop the gradients of `optimizer` (or of a model), except in the middle of an accumulation window.

        Raises:
            TypeError: it has no `zero_grad`.
        """
        if not callable(getattr(optimizer, "zero_grad", None)):
            raise TypeError(f"optimizer: got {shown(optimizer)}, expected an optimizer or a model, with zero_grad")
        if self._window.position == 1:
            optimizer.zero_grad()

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of `optimizer` by the loss scale, before clipping or reading them.

        The preset's `clip_norm` is left out of the next step: whoever unscales clips. Calling it again before the
        step changes nothing.

        Raises:
            TypeError: `optimizer` is not an optimizer.
        """
        check_optimizer(optimizer)
        self._complete(optimizer)
        self.scaler.unscale_(optimizer)

    def accumulate(self, loader: Iterable[_T], k: float) -> Iterator[_T]:
        """The batches of `loader`, of which every `k` share one step: step where `window_closed` is true.

        Losses are averaged over all samples of a window (over all targets, for cross entropies), so a shorter
        last window and a ragged last batch weigh what they should. A loop that is left early takes the samples of
        its last window for the whole window, if the optimizer is stepped after it.

        Raises:
            TypeError: `loader` cannot be iterated over.
            ValueError: `k` is no whole number, or below 1.
            RuntimeError: while iterating, if another such loop was begun in the middle of this one.
        """
        return windows(loader, k, self._window)

    @property
    def window_closed(self) -> bool:
        """Whether the present batch is the last of its window; always true outside `accumulate`."""
        return self._window.closed

    # -- precision ---------------------------------------------------------------------------------------------

    def autocast(
        self, device_type: str | None = None, dtype: torch.dtype | None = None, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Mixed precision for model calls outside `forward_backward`.

        Args:
            device_type: "cuda", "cpu"; None: the GPU if there is one.
            dtype: what the script asks for; used when the preset is "off".
            enabled: False: the script wants fp32 here, and gets it.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: there is no such type of device.
        """
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        check_autocast(device_type, dtype)
        if self.off:
            if enabled and (dtype or compat.autocast_dtype(device_type)) == torch.float16:
                self.scaler.enable()
            return torch.autocast(device_type, dtype=dtype, enabled=enabled)
        if not enabled:
            return torch.autocast(device_type, enabled=False)
        chosen = precision.dtype_for(self.preset.precision, device_type)
        return nullcontext() if chosen is None else torch.autocast(device_type, dtype=chosen)

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler, for checkpoints of a run; disabled unless precision is fp16.

        A `torch.amp.GradScaler` whose `update` need not be called. Its `state_dict` is that of the run: taken after
        a step, it holds what the step found, and schedulers that waited for it have been stepped.
        """
        if self._scaler is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            self._scaler = LossScaler(
                device_type, enabled=precision.dtype_for(self.preset.precision, device_type) == torch.float16
            )
        return self._scaler

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps known to have been skipped because fp16 gradients overflowed."""
        return 0 if self._scaler is None else self._scaler.skipped

    def report(self) -> Report:
        """What was found out and done so far; `str` of it is a few lines for a log."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        return Report(
            preset=self.preset.name,
            forwards=forward_reports((*self._forwards, *self._ahead.forwards), self.preset, trains=True)
            + forward_reports(self._evaluations, self.preset, trains=False),
            steps=self._steps,
            skipped_steps=self.skipped_steps,
            loss_scale=None if scaler is None else scaler.get_scale(),
            retries=self._splitter.retries + self._ahead.splitter.retries,
            windows=self._window.count,
            techniques=(*self._ladder.reports(), *self._lean_steps),
        )

    # -- loops that cannot be split -------------------------------------------------------------------------

    def _before_backward(self) -> None:
        if backward_steps.active:
            clips = self.preset.clip_norm is not None
            backward_steps.check_gradients_are_final(self.scaler.is_enabled(), clips, self._window.length > 1)
        if self._window.length == 1 and self._window.totals.left:
            self._window.forget_left()
        if self._scaler is not None:
            self._scaler.before_backward()

    def _as_written(self, forward: Callable[..., Any], batch: Batch) -> Any:
        result = forward(*batch.args, **batch.kwargs)
        loss = the_loss(result)
        if self._window.length > 1:
            loss = loss / self._window.length
        self.scaler.scale(loss).backward()
        return detached(result)

    def _forward_of_nothing(self, forward: Callable[..., Any], batch: Batch) -> Any:
        """A batch without samples in a window: its loss counts, with no weight."""
        with torch.no_grad():
            result = forward(*batch.args, **batch.kwargs)
        self._window.totals.begin(self._window.position)
        self._window.totals.end(self._window)
        return detached(result)

    def _notice_step(self, optimizer: Any) -> None:
        """Let forwards know that the state of `optimizer` is there; an overflow may have kept it from stepping."""
        for known in self._forwards:
            if not known.steps_seen and (not self.scaler.is_enabled() or getattr(innermost(optimizer), "state", None)):
                known.stepped(optimizer)

    def _tidy_cache(self) -> None:
        every = self.preset.empty_cache_every
        if self.off:
            return
        if every is None:
            self._janitor.after_step()
        elif self._steps % every == 0 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _complete(self, optimizer: Any) -> None:
        """Correct the gradients of a window that held less than expected, and average them over processes."""
        if self._window.closed and not self.off:
            self._window.totals.correct(parameters_of(optimizer))
            average_waiting(parameters_of(optimizer))

    def _check_window(self, optimizer: Any) -> None:
        window = self._window
        if window.closed or self.off or not window.totals.holds(parameters_of(optimizer)):
            return
        raise RuntimeError(
            f"step: batch {window.position} of an accumulation window of {window.length}, whose gradients are not "
            "complete. Step where memory.window_closed is true; after a `break`, close() the iterator that "
            "memory.accumulate returned before stepping"
        )
