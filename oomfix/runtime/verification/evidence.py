"""What the runs of one comparison (`comparison`) are made like, and what they showed."""

from dataclasses import dataclass, field
from typing import Any

import torch

from oomfix.runtime.batches.bounds import Bound
from oomfix.runtime.batches.outputs import Weight
from oomfix.runtime.state.whole_draws import DrawnSize
from oomfix.runtime.verification.counted_first import Amount, Counted
from oomfix.runtime.verification.left_attributes import LeftAttribute
from oomfix.runtime.verification.own_targets import Labels
from oomfix.runtime.verification.told_numbers import ToldNumbers


@dataclass(frozen=True)
class Runs:
    """How the runs of one comparison are made.

    Attributes:
        graph: with gradients on.
        holds_out: cross entropies ignore some targets of the first row. Without it a mean over targets looks
            like one over samples on rows that have no ignored target, and the difference would only show in a
            later batch.
        light: only functions are watched, not every operation: for a forward known to draw no random numbers.
        replays: the parts draw the rows of what the whole drew. If not, they go on drawing, which is the same
            for a forward that draws sample by sample in a loop.
        reverses: the whole draws the same in reverse order, see `probe.Draws`.
        ahead: numbers drawn beforehand from the generators of Python and NumPy, so that the runs draw others.
        mask_gaps: numbers of the comparisons whose masks get a gap in the first row, see `computed_masks`.
        opened: numbers of the hinges that give what goes in, see `hinges`.
        graph_of_whole: with gradients on in the run on all rows, so that its calls are those of a run with gradients:
            forwards register hooks where there is a graph.
        divides: the parts weigh what their losses divide by, which shows in their graphs only, see `divisors`.
        empties: gaps take every row of the first part, not half of its first row.
        own_targets: cross entropies in the parts are divided by what they have in the whole, see `own_targets`.
        counted_means: means in the parts are divided by what the whole has of each, see `counted_first`; (): they stay
            as they are, and are noted. None: they are not watched.
        notes_numbers: what the loss is divided by or multiplied with is noted, see `told_numbers`.
    """

    graph: bool = False
    holds_out: bool = True
    replays: bool = True
    light: bool = False
    reverses: bool = False
    ahead: int = 0
    mask_gaps: frozenset[int] = frozenset()
    opened: frozenset[int] = frozenset()
    graph_of_whole: bool = False
    divides: bool = False
    empties: bool = False
    own_targets: bool = False
    counted_means: Counted | None = None
    notes_numbers: bool = False


@dataclass
class Evidence:
    """What the runs of one comparison showed.

    Attributes:
        whole: the result on all rows, detached.
        parts: the results on the two parts.
        shares: what each part weighs.
        failure: why the forward failed, if it did; there are no results then.
        wrote: what it changes that outlives it, and may depend on, as a sentence.
        changes_gradients: it runs a backward of its own into gradients, or drops some.
        left: attributes that it changes, does not depend on, and that depend on the samples.
        nll_losses: cross entropies with a mean.
        divisors: what the parts weigh, where they are to divide, by its place among what their losses divide by.
        bound: how that is kept away from 0.
        own_targets: where those of the cross entropies stand in the batch, if the parts were divided by them.
        counted_means: as asked for, if the parts together divide by what the whole does.
        miscounted: they do not, as where nothing counts in one of them.
        varies: what a mean divides by is no count, and other than that in a part.
        counts_little: what a mean divides by is no more than a number that the program compares it with.
        amounts: what each mean divides by, of all rows and of both parts, where means were watched.
        numbers: what was noted of the run on all rows and of both parts, where that was asked for.
        means: of each mean in the loss that all rows and both parts have, whether it counts samples.
        calls: functions called by the run on all rows, where these were watched.
        drew: random numbers were drawn.
        drew_besides_torch: some of them from Python's or NumPy's generators, which are not watched.
        draws: how the size of each draw follows the rows.
        once_outside: some were drawn from those, as many by each part as by the whole, from the same numbers on.
        held: targets were held out.
        differentiates: the forward runs a backward of its own.
        bends: a number for the whole batch went into a function that bends at a threshold (clamp, abs, relu).
        counts_nothing: such a number, or one that was compared, was computed, and was 0 on all rows.
        selects: a selection (topk, argmax, a random permutation) was made among as many entries as there are rows, or
            each pair of rows met a threshold.
        leaves: numbers of each sample left torch, where the program may put them into an order unseen.
        hides: a number that depends on several samples was multiplied by 0.
        alike_masks: numbers of the comparisons that gave masks which leave as much of each row, or may by chance.
        empty_masks: of those that gave masks which leave nothing.
        truths: what was found to be true of all rows, see `truths`; none where a part is asked more, or less.
        closed_hinges: numbers of the hinges that gave nothing but 0 on all rows.
        picks: samples, or what belongs to them, were picked by a mask or put into an order.
        terms: numbers [] that were added up to the loss of all rows.
    """

    whole: Any = None
    parts: list[Any] = field(default_factory=list)
    shares: list[Weight] = field(default_factory=list)
    failure: str = ""
    wrote: str = ""
    changes_gradients: bool = False
    left: tuple[LeftAttribute, ...] = ()
    nll_losses: int = 0
    divisors: tuple[int, ...] = ()
    bound: Bound | None = None
    own_targets: tuple[Labels, ...] = ()
    counted_means: Counted = ()
    miscounted: bool = False
    varies: bool = False
    counts_little: bool = False
    amounts: list[list[Amount]] = field(default_factory=list)
    numbers: list[ToldNumbers] = field(default_factory=list)
    means: tuple[bool, ...] = ()
    calls: int = 0
    drew: bool = False
    drew_besides_torch: bool = False
    draws: tuple[DrawnSize, ...] = ()
    once_outside: bool = False
    held: bool = False
    differentiates: bool = False
    bends: bool = False
    counts_nothing: bool = False
    selects: bool = False
    leaves: bool = False
    hides: bool = False
    alike_masks: frozenset[int] = frozenset()
    empty_masks: frozenset[int] = frozenset()
    truths: tuple[bool, ...] = ()
    closed_hinges: frozenset[int] = frozenset()
    picks: bool = False
    terms: list[torch.Tensor] = field(default_factory=list)
