"""What the losses of one call are multiplied by, so that their gradients add up to that of the whole.

Outside of an accumulation window the whole is the batch: a micro-batch weighs its samples, or the targets that its
cross entropies divide by. Inside of one it is everything in the window: what that will hold is judged by its first
batch, and gradients are corrected at the end if it held something else. What a loss is a mean of is decided once, at
the first call of the window, since gradients that were weighed in another way cannot be told apart later. A part that
weighs nothing gets the share 0, because its mean is NaN. A call that fails withdraws from its window, and may be made
again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from oomfix.runtime.batches import outputs
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.bounds import Bounds
from oomfix.runtime.batches.normaliser import mean_nll_weights
from oomfix.runtime.batches.outputs import Weight, means_over_targets
from oomfix.runtime.calls.accumulation import Proportions, Slot, Window
from oomfix.runtime.state.gradients import GradientsAside
from oomfix.runtime.verification.divisors import (
    Counted,
    Divisor,
    Means,
    are_one,
    as_many,
    common_bound,
    divisors,
    means,
    numbers,
    weights,
)
from oomfix.runtime.verification.judging import PLAIN
from oomfix.runtime.verification.verdict import Verdict


class CannotSplit(Exception):
    """The micro-batches showed what the check could not see; the batch has to be run whole.

    Attributes:
        verdict: to be used from now on.
    """

    def __init__(self, reason: str, verdict: Verdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = Verdict(None, reason) if verdict is None else verdict


def loss_of_part(result: Any) -> torch.Tensor:
    """The loss in the result of a micro-batch.

    Raises:
        CannotSplit: nothing was added to it, as to `total = 0` where no sample has boxes.
    """
    loss = outputs.loss_in(result)
    if loss is None or loss.numel() != 1:
        raise CannotSplit(PLAIN, Verdict(None, PLAIN, undecided=True))
    return outputs.the_loss(result)


class Weighing:
    """The weight of one call.

    Args:
        name: the forward's, for messages.
        batch: its samples, which are not counted before they have to be.
        window: the window that it is a call of; None: it has its step alone, and is run in micro-batches.
    """

    def __init__(self, name: str, batch: Batch, window: Window | None = None) -> None:
        self._name = name
        self._batch = batch
        self._window = window
        self._slot = Slot() if window is None else window.totals.begin(window.position)

    def begin_parts(self, verdict: Verdict) -> Verdict:
        """To be called before micro-batches are run; returns the verdict to run them by.

        Raises:
            CannotSplit: the window decided to average in another way than the forward's check says.
        """
        if not self._slot.units:
            self._slot.units, self._slot.decided_by = verdict.units, verdict
        decided = self._slot.decided_by
        if self._slot.units == "rows" and verdict.units == "targets" and not verdict.divisors:
            # both are one as long as each sample has as many targets, which the parts have to show
            verdict = replace(verdict, units="rows")
        if self._slot.units != verdict.units or (decided is not None and decided.bound != verdict.bound):
            raise CannotSplit("its window is averaged in another way, which was decided at its first batch", verdict)
        return verdict

    def share(self, weight: Weight) -> float:
        """The factor for the loss of a micro-batch; 0 where it has nothing to add."""
        divisor = self._slot.divisor
        length = 1 if self._window is None else self._window.length
        if self._slot.units == "calls":
            # every part of a sum counts in full; a window averages the sums of its calls
            divisor.expected, divisor.total = length, max(self._slot.calls, 1)
            return 1.0 / length
        if self._slot.units == "rows":
            return divisor.share(weight.rows, length * self._batch.size)
        expected = length * weight.targets * self._batch.size / weight.rows
        divisor.bound = weight.bound
        # the mean loss of no targets is NaN, and NaN times 0 is NaN, unless it is divided by a least number
        return divisor.share(weight.targets, expected or length * self._batch.size, weight.divided_by)

    def asks_for_bounds(self, verdict: Verdict | None) -> bool:
        """Whether what the losses divide by is to be noted as they are computed."""
        decided = self._slot.decided_by
        return (verdict is not None and verdict.bound is not None) or (
            decided is not None and decided.bound is not None
        )

    def share_of_whole(self, loss: torch.Tensor, verdict: Verdict | None, bounds: Bounds | None = None) -> float:
        """The factor for the loss of a whole batch; decides what a window is averaged over at its first call.

        Args:
            loss: with its graph.
            verdict: what is known about the forward.
            bounds: what was noted as it was computed.

        Raises:
            RuntimeError: the window is averaged in a way that this loss does not allow any more.
        """
        if self._window is None:
            return 1.0
        verdict, slot = verdict or Verdict(None, undecided=True), self._slot
        size = self._size_in(self._window)
        if slot.units and not verdict.divides:
            verdict = slot.decided_by or verdict  # a call that failed in parts may have left nothing known
        divided_by = weights(loss, verdict, bounds)
        if not slot.units:
            slot.decided_by = verdict
            # where the rows checked could not tell, a single cross entropy is what the loss is a mean of
            alone = verdict.undecided and len(divided_by) == 1 and len(mean_nll_weights(loss, 2)) == 1
            slot.units = "targets" if alone else verdict.units
            # compiled code and reentrant checkpoints hide what they divide by
            if slot.units == "targets" and (not divided_by or not are_one(loss, verdict)):
                slot.units = "rows"
        if slot.units != "targets":
            return self.share(Weight(size, size))
        if not divided_by:
            raise RuntimeError(
                f"{self._name}: its loss was a mean over targets (of a cross entropy, or that a mask leaves) at the "
                "first call of this accumulation window, and what it divides by cannot be read now; use the same loss "
                "throughout a window, and compile the model without its loss"
            )
        first, expected = divided_by[0], slot.decided_by.bound if slot.decided_by is not None else None
        if divided_by != [first] * len(divided_by) or first.bound != expected:
            told = [one.divided_by for one in divided_by]
            raise RuntimeError(
                f"{self._name}: its cross entropies (or the means that a mask leaves) had the same targets at the "
                f"first call of this accumulation window, and now divide by {told}, which cannot be weighed apart any "
                "more; use the same targets, and the same least divisor, throughout a window"
            )
        if not self._others_keep(loss, first.amount):
            if not slot.averages_over_samples():
                raise RuntimeError(
                    f"{self._name}: the means in its loss had targets in one proportion in the first batches of this "
                    "accumulation window, and have them in another now, which cannot be weighed apart any more; return "
                    "one mean, or use the same targets for all, throughout a window"
                )
            return self.share(Weight(size, size))
        return self.share(Weight(size, first.amount, first.divided_by, first.bound))

    def _size_in(self, window: Window) -> int:
        """Samples of this call. A forward that takes no argument has its batch from elsewhere: that of the loader."""
        takes_batch = any(True for _ in self._batch.layout())
        return self._batch.size if takes_batch else max(window.samples, 1)

    def _others_keep(self, loss: torch.Tensor, targets: float) -> bool:
        """Whether what other means in `loss` divide by is in proportion to its targets throughout the window."""
        decided = self._slot.decided_by
        if decided is None or decided.divisors or not targets or not (decided.undecided or any(decided.means)):
            return True
        found: Sequence[Divisor] = divisors(loss)
        if decided.means:
            found = as_many(found, len(decided.means))
            if not found:
                return True  # they are hidden in compiled code
        counts = [one.amount for place, one in enumerate(found) if not decided.means or decided.means[place]]
        return self._slot.others.keep(targets, numbers(counts))

    def check_targets(self, loss: torch.Tensor, verdict: Verdict, targets: float) -> None:
        """Refuse micro-batches of a window that is averaged over targets, where means have their own.

        Args:
            loss: with its graph.
            verdict: what is known about the forward.
            targets: those that count in the micro-batch.

        Raises:
            CannotSplit: they do.
        """
        if self._window is None or self._slot.units != "targets":
            return
        if are_one(loss, verdict) and self._others_keep(loss, targets):
            return
        reason = "the means in its loss have targets of their own, which no window can weigh apart"
        raise CannotSplit(reason, Verdict(None, reason, nll_losses=verdict.nll_losses))

    def correct(self, gradients: GradientsAside) -> None:
        """Give the gradients of a call outside of a window the right size; those of a window wait for its end."""
        if self._window is None:
            gradients.scale(self._slot.divisor.correction())

    def correction(self) -> float:
        """The factor by which gradients are off because batch or window held other amounts than its first part."""
        return self._slot.divisor.correction() if self._window is None or self._window.closed else 1.0

    def expect_what_was_seen(self) -> None:
        """Divide by what the batch holds from the beginning, when it is run again.

        Raises:
            RuntimeError: it shares a window with batches that cannot be run again.
        """
        if self._window is not None:
            raise RuntimeError(
                "accumulate: the batches of this window differ in size (or in targets that count) between processes, "
                "and FSDP2 has averaged their gradients already. Use batches of one size, drop_last=True, or one "
                "larger batch in place of a window; forward_backward splits it as memory asks for"
            )
        expected = self._slot.divisor.expected / self._slot.divisor.correction()
        self._slot.put_back()
        self._slot.divisor.expected = expected
        self._slot.remember()

    def put_back(self) -> None:
        """Forget what the failed run added to the window, or decided for it."""
        self._slot.put_back()

    def withdraw(self) -> None:
        """The call ends in an error, and may be made again: its window has not seen it."""
        if self._window is not None:
            self._window.totals.withdraw(self._slot)

    def meet(self, gradients: GradientsAside) -> None:
        """Let the window know what the loss reaches, before its gradients join those of the window."""
        if self._window is not None:
            reached = [leaf for leaf in gradients.leaves if leaf.grad is not None]
            self._window.totals.meets(reached, gradients.earlier)

    def end(self) -> None:
        """The gradients have joined: the window is corrected if this was its last loss."""
        if self._window is not None:
            self._slot.keep(self._size_in(self._window))
            self._window.totals.end(self._window)


class Shares:
    """The weights of micro-batches, as long as one weight is right for all losses in each.

    Args:
        verdict: what the check found.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._first: list[float] | None = None
        self._first_means: Means | None = None
        self._proportions = Proportions()
        self._has_targets = False

    def divided_by(self, loss: torch.Tensor, rows: int, bounds: Bounds | None = None) -> list[Counted]:
        """What the means that count in the loss of a micro-batch divide by; none where it hides them, or has none.

        Args:
            loss: with its graph.
            rows: samples in the micro-batch.
            bounds: what was noted as it was computed.

        Raises:
            CannotSplit: it shows less, or something else, than a check saw.
        """
        verdict = self._verdict
        if verdict.divisors:
            return self._divided_by_hand(loss, bounds)
        targets = weights(loss, verdict) if verdict.nll_losses else []
        of_targets = targets[0].amount if targets else 0
        self._expect_in_proportion(loss, {"rows": rows, "targets": of_targets, "calls": 1}[verdict.units])
        return targets

    def _open(self, reason: str) -> CannotSplit:
        """The batch runs whole, unless a check of it shows more; its window still has to know what to divide by."""
        return CannotSplit(reason, replace(self._verdict, rule=None, reason=reason, undecided=True))

    def _divided_by_hand(self, loss: torch.Tensor, bounds: Bounds | None) -> list[Counted]:
        found = means(loss, self._verdict.divisors, bounds)
        if found is None:
            return []
        self._first_means = self._first_means or found
        if not found.is_like(self._first_means) or common_bound(found.counted) != (True, self._verdict.bound):
            raise self._open("the means in its loss are others in a part of it")
        first, rule = found.counted[0], self._verdict.rule
        is_felt = first.bound is not None and first.bound.is_felt(first.amount)
        if is_felt and rule is not None and means_over_targets(rule) > 1:
            raise self._open("a part of it divides by a least number, and what else it returns may not")
        if found.hide_something() or (not self._verdict.from_nothing and found.may_count_nothing()):
            raise self._open(
                "a part of it has nothing that its loss is a mean of, or little enough to be taken for nothing"
            )
        return found.counted

    def _expect_in_proportion(self, loss: torch.Tensor, weight: float) -> None:
        """Refuse means that in some part divide by more or less than in proportion to its weight, or a constant."""
        if not weight and any(self._verdict.means):
            raise self._open("a part of it that has no targets may have something else that its loss is a mean of")
        found = as_many(divisors(loss), len(self._verdict.means))
        if not weight or not found:
            return  # it is left out, or they are hidden in compiled code, or it takes another branch
        if not self._proportions.keep(weight, numbers([divisor.amount for divisor in found]), self._verdict.means):
            raise self._open("the means in its loss divide by more in one part of it than in another")

    def of(self, rows: int, targets: list[Counted]) -> Weight:
        """The weight of a micro-batch of `rows` samples, whose means divide by `targets`.

        Raises:
            CannotSplit: another weight would be right for another loss.
        """
        if not self._verdict.divides:
            return Weight(rows, rows)
        if not targets:
            raise CannotSplit(
                "what it divides by cannot be read off the loss (it is in compiled code, or no part of it)"
            )
        amounts = [target.amount for target in targets]
        if self._verdict.one_part and amounts[0]:
            if self._has_targets:
                raise self._open("few of the rows that were checked had targets that count")
            self._has_targets = True
        if self._verdict.units != "calls":
            # all in proportion to the first mean, or to the samples
            base = amounts[0] if self._verdict.units == "targets" else rows
            if self._first is None and base:
                self._first = [amount / base for amount in amounts]
            # nothing is in proportion to nothing, whatever comes after it
            first = self._first or [0.0] * len(amounts)
            if any(abs(a - of_first * base) > 1e-6 * abs(base) for a, of_first in zip(amounts, first, strict=False)):
                raise self._open("the parts of its loss are means over different numbers of targets")
        return Weight(rows, targets[0].amount, targets[0].divided_by, targets[0].bound)
