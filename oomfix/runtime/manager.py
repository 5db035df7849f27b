"""The manager: one training iteration, from the batch to the step, in the memory there is."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from oomfix.presets import Preset
from oomfix.runtime import compat, precision, sizing
from oomfix.runtime.accumulation import Divisor, Window, windows
from oomfix.runtime.batch import Batch
from oomfix.runtime.checkpointing import enable_checkpointing
from oomfix.runtime.iteration import CannotSplit, Iteration
from oomfix.runtime.known import Known, KnownForwards
from oomfix.runtime.oom import DoesNotFitError, free_what_is_left, is_out_of_memory
from oomfix.runtime.outputs import detached
from oomfix.runtime.report import Report
from oomfix.runtime.stepping import Stepper, parameters_of
from oomfix.runtime.verify import check

_log = logging.getLogger("oomfix")
_T = TypeVar("_T")
_MayBePrecision = (RuntimeError, TypeError, ValueError)


class MemoryManager:
    """Trains whole batches in less memory. Made by `oomfix.runtime.preset`, one per process.

    Making one touches no CUDA.

    Args:
        preset: the budget and the policies.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._checkpointed = False
        self._said: set[str] = set()
        self._forwards = KnownForwards(preset.first_micro_batches)
        self._window = Window()
        self._backward_divisor = (-1, Divisor())
        self._corrected: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stepper: Stepper | None = None
        self._own_fp16 = False
        self._room = sizing.OptimizerRoom()
        self._limited = False
        self._retries = 0
        self._steps = 0

    @property
    def off(self) -> bool:
        """Whether the script runs as it was: its own precision, whole batches."""
        return self.preset.name == "off"

    # -- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> nn.Module:
        """Put activation checkpointing on `model` where the preset asks for it from the start.

        Returns:
            The same object. Its type, state_dict keys, pickles and deep copies stay as they are.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._prepared.add(model)
        enable_checkpointing(model, self.preset.checkpointing)
        return model

    # -- training ----------------------------------------------------------------------------------------------

    def forward_backward(
        self, forward: Callable[..., Any], /, *batch: Any, batch_size: int | None = None, **named: Any
    ) -> Any:
        """Run `forward(*batch, **named)` and the backward of its loss, in as many pieces as memory asks for.

        Gradients are those of the whole batch, added to what `.grad` holds. After an out-of-memory error the
        call starts again in smaller pieces, as if it had never begun.

        Args:
            forward: returns the loss (one number, a mean or a sum over samples), or a tuple or mapping with the
                loss first or under "loss", and whatever else is wanted of the batch.
            batch: tensors of shape [samples, ...], lists with one entry per sample, containers of them; the rest
                is passed on whole.
            batch_size: number of samples, where it cannot be told from the shapes.
            named: more of the batch, by name.

        Returns:
            What `forward` returned, as for the whole batch, detached.

        Raises:
            DoesNotFitError: out of memory, and the batch cannot be cut any further; says what can be done.
            ValueError: `forward` returned no loss.
        """
        self._before_backward()
        cut = Batch(batch, named, batch_size)
        if self.off:
            return self._as_written(forward, cut)
        known = self._forwards.about(forward, True, self._prepared)
        return self._in_pieces(Iteration(known, forward, cut, trains=True))

    def evaluate(
        self, forward: Callable[..., Any], /, *batch: Any, batch_size: int | None = None, **named: Any
    ) -> Any:
        """Run `forward(*batch, **named)` without gradients, in pieces where the whole does not fit.

        Arguments as for `forward_backward`; `forward` may return anything. Modes of layers are the caller's.

        Returns:
            What `forward` returned, as for the whole batch.
        """
        cut = Batch(batch, named, batch_size)
        with torch.no_grad():
            if self.off:
                return forward(*cut.args, **cut.kwargs)
            known = self._forwards.about(forward, False, self._prepared)
            return self._in_pieces(Iteration(known, forward, cut, trains=False))

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, scaled as precision and accumulation ask, for loops that cannot be split.

        Raises:
            DoesNotFitError: out of memory; the graph is gone by then, so there is no second try.
        """
        self._before_backward()
        if self._window.length > 1:
            loss = loss * self._share_of_window() if not self.off else loss / self._window.length
        try:
            self.stepper.scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"backward ran out of memory ({error}). A loss whose graph exists already cannot be cut; call "
                "memory.forward_backward(forward, *batch), set checkpointing='on', or use a smaller batch."
            ) from None

    def step(self, optimizer: Any, *schedulers: Any, clip_norm: float | None = None, zero_grad: bool = True) -> None:
        """Unscale, clip, step the optimizer, then its schedulers, and drop the gradients.

        An optimizer step is never tried twice. In fp16 a step whose gradients overflowed is skipped, and its
        schedulers with it; `memory.skipped_steps` counts them, one step late where knowing at once would make
        the device wait, and schedulers are then stepped just before the next step.

        Args:
            optimizer: a torch optimizer, or a wrapper with `step` around one.
            schedulers: learning rate schedulers to step after it.
            clip_norm: largest norm of its gradients; None takes the preset's, unless `unscale_` was called.
            zero_grad: False keeps the gradients.
        """
        self._room.release()
        self._correct_backwards(optimizer)
        self.stepper.step(optimizer, clip_norm, self.preset.clip_norm, list(schedulers))
        if zero_grad:
            optimizer.zero_grad()
        self._steps += 1
        every = self.preset.empty_cache_every
        if every is not None and self._steps % every == 0 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def zero_grad(self, optimizer: Any) -> None:
        """Drop the gradients of `optimizer` (or of a model), except in the middle of an accumulation window."""
        if self._window.position == 1:
            optimizer.zero_grad()

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of `optimizer` by the loss scale, before clipping or reading them.

        The preset's `clip_norm` is left out of the next step: whoever unscales clips.
        """
        self._correct_backwards(optimizer)
        self.stepper.unscale(optimizer)

    def accumulate(self, loader: Iterable[_T], k: int) -> Iterator[_T]:
        """The batches of `loader`, of which every `k` share one step: step where `window_closed` is true.

        Losses are averaged over all samples of a window (over all targets, for cross entropies), so a shorter
        last window and a ragged last batch weigh what they should.

        Raises:
            ValueError: `k` is below 1.
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
        """
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.off:
            self._own_fp16 |= enabled and (dtype or torch.get_autocast_dtype(device_type)) == torch.float16
            return torch.autocast(device_type, dtype=dtype, enabled=enabled)
        chosen = precision.dtype_for(self.preset.precision, device_type)
        if chosen is None or not enabled:
            return nullcontext() if chosen is None else torch.autocast(device_type, enabled=False)
        return torch.autocast(device_type, dtype=chosen)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler, for checkpoints of a run; disabled unless precision is fp16."""
        return self.stepper.scaler

    @property
    def stepper(self) -> Stepper:
        """The loss scaler and what belongs to it, made when first asked for."""
        if self._stepper is None or (self._own_fp16 and not self._stepper.scaler.is_enabled()):
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            fp16 = precision.dtype_for(self.preset.precision, device_type) == torch.float16
            self._stepper = Stepper(compat.grad_scaler(device_type, enabled=fp16 or self._own_fp16))
        return self._stepper

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps known to have been skipped because fp16 gradients overflowed."""
        return 0 if self._stepper is None else self._stepper.skipped

    def report(self) -> Report:
        """What was found out and done so far; `str` of it is a few lines for a log."""
        return Report.of(self.preset, self._forwards, self._retries, self.skipped_steps)

    # -- one call ----------------------------------------------------------------------------------------------

    def _in_pieces(self, iteration: Iteration) -> Any:
        """Run an iteration; when it does not fit, put everything back and run it in smaller pieces."""
        known = iteration.known
        known.calls += 1
        known.notice_steps()
        self._choose_precision(iteration)
        iteration.join_window(self._window)
        if iteration.trains and not known.steps_seen and self.preset.micro_batches == "auto":
            iteration.room = self._room
        blamed: str | None = None
        failures = 0
        try:
            self._remember(iteration)
            parts = self._first_parts(iteration)
            while True:
                # an exception keeps the frames that failed, and they keep their tensors: only its text leaves
                # the `except`
                said = None
                try:
                    result = iteration.run(parts, self.stepper.scaler)
                    break
                except CannotSplit as error:
                    known.checked(error.verdict)
                except _MayBePrecision as error:
                    out_of_memory = is_out_of_memory(error)
                    if not out_of_memory and not iteration.failed_in_half():
                        raise
                    said = str(error).splitlines()[0] if str(error) else type(error).__name__
                iteration.put_back()
                if said is None:
                    parts = self._whole(known, self._reason(iteration))
                elif out_of_memory:
                    failures += 1
                    free_what_is_left(thorough=failures > 2)
                    parts = self._smaller(iteration, parts, said)
                else:
                    known.fp32, blamed = True, said
        except BaseException:
            known.fp32 = known.fp32 and blamed is None
            iteration.give_up()
            raise
        finally:
            self._room.release()
        if blamed is not None:
            self._fall_back_to_fp32(known, blamed)
        iteration.finish(parts)
        return result

    @staticmethod
    def _remember(iteration: Iteration) -> None:
        try:
            iteration.remember()
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_what_is_left(thorough=True)
        iteration.remember()

    def _first_parts(self, iteration: Iteration) -> int:
        known, wanted = iteration.known, self.preset.micro_batches
        if self._window.length > 1 and iteration.trains and iteration.batch.whole_because() is None:
            self._check(iteration, 1)  # what a window divides by depends on what the loss is a mean of
        if wanted != "auto" and iteration.trains:
            parts = sizing.fixed_parts(iteration.batch.size, wanted) if wanted > 1 else 1
        else:
            parts = 1
        if known.sizing.splits:
            parts = max(parts, known.sizing.parts(iteration.batch.size, known.least_rows()))
        return self._allowed(iteration, parts) if parts > 1 else 1

    def _smaller(self, iteration: Iteration, parts: int, said: str) -> int:
        """The number of micro-batches to go on with after an out-of-memory error in `parts`."""
        self._retries += 1
        known = iteration.known
        reason = self._reason(iteration)
        following = None
        if reason is None:
            following = known.sizing.failed(iteration.batch.size, parts, known.least_rows())
        if following is not None:
            allowed = self._allowed(iteration, following)
            if allowed > 1:
                self._say(
                    f"{known.name}: out of memory; the batch of {iteration.batch.size} goes on in {following} "
                    "micro-batches. Sizes now follow free memory; micro_batches=N makes runs repeatable.",
                    f"size {known.name} {following}",
                )
                return allowed
            reason = self._reason(iteration)
        if self._checkpoint(known):
            return parts
        if iteration.room is not None:
            # the optimizer may need less than was kept free for it
            iteration.room = None
            return parts
        raise DoesNotFitError(self._no_way_out(iteration, parts, reason, said))

    def _allowed(self, iteration: Iteration, parts: int) -> int:
        """`parts`, or 1 where the batch may not be split."""
        known = iteration.known
        reason = self._reason(iteration)
        if reason is None:
            self._check(iteration, parts)
            reason = self._reason(iteration)
        if reason is not None:
            return self._whole(known, reason)
        if iteration.trains and known.compares_samples():
            self._say(
                f"{known.name}: BatchNorm (or a spectral norm) will see {parts} micro-batches instead of one "
                "batch; running statistics are adjusted, but normalisation is by fewer samples.",
                f"statistics {known.name}",
            )
        return parts

    def _check(self, iteration: Iteration, parts: int) -> None:
        known, batch = iteration.known, iteration.batch
        if batch.size < 2 or self.preset.split == "never" or not known.check_is_due():
            return
        trust = self.preset.split == "always"
        most_rows = math.ceil(batch.size / parts)
        verdict = check(iteration.forward, batch, known.modules(), most_rows, trust)
        known.checked(verdict)
        if trust and verdict.rule is not None and verdict.trusted:
            self._say(
                f"{known.name}: split although samples depend on each other (split='always'): each micro-batch "
                "is trained as if it were the whole batch, and the gradients are not those of the batch.",
                f"trust {known.name}",
            )

    def _reason(self, iteration: Iteration) -> str | None:
        """Why the batch has to stay whole, as far as known; None if nothing speaks against splitting."""
        known = iteration.known
        if self.preset.split == "never":
            return "split='never' was asked for"
        if iteration.trains and (reason := known.must_be_whole()) is not None:
            return reason
        if (reason := iteration.batch.whole_because()) is not None:
            return reason
        if iteration.batch.size < 2:
            return "it is a single sample"
        if known.verdict is not None and known.verdict.rule is None and not known.check_is_due():
            return known.verdict.reason
        return None

    def _whole(self, known: Known, reason: str | None) -> int:
        self._say(f"{known.name}: batches run whole, because {reason}.", f"whole {known.name} {reason}")
        return 1

    def _checkpoint(self, known: Known) -> bool:
        """Turn checkpointing on where the preset keeps it for this case; whether anything changed."""
        if self.preset.checkpointing != "if-needed" or self._checkpointed:
            return False
        self._checkpointed = True
        names = [name for model in {*known.roots(), *self._prepared} for name in enable_checkpointing(model, "on")]
        if names:
            self._say(f"{known.name}: splitting is not enough; checkpointing {len(names)} blocks.", "checkpointing")
        return bool(names)

    def _no_way_out(self, iteration: Iteration, parts: int, reason: str | None, said: str) -> str:
        rows = math.ceil(iteration.batch.size / parts)
        choices = ["checkpointing='on'"] if not self._checkpointed and self.preset.checkpointing != "on" else []
        if reason is not None and self.preset.split == "verified" and iteration.batch.size > 1:
            choices.append("split='always' (gradients are then not those of the whole batch)")
        choices += ["smaller samples (resolution, sequence length)", "a smaller model", "a smaller batch"]
        why = f"the batch cannot be split, because {reason}" if reason else f"{rows} sample(s) at a time do not fit"
        return f"{iteration.known.name}: out of memory, and {why}. Choices: {'; '.join(choices)}. torch said: {said}"

    def _choose_precision(self, iteration: Iteration) -> None:
        known = iteration.known
        device_type = iteration.device_type()
        if device_type == "cuda" and not self._limited:
            self._limited = True
            sizing.limit_memory(self.preset, torch.device("cuda", torch.cuda.current_device()))
        dtype = precision.dtype_for(self.preset.precision, device_type)
        if dtype is None or known.fp32:
            return
        if dtype == torch.float16 and iteration.trains and known.calls == 1 and iteration.batch.size > 1:
            self._check(iteration, iteration.batch.size)
            if known.verdict is not None and known.verdict.needs_gradients:
                self._fall_back_to_fp32(known, "it differentiates by itself, and such gradients underflow in fp16")
                return
        iteration.use_half(device_type, dtype)

    def _fall_back_to_fp32(self, known: Known, said: str) -> None:
        known.fp32 = True
        self._say(f"{known.name}: runs in fp32, because under autocast: {said}", f"fp32 {known.name}")

    # -- smaller pieces ----------------------------------------------------------------------------------------

    def _before_backward(self) -> None:
        if self._stepper is not None:
            self._stepper.before_backward()

    def _as_written(self, forward: Callable[..., Any], batch: Batch) -> Any:
        result = forward(*batch.args, **batch.kwargs)
        loss = Iteration.loss_of(result)
        if self._window.length > 1:
            loss = loss / self._window.length
        self.stepper.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return detached(result)

    def _share_of_window(self) -> float:
        number, divisor = self._backward_divisor
        if number != self._window.number:
            divisor = Divisor()
            self._backward_divisor = (self._window.number, divisor)
        samples = self._window.samples
        return divisor.share(samples, samples * self._window.length)

    def _correct_backwards(self, optimizer: Any) -> None:
        """Gradients of `backward` in a window that held less than expected, corrected once per optimizer."""
        number, divisor = self._backward_divisor
        if number != self._window.number or self._corrected.get(optimizer) == number or self.off:
            return
        self._corrected[optimizer] = number
        factor = divisor.correction()
        if factor != 1.0:
            with torch.no_grad():
                for parameter in parameters_of(optimizer):
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def _say(self, message: str, once: str) -> None:
        if once not in self._said:
            self._said.add(once)
            _log.warning(message)

