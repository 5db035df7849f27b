"""How far a script has come: the stage it is in, and whether enough of it was seen."""

from collections import Counter

from oomfix.profile.boundary import CardTrace
from oomfix.profile.refusals import CannotSimulate

_PATIENCE_STEPS = 10
_MOST_STEPS_BEFORE_A_STAGE = 400


class EnoughSteps(BaseException):
    """Stops the script; no `except Exception` of the script's holds it up."""


class Progress:
    """Counts optimizers and their steps, and stops the script after `steps` steps of the stage that is asked for.

    Args:
        trace: starts again when the stage begins: peaks, steps and timeline are those of the stage alone.
        steps: optimizer steps to see.
        stage: which stage; each optimizer that is built begins one. 0: the whole run counts.
    """

    def __init__(self, trace: CardTrace, steps: int, stage: int = 0) -> None:
        self._trace, self._steps, self._stage = trace, steps, stage
        self._built = self._steps_before = self._steps_since_built = 0

    @property
    def hurrying(self) -> bool:
        """Whether data loaders may cut an epoch short: two steps of an earlier stage were seen."""
        return self._built < self._stage and self._steps_since_built >= 2

    def optimizer_built(self) -> None:
        """Another optimizer exists."""
        self._built += 1
        self._steps_since_built = 0
        if self._built == self._stage:
            self._trace.start_again()

    @property
    def without_optimizer(self) -> bool:
        """Whether the script has built no optimizer so far."""
        return self._built == 0

    def stepped(self) -> None:
        """Another step is done.

        Raises:
            EnoughSteps: the steps that were asked for are done.
            CannotSimulate: the stage is too far off.
        """
        self._steps_since_built += 1
        if self._built < self._stage:
            self._steps_before += 1
            if self._steps_before >= _MOST_STEPS_BEFORE_A_STAGE:
                raise CannotSimulate(
                    f"stage {self._stage} did not begin within {_MOST_STEPS_BEFORE_A_STAGE} optimizer steps; let the "
                    "script's own arguments make the stages before it shorter"
                )
            return
        # an optimizer that fell behind for long is in use no more
        done = Counter(number for _, _, number in self._trace.steps)
        if min(done.values()) >= self._steps or max(done.values()) >= self._steps + _PATIENCE_STEPS:
            self._trace.end_here()
            raise EnoughSteps

    def ended(self) -> None:
        """The script came to its end by itself.

        Raises:
            CannotSimulate: the stage never began.
        """
        if self._built < self._stage:
            raise CannotSimulate(f"stage {self._stage} never began: the script builds {self._built} optimizer(s)")
