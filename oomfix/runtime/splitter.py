"""The policy of one call: when to split, how finely, what to do when memory runs out, and what to say about it."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from oomfix.presets import Preset
from oomfix.runtime import precision
from oomfix.runtime.calls import sizing
from oomfix.runtime.calls.accumulation import Window
from oomfix.runtime.calls.distributed import ELSEWHERE, Outcome
from oomfix.runtime.calls.iteration import Iteration, Scales
from oomfix.runtime.calls.known import Known
from oomfix.runtime.calls.weighing import CannotSplit
from oomfix.runtime.memory.oom import DoesNotFitError, free_what_is_left, is_out_of_memory
from oomfix.runtime.precision import ModelCalls
from oomfix.runtime.recovery.ladder import Ladder
from oomfix.runtime.verification.judging import SEVERAL_DEPEND
from oomfix.runtime.verification.verdict import Verdict
from oomfix.runtime.verification.verify import check, check_besides

_log = logging.getLogger("oomfix")
_QUARTERS = 4
_CONFIRMS_BEFORE = 128  # calls of a forward
_TWO_TOGETHER = "two micro-batches, which are run together to check a branch that only one of them takes, do not fit"
_MAY_BE_AUTOCAST = (RuntimeError, TypeError, ValueError, IndexError)


class Splitter:
    """Runs iterations in as many pieces as memory asks for and the loss allows.

    Args:
        preset: the policies.
        ladder: the techniques for calls that splitting does not make fit.

    Attributes:
        retries: calls that ran out of memory and started again, each time counted.
    """

    def __init__(self, preset: Preset, ladder: Ladder) -> None:
        self.preset = preset
        self.retries = 0
        self._ladder = ladder
        self._room = sizing.OptimizerRoom()
        self._limited = False
        self._said: set[str] = set()

    def run(self, iteration: Iteration, window: Window, scaler: Scales) -> Any:
        """Run an iteration; when it does not fit, put everything back and run it in smaller pieces."""
        with iteration.known.ranks.together(iteration.trains, window.is_complete_with_the_next()):
            return self._run(iteration, window, scaler)

    def _run(self, iteration: Iteration, window: Window, scaler: Scales) -> Any:
        known = iteration.known
        self._begin(iteration, window)
        blamed: str | None = None
        failures = 0
        try:
            self._remember(iteration)
            parts = self._first_parts(iteration)
            while True:
                outcome, result, said = self._try(iteration, parts, scaler)
                if outcome is Outcome.FINE:
                    break
                self._put_back(iteration)
                if outcome is Outcome.WHOLE:
                    if blamed is not None:
                        # it failed in fp32 too
                        known.fp32, blamed = False, None
                    parts = self._after_news(iteration, parts, said)
                elif outcome is Outcome.FINER:
                    failures += 1
                    free_what_is_left(thorough=failures > 2 or iteration.graph_is_spent)
                    parts = self._smaller(iteration, parts, said)
                elif outcome is Outcome.IN_FP32:
                    known.fp32, blamed = True, said
        except BaseException:
            # whatever ended it, Ctrl-C in a notebook too: all is left as it was before the call
            known.fp32 = known.fp32 and blamed is None
            iteration.give_up()
            raise
        finally:
            self._room.release()
        if blamed is not None:
            self._fall_back_to_fp32(known, blamed)
        iteration.finish(parts)
        self._ladder.finish(iteration, parts, self._reason(iteration) if failures else None)
        return result

    def _begin(self, iteration: Iteration, window: Window) -> None:
        known = iteration.known
        known.begin_call()
        if known.explores:
            self._choose_precision(iteration)
        if known.model_calls is not None and not known.fp32:
            iteration.calls.model_calls = known.model_calls
        if iteration.trains:
            self._ladder.begin(iteration)
        iteration.join_window(window)
        is_sizing = self.preset.micro_batches == "auto" and not known.steps_seen and not known.ranks.in_step
        if iteration.trains and is_sizing:
            iteration.room = self._room

    @staticmethod
    def _try(iteration: Iteration, parts: int, scaler: Scales) -> tuple[Outcome | None, Any, str]:
        """How running `parts` micro-batches ended, the result, and what an error said; None: to be run once more."""
        known, ranks = iteration.known, iteration.known.ranks
        # an exception keeps the frames that failed, and they keep their tensors: only its text leaves the `except`
        result, said = None, ELSEWHERE
        ranks.begin_try()
        try:
            result = iteration.run(parts, scaler)
            iteration.complete()
            outcome = Outcome.FINE
        except CannotSplit as error:
            known.found_out(error.verdict)
            outcome, said = Outcome.WHOLE, str(error)
            if error.verdict.rule is not None:
                # what the forward allows elsewhere stays refused here, if the whole batch turns out not to fit
                iteration.refused = said
        except Exception as error:  # the forward is the user's, and may fail on a part of the batch in any way
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            if is_out_of_memory(error):
                outcome = Outcome.FINER
            elif isinstance(error, _MAY_BE_AUTOCAST) and iteration.failed_in_half():
                outcome = Outcome.IN_FP32
            elif parts > 1 and not iteration.graph_is_spent and not ranks.in_step:
                # a process that others wait for inside of the forward could not join them any more
                outcome, said = Outcome.WHOLE, f"it fails on a part of the batch ({type(error).__name__}: {said})"
                known.found_out(Verdict(None, said, undecided=True))
            else:
                raise
        outcome = ranks.agreed(outcome, partial(iteration.run_smallest, parts, scaler))
        weighing = iteration.weighing
        if outcome is Outcome.FINE and weighing is not None and not ranks.all_have(weighing.correction()):
            # gradients are averaged already, with other weights than they should have
            weighing.expect_what_was_seen()
            return None, None, said
        return outcome, result if outcome is Outcome.FINE else None, said

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

    def _put_back(self, iteration: Iteration) -> None:
        lost = iteration.put_back()
        if lost:
            name = iteration.known.name
            self._say(
                f"{name}: it writes {', '.join(lost[:3])} itself, which was not foreseen at this call: what it wrote "
                "before it ran out of memory stays, and is written again. From now on it is put back where it can be.",
                f"lost {name}",
            )

    def _first_parts(self, iteration: Iteration) -> int:
        known, wanted = iteration.known, self.preset.micro_batches
        if iteration.in_window and iteration.batch.whole_because() is None:
            self._check(iteration, 1)  # what a window divides by depends on what the loss is a mean of
        splits = known.sizing.splits
        may_split = splits or (wanted not in ("auto", 1) and iteration.trains)
        if may_split and (reason := self._unreadable(iteration)) is not None:
            return self._whole(known, reason)
        if wanted != "auto" and iteration.trains:
            parts = sizing.fixed_parts(iteration.batch.size, wanted) if wanted > 1 else 1
        else:
            parts = 1
        if splits:
            parts = max(parts, known.sizing.parts(iteration.batch.size, known.least_rows()))
        if known.ranks.in_step:
            parts = known.ranks.same_parts(parts, iteration.batch.size // known.least_rows())
        return self._allowed(iteration, parts) if parts > 1 else 1

    def _after_news(self, iteration: Iteration, parts: int, said: str) -> int:
        """The number of micro-batches to go on with where `parts` showed what no check has seen: this call is checked.

        A call is checked once, so that it ends.
        """
        known = iteration.known
        known.look_again()
        if parts > 1 and known.ranks.any_of(known.verdict is None):
            return self._allowed(iteration, parts)
        return self._whole(known, self._reason(iteration) or said)

    def _smaller(self, iteration: Iteration, parts: int, said: str) -> int:
        """The number of micro-batches to go on with after an out-of-memory error in `parts`."""
        known = iteration.known
        if iteration.graph_is_spent:
            raise DoesNotFitError(
                f"{known.name}: out of memory in the backward of a graph made before the call. Only one backward can "
                "pass it, so the call cannot start again; gradients are as they were before it. Choices: make that "
                "graph inside of the forward, which runs it in pieces with the rest; checkpointing of the model that "
                f"makes it; detach() what needs no gradient; a smaller batch. torch said: {said}"
            )
        self.retries += 1
        known.look_again()
        reason = self._reason(iteration)
        following = None
        if reason is None:
            reason = self._unreadable(iteration)
        if reason is None:
            following = known.sizing.failed(iteration.batch.size, parts, known.least_rows())
        if known.ranks.any_of(following is None) and following is not None:
            following, reason = None, ELSEWHERE
        if following is not None:
            following = known.ranks.same_parts(following, iteration.batch.size // known.least_rows())
            allowed = self._allowed(iteration, following)
            if allowed > parts:
                self._say(
                    f"{known.name}: out of memory; the batch of {iteration.batch.size} goes on in {allowed} "
                    "micro-batches. Sizes now follow free memory; micro_batches=N makes runs repeatable.",
                    f"size {known.name} {allowed}",
                )
                return allowed
            reason = self._reason(iteration)
        if iteration.trains and self._ladder.climb(iteration):
            # larger micro-batches may fit now; later calls try them
            known.sizing.forget_failures()
            return parts
        if iteration.room is not None:
            # the optimizer may need less than was kept free for it; everything may fit without that
            iteration.room = None
            known.sizing.forget_failures()
            return 1
        raise DoesNotFitError(self._no_way_out(iteration, parts, reason, said))

    def _allowed(self, iteration: Iteration, parts: int) -> int:
        """`parts`, fewer where a check shows that these are too small, or 1 where the batch may not be split.

        More where two micro-batches, which a check has to run together, do not fit.
        """
        known = iteration.known
        known.keep_whole(iteration.batch)
        refused, taken_for = self._refused(iteration), iteration.batch.size
        if refused is None:
            if self._check(iteration, parts):
                if iteration.batch.size != taken_for:
                    known.sizing.recount(taken_for, iteration.batch.size)
                    parts = sizing.fixed_parts(iteration.batch.size, parts)
                if known.ranks.any_of(known.verdict is not None and known.verdict.left_out):
                    return self._smaller(iteration, parts, _TWO_TOGETHER)
                parts = known.ranks.same_parts(parts, iteration.batch.size // known.least_rows())
            refused = self._refused(iteration)
        if refused is not None:
            return self._whole(known, refused)
        if parts > 1 and known.compares_samples():
            self._say(
                f"{known.name}: BatchNorm (or a spectral norm) will see {parts} micro-batches instead of one "
                "batch; running statistics are adjusted, but normalisation is by fewer samples.",
                f"statistics {known.name} {iteration.trains}",
            )
        return parts

    def _unreadable(self, iteration: Iteration) -> str | None:
        """Why the batch has to stay whole where only a check can tell what its lists hold; that has to come first.

        Processes that run in step ask each other the same questions in the same order, so none may ask one more.
        """
        if iteration.known.ranks.in_step or not iteration.batch.may_hold_views:
            return None
        self._check(iteration, 1)
        return self._refused(iteration)

    def _check(self, iteration: Iteration, parts: int) -> bool:
        """Check the forward if it is due; whether it was."""
        known, batch = iteration.known, iteration.batch
        known.keep_whole(batch)
        known.notice_modes()
        alone = batch.size < 2 and not iteration.in_window
        due = not alone and known.check_is_due(batch.size, parts)
        if self.preset.split == "never" or not known.ranks.any_of(due):
            return False
        trust = self.preset.split == "always"
        # a whole call of a window is checked too, to learn what its loss is a mean of
        most_rows = math.ceil(batch.size / (parts if parts > 1 else _QUARTERS))
        if iteration.calls.in_half:
            # the check computes in fp32, where activations are twice as large
            most_rows = math.ceil(most_rows / 2)
        with_gradients = iteration.trains and not known.ranks.shards()
        # so late that it costs nothing, all of it is checked again: gradients may be coupled where losses are not
        earlier = known.earlier() if known.calls < _CONFIRMS_BEFORE else None

        def checked(forward: Callable[..., Any]) -> Verdict:
            verdict = check(forward, batch, known.modules(), most_rows, trust, earlier, with_gradients)
            if verdict.counted_means and not known.ranks.alone:
                verdict = Verdict(None, SEVERAL_DEPEND)
            doubted = () if trust else known.rows_in_doubt
            return check_besides(verdict, forward, batch, known.modules(), doubted) if doubted else verdict

        with iteration.checked():
            verdict = known.ranks.check_together(iteration.forward, checked, iteration.call_smallest)
        known.read(batch, verdict)
        known.checked(verdict, batch.size, parts)
        if verdict.counted_means:
            self._say(
                f"{known.name}: its loss has means over different numbers (of boxes, of what masks leave), which only "
                "running it tells: micro-batches run once more, without gradients, to count these first.",
                f"counted {known.name}",
            )
        if trust and verdict.rule is not None and verdict.trusted:
            self._say(
                f"{known.name}: split although samples depend on each other (split='always'): each micro-batch "
                "is trained as if it were the whole batch, and the gradients are not those of the batch.",
                f"trust {known.name}",
            )
        return True

    def _refused(self, iteration: Iteration) -> str | None:
        """Why the batch has to stay whole, here or in a process in step with this one; None if it need not."""
        reason = self._reason(iteration)
        somewhere = iteration.known.ranks.any_of(reason is not None)
        return ELSEWHERE if somewhere and reason is None else reason

    def _reason(self, iteration: Iteration) -> str | None:
        """Why the batch has to stay whole, as far as known; None if nothing speaks against splitting."""
        known = iteration.known
        if self.preset.split == "never":
            return "split='never' was asked for"
        if iteration.trains and (reason := known.must_be_whole()) is not None:
            return reason
        if (reason := iteration.batch.whole_because()) is not None:
            return reason
        if iteration.refused is not None:
            return iteration.refused
        if iteration.batch.size < 2:
            return "it is a single sample"
        if known.verdict is not None and known.verdict.rule is None and not known.check_is_due(iteration.batch.size):
            return known.verdict.reason
        return None

    def _whole(self, known: Known, reason: str | None) -> int:
        told = f"{known.name}: batches run whole, because {reason}."
        verdict = known.verdict
        is_found = verdict is not None and verdict.rule is None and verdict.reason == reason
        may_have_held = verdict is not None and not verdict.undecided and not verdict.shows_at_once
        if is_found and may_have_held and known.split_calls:
            told += (
                f" This shows only now: {known.split_calls} earlier call(s) were split, and if it held for them too, "
                "theirs were not the gradients of whole batches."
            )
        self._say(told, f"whole {known.name} {reason}")
        return 1

    def _no_way_out(self, iteration: Iteration, parts: int, reason: str | None, said: str) -> str:
        rows = math.ceil(iteration.batch.size / parts)
        choices = self._ladder.choices() if iteration.trains else []
        may_be_split = iteration.batch.size > 1 and (not iteration.trains or iteration.known.must_be_whole() is None)
        if reason not in (None, ELSEWHERE) and self.preset.split == "verified" and may_be_split:
            choices.append("split='always' (gradients are then not those of the whole batch)")
        choices += ["smaller samples (resolution, sequence length)", "a smaller model", "a smaller batch"]
        known = iteration.known
        why = f"the batch cannot be split, because {reason}" if reason else f"{rows} sample(s) at a time do not fit"
        if not reason and rows > 1 and known.verdict is not None and known.verdict.single_rows is False:
            why += (
                ", and it was not seen to take a single one (squeeze() without a dimension takes that of samples too)"
            )
        even = self._ladder.told(known)
        name = known.name
        origins = {
            ELSEWHERE: "It was another process that ran out of memory.",
            _TWO_TOGETHER: f"What is too much: {_TWO_TOGETHER}.",
        }
        origin = origins.get(said, f"torch said: {said}")
        return f"{name}: out of memory{even}, and {why}. Choices: {'; '.join(choices)}. {origin}"

    def _choose_precision(self, iteration: Iteration) -> None:
        known = iteration.known
        earlier, known.model_calls = known.model_calls, None
        device_type = iteration.device_type()
        known.keeps_cpu_generator = known.keeps_cpu_generator or device_type != "cpu"
        if device_type == "cuda" and not self._limited:
            self._limited = True
            sizing.limit_memory(self.preset, torch.device("cuda", torch.cuda.current_device()))
        dtype = precision.dtype_for(self.preset.precision, device_type)
        if dtype is None or known.fp32:
            return
        if dtype == torch.float16 and iteration.trains:
            batch, modules, gradients = iteration.batch, known.modules(), not known.ranks.shards()
            verdict = known.ranks.check_together(
                iteration.forward,
                lambda forward: check(forward, batch, modules, 2, with_gradients=gradients),
                iteration.call_smallest,
            )
            if known.ranks.any_of(verdict.differentiates):
                self._fall_back_to_fp32(known, "it differentiates by itself, and such gradients underflow in fp16")
                return
        if earlier is not None and earlier.computes_in(device_type, dtype):
            earlier.discover()
            known.model_calls = earlier
        else:
            known.model_calls = ModelCalls(known.roots(), device_type, dtype)

    def _fall_back_to_fp32(self, known: Known, said: str) -> None:
        known.fp32 = True
        self._say(f"{known.name}: runs in fp32, because under autocast: {said}", f"fp32 {known.name}")

    def _say(self, message: str, once: str) -> None:
        if once not in self._said:
            self._said.add(once)
            _log.warning(message)
