"""The ladder: what is switched on for a call that does not fit and may not be split any finer, cheapest first.

Splitting comes before all of it: four micro-batches take 1.05 times as long as the whole batch on GPT-2 (more on models
too small to fill a core), and need a third of the memory. Where samples depend on each other, where the forward
keeps state, and where a single sample does not fit, these are left, in the order of what they cost
(bench/results/techniques-cpu.md):

1. chunked loss: cross entropies over large logits a few rows at a time. 1.05 times the time, a quarter less peak for
   GPT-2 at batch 16; nothing where logits are small.
2. checkpointing: the blocks run again in backward. 1.16 to 1.48 times the time on a CPU, 1.28 as published for GPUs,
   and a third to three quarters less peak.
3. offloading: what is saved for backward waits in host memory, and what modules keep as attributes (attention maps)
   too. No arithmetic, but each byte crosses the bus twice (15.5 GiB each way per step for GPT-2 at batch 16), so it is
   the last.

The leaner optimizer step is no rung: its temporaries never meet activations. `step_memory` foresees what it needs.

A rung that is taken stays for its forward; the call starts again from its beginning with everything put back, so its
gradients are those of a run that began with the rung: bitwise those without for checkpointing and offloading, up to the
order of sums for the chunked loss. Checkpointing that changes gradients all the same (a block that reads hidden state)
is seen on two rows, and taken off; not so where processes are in step, which climb together.
"""

import logging
import math
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from oomfix.presets import Preset
from oomfix.runtime.calls.iteration import Iteration
from oomfix.runtime.calls.known import Known
from oomfix.runtime.recovery.checkpointed_models import CheckpointedModels
from oomfix.runtime.recovery.rungs import Checkpointing, ChunkedLoss, Offloading, Rung
from oomfix.runtime.report import TechniqueReport, short_name

_log = logging.getLogger("oomfix")
_RUNGS = (ChunkedLoss, Checkpointing, Offloading)


class Ladder:
    """The techniques of one manager: which forwards use them, since when, and what they save.

    Args:
        preset: with the policy of each rung: "off", "if-needed" or "on".
        prepared: models that were given to `prepare`.
    """

    def __init__(self, preset: Preset, prepared: Collection[nn.Module]) -> None:
        self._preset = preset
        self._models = CheckpointedModels(prepared)
        self._climbers: weakref.WeakKeyDictionary[Known, _Climber] = weakref.WeakKeyDictionary()

    def prepare(self, model: nn.Module) -> None:
        """Checkpoint `model` where the preset asks for it from the start."""
        if self._preset.checkpointing == "on":
            self._models.checkpoint(model)

    def begin(self, iteration: Iteration) -> None:
        """Let a call use what its forward has taken; at its first call, what the preset has "on".

        The call trains, or runs a model for a loop that stays in place: there the loss is not part of it.
        """
        climber = self._climbers.get(iteration.known)
        if climber is None:
            climber = self._climbers[iteration.known] = _Climber(self._preset, self._models, iteration.trains)
            climber.take_what_is_on(iteration)
        climber.take_what_others_took(iteration)
        if climber.taken:
            climber.surround(iteration)
        if iteration.trains and iteration.known.calls == 1:
            climber.say_what_is_on(iteration)

    def climb(self, iteration: Iteration) -> bool:
        """Take the next rung for a call that ran out of memory and was put back; False where none is left."""
        climber = self._climbers.get(iteration.known)
        if climber is None or not climber.take_next(iteration):
            return False
        climber.surround(iteration)
        return True

    def has_more(self, known: Known) -> bool:
        """Whether some rung is left for a forward."""
        climber = self._climbers.get(known)
        return climber is not None and climber.has_more

    def finish(self, iteration: Iteration, parts: int, reason: str | None) -> None:
        """After a call that went well in `parts` parts, which `reason` kept from being more: say what it took."""
        if parts > 1 or iteration.calls.around is not None:
            climber = self._climbers.get(iteration.known)
            if climber is not None:
                climber.finish(iteration, parts, reason)

    def told(self, known: Known) -> str:
        """What a forward has taken, to follow "out of memory"; "" where it is nothing."""
        climber = self._climbers.get(known)
        return f" even with {climber.told(known)}" if climber is not None and climber.taken else ""

    def choices(self) -> list[str]:
        """The policies that are "off", as arguments of `runtime.preset`."""
        return [f"{kind.field}='if-needed'" for kind in _RUNGS if kind.policy(self._preset) == "off"]

    def reports(self) -> tuple[TechniqueReport, ...]:
        """One report for each technique and forward."""
        return tuple(report for known, climber in self._climbers.items() for report in climber.reports(known))


@dataclass
class _Taken:
    """A rung, the training call of its forward since which it is on, and why."""

    rung: Rung
    since: int
    because: str


class _Climber:
    """One forward on the ladder: the rungs it has taken, and those that are left."""

    def __init__(self, preset: Preset, models: CheckpointedModels, has_losses: bool) -> None:
        self._preset = preset
        self._models = models
        kinds = [kind for kind in _RUNGS if has_losses or kind is not ChunkedLoss]
        self._left: list[Rung] = [kind(models) for kind in kinds if kind.policy(preset) != "off"]
        self.taken: list[_Taken] = []
        self._climbed = False
        self._rows = 0
        self._split_since = 0

    def take_what_is_on(self, iteration: Iteration) -> None:
        """Take what the preset has "on", except checkpointing, which `prepare` puts on models."""
        for rung in list(self._left):
            if rung.policy(self._preset) == "on" and not isinstance(rung, Checkpointing):
                self._take(rung, iteration, f"preset {self._preset.name} has it on")

    def take_what_others_took(self, iteration: Iteration) -> None:
        """Take part in checkpointing that `prepare` or another forward has put on the same models."""
        if not self._models.doubt(iteration) or any(isinstance(taken.rung, Checkpointing) for taken in self.taken):
            return
        on = self._preset.checkpointing == "on"
        because = f"preset {self._preset.name} has it on" if on else "another forward of the model needed it"
        self.taken.append(_Taken(Checkpointing(self._models), iteration.known.calls, because))

    def say_what_is_on(self, iteration: Iteration) -> None:
        """One line about what the forward begins with, and what is left for when memory asks for it."""
        known = iteration.known
        later = ["micro-batches"] if self._preset.split != "never" and self._preset.micro_batches == "auto" else []
        taken = {type(taken.rung) for taken in self.taken}
        later += [rung.title for rung in self._left if type(rung) not in taken]
        begins = iteration.calls.precision() + "".join(f", {begun.rung.told(known)}" for begun in self.taken)
        _log.info(
            f"{known.name}: preset {self._preset.name} begins with {begins}; "
            f"when memory asks for it: {', '.join(later) or 'nothing'}."
        )

    @property
    def has_more(self) -> bool:
        """Whether a rung is left."""
        return bool(self._left)

    def take_next(self, iteration: Iteration) -> bool:
        """Take the first rung that has something to offer."""
        while self._left:
            if self._take(self._left[0], iteration, "the call ran out of memory"):
                self._climbed = True
                return True
        return False

    def _take(self, rung: Rung, iteration: Iteration, because: str) -> bool:
        self._left.remove(rung)
        taken = rung.take(iteration)
        if taken:
            self.taken.append(_Taken(rung, iteration.known.calls, because))
        return taken

    def surround(self, iteration: Iteration) -> None:
        """Let the forwards of a call run inside what was taken."""
        iteration.calls.around = self._around

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            for taken in self.taken:
                taken.rung.around(stack)
            yield

    def finish(self, iteration: Iteration, parts: int, reason: str | None) -> None:
        """Say what this call took, in one line, and leave what was of no use."""
        self._rows = math.ceil(iteration.batch.size / parts)
        if parts > 1 and not self._split_since:
            self._split_since = iteration.known.calls
        if not self._climbed:
            return
        self._climbed = False
        known = iteration.known
        self.taken = [t for t in self.taken if t.rung.saved_bytes(known, self._rows) != 0]
        why = f"its batches cannot be split, because {reason}" if reason else f"{self._rows} sample(s) are the fewest"
        end = f"it goes on with {self.told(known)}" if self.taken else "its second try fitted all the same"
        _log.warning(f"{known.name}: out of memory, and {why}; {end}.")

    def told(self, known: Known) -> str:
        """What is on, as it follows "with"."""
        return ", ".join(taken.rung.told(known) for taken in self.taken)

    def reports(self, known: Known) -> Iterator[TechniqueReport]:
        """What is on."""
        name = short_name(known)
        if self._split_since:
            asked = self._preset.micro_batches
            because = "whole batches ran out of memory" if asked == "auto" else f"micro_batches={asked} was asked for"
            yield TechniqueReport("micro-batches", name, f"training call {self._split_since}", because)
        for taken in self.taken:
            rung, since = taken.rung, f"training call {taken.since}"
            saved_bytes = rung.saved_bytes(known, self._rows)
            yield TechniqueReport(rung.told(known), name, since, taken.because, saved_bytes, rung.measured)
