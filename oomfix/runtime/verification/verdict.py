"""What a check found out about a forward."""

from dataclasses import dataclass

from oomfix.runtime.batches.bounds import Bound
from oomfix.runtime.batches.outputs import Rule
from oomfix.runtime.state.whole_draws import DrawnSize
from oomfix.runtime.verification.counted_first import Counted
from oomfix.runtime.verification.left_attributes import LeftAttribute
from oomfix.runtime.verification.own_targets import Labels
from oomfix.runtime.verification.ways import Graphs


@dataclass(frozen=True)
class Verdict:
    """May the batches of a forward be split, and how are the results put together?

    Attributes:
        rule: how the results of micro-batches give the result of the batch; None: it runs whole.
        reason: why it runs whole, as the end of a sentence.
        undecided: the rows left open whether it may be split; others may show more.
        shows_at_once: what speaks against splitting is seen at every call in parts: none that went well had it.
        units: what the loss is a mean of: "rows" (samples), "targets" (what its cross entropies divide by), or
            nothing, a sum ("calls"). In an evaluation without a loss: what some result is a mean of.
        nll_losses: cross entropies with a mean that the forward computes. If `units` is not "targets" although
            there are some, what they divide by must be the same for every sample.
        divisors: which of the means that the program takes itself count, see `divisors`; `units` is "targets" then.
        bound: how these are kept away from 0, if they are.
        own_targets: where those of the cross entropies stand in the batch, if the parts are to be divided by what the
            whole has of each, see `own_targets`; `units` is "rows" then.
        counted_means: what each mean that it takes is over, if those of the parts are to be divided by what the whole
            has, and only running them tells that, see `counted_first`; `units` is "rows" then.
        from_nothing: of rows that have nothing that counts, these were seen to be 0.
        means: of each that its loss has besides, taken by the program itself, whether it counts samples (a constant
            does not); not of those that a loop over samples takes.
        held: a cross entropy was run with targets held out, so a mean over targets would have been seen.
        tells_means: its parts had targets out of proportion to their samples, so means over both are told apart.
        needs_gradients: the forward fails without a graph.
        differentiates: it runs a backward of its own (gradient penalties).
        drew: it draws random numbers.
        calls: functions that it called as gradients were compared; another number shows that it has become another
            computation. 0 where they were not compared, or where it draws, and is compared anew each time.
        draws: how the size of what it draws follows the rows, see `whole_draws`.
        once_outside: it draws as many numbers from the generators of Python and NumPy for a part as for the whole,
            which therefore draw the same.
        left: attributes that it leaves behind, which depend on the samples.
        one_part: of two parts of the rows one had no targets that count, so any function of a cross entropy would have
            passed: a split may have such targets in one micro-batch only.
        single_rows: a single row may be a micro-batch: it was seen to be like others, or not. None: it has not been
            asked for.
        graphs: those of the rows and of two parts of them; None where they were not looked at.
        left_out: rows that were to be compared besides did not fit together.
        trusted: no rule fits, but the user asked for splitting.
    """

    rule: Rule | None
    reason: str = ""
    undecided: bool = False
    shows_at_once: bool = False
    units: str = "rows"
    nll_losses: int = 0
    divisors: tuple[int, ...] = ()
    bound: Bound | None = None
    own_targets: tuple[Labels, ...] = ()
    counted_means: Counted = ()
    from_nothing: bool = False
    means: tuple[bool, ...] = ()
    held: bool = False
    tells_means: bool = False
    needs_gradients: bool = False
    differentiates: bool = False
    drew: bool = True
    calls: int = 0
    draws: tuple[DrawnSize, ...] = ()
    once_outside: bool = False
    left: tuple[LeftAttribute, ...] = ()
    one_part: bool = False
    single_rows: bool | None = None
    graphs: Graphs | None = None
    left_out: bool = False
    trusted: bool = False

    @property
    def divides(self) -> bool:
        """Whether micro-batches have to be asked what their losses divide by."""
        return self.nll_losses > 0 or bool(self.divisors)

    @property
    def may_have_own_targets(self) -> bool:
        """Whether its cross entropies were seen to divide by other numbers of targets in micro-batches."""
        return self.rule is None and self.undecided and self.nll_losses > 1
