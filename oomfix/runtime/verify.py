"""May this batch be split? A few rows are run together and in two parts, and the results compared.

Whether a loss is a mean over independent samples cannot be read off its code (in-batch negatives, balance
losses, batch-normalised dice, pairwise attention that runs in training only), but it shows in numbers: the
results of the parts must give the result of the whole, under one of the rules in `outputs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from oomfix.runtime import outputs, rule_choice, simulation
from oomfix.runtime.batch import Batch
from oomfix.runtime.comparison import Evidence, Runs, compare
from oomfix.runtime.divisors import NEXT_TO_NOTHING
from oomfix.runtime.gradients import CHANGES_GRADIENTS, next_node, reach
from oomfix.runtime.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.outputs import Mean, Rule, Sum, Zero
from oomfix.runtime.referenced import leaves_in
from oomfix.runtime.rows import choose_rows, gaps_for_masks, leaving_nothing
from oomfix.runtime.verdict import Verdict

_MOST_ROWS = 32  # as many as one micro-batch has, up to this
_FEW_ROWS = 5  # a part of one row would lose its dimension where a forward squeezes
_FEWEST_ROWS = 3  # the least that make two unequal parts
_SMALL = 4096  # entries of a parameter whose gradient is compared
_COMPARED = 24  # parameters whose gradients are compared, spread over the model
_OTHER_DRAWS = 6  # runs that shuffle a few rows otherwise
_DEPEND = "samples depend on each other: a few rows give something else in two parts"
_GRADIENTS_DEPEND = "samples depend on each other: a few rows give another gradient in two parts"
_BENDS = (
    "a number for the whole batch meets a threshold (clamp, abs, relu), or counts its distinct values, and parts may "
    "have another"
)
_GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest entry in a part


_T = TypeVar("_T")


def check(
    forward: Callable[..., Any],
    batch: Batch,
    modules: list[nn.Module],
    most_rows: int,
    trust: bool = False,
    earlier: Verdict | None = None,
    sharded: bool = False,
    trains: bool = True,
) -> Verdict:
    """Compare `forward` on a few rows of `batch` with `forward` on two unequal parts of them.

    Nothing remains of it, see `comparison.compare`.

    Args:
        forward: returns the loss, or a container whose first value (or "loss") it is.
        batch: the samples; of fewer than three, rows are repeated.
        modules: every module that the forward may run.
        most_rows: rows of one micro-batch, which bound what the check may hold in memory.
        trust: the user asked for splitting whatever the check says: values that no rule fits get the one that
            their shapes suggest.
        earlier: the verdict of an earlier check, which compared gradients and masks too. One that allowed a split is
            confirmed on fewer rows, without watching every operation, where that can be done; gradients and masks are
            compared again where the forward has become another computation, by the number of its calls.
        sharded: parameters are spread over processes, and have no gradients that could be compared.
        trains: a backward follows, so that a loss has a graph.

    Returns:
        The verdict; an undecided one where not even two rows fit, or where there are none.
    """
    if simulation.assumption is not None:
        simulation.assumption.note()
    if not batch.size:
        return Verdict(None, "it is empty", undecided=True)
    checking = _Check(forward, batch, modules, trust)
    # odd numbers of rows: pairs and groups inside a batch are taken apart, or fail
    most = max(_odd(min(most_rows, _MOST_ROWS)), _FEWEST_ROWS)
    few = [max(_odd(min(most // 2, _FEW_ROWS)), _FEWEST_ROWS), _FEWEST_ROWS, 2]
    may_split = earlier is not None and earlier.rule is not None
    if earlier is not None and may_split and not earlier.drew and not trust and simulation.assumption is None:
        confirmed = _with_rows_that_fit(few, partial(checking.confirmed, earlier))
        if confirmed is not None:
            return confirmed
    found = _with_rows_that_fit([most, _odd((most + 1) // 2), _FEWEST_ROWS, 2], checking.by_results)
    if found is None:
        return Verdict(None, "there is no memory to check it on a few rows", undecided=True)
    verdict, how, _ = found
    if trust or simulation.assumption is not None:
        return verdict
    if verdict.rule is not None:
        verdict = _confirmed_closer(checking, found, few, sharded)
    if verdict.rule is None and verdict.reason in (_DEPEND, _GRADIENTS_DEPEND) and trains and not sharded:
        return _with_rows_that_fit(few, partial(checking.by_divisors, how)) or verdict
    return verdict


def _confirmed_closer(checking: "_Check", found: tuple[Verdict, Runs, int], few: list[int], sharded: bool) -> Verdict:
    """A verdict that allows a split, or the one that refuses it after a closer look at masks and gradients."""
    verdict, how, rows = found
    how = replace(how, light=not verdict.drew)
    for by_masks in (checking.by_masks, checking.by_computed_masks):
        masked = _with_rows_that_fit([rows, 2], partial(by_masks, how))
        if masked is not None and masked.rule is None and not masked.undecided:
            return masked
    # a graph needs more memory than the runs of a check without one
    gradients = None if sharded else _with_rows_that_fit(few, partial(checking.by_gradients, how))
    if gradients is not None and gradients.rule is None and not gradients.undecided:
        return gradients
    if gradients is None:
        return replace(verdict, calls=0)
    return replace(verdict, means=gradients.means, calls=0 if verdict.drew else gradients.calls)


def _odd(count: int) -> int:
    return count - 1 + count % 2


def _with_rows_that_fit(counts: list[int], run: Callable[[int], _T]) -> _T | None:
    """What `run` returns for the most rows that memory allows; None if it allows none."""
    for count in sorted({count for count in counts if count >= 2}, reverse=True):
        try:
            return run(count)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # outside the `except`, where the frames that failed are gone
        free_what_is_left(thorough=True)
    return None


class _Check:
    """The comparisons of one check, from the most telling to the ones that look closer."""

    def __init__(self, forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], trust: bool) -> None:
        self._forward = forward
        self._batch = batch
        self._modules = modules
        self._trust = trust
        self._chosen: dict[int, list[int]] = {}
        self._in_order = False
        self._alike_masks: dict[int, frozenset[int]] = {}

    def _rows(self, count: int) -> list[int]:
        if count not in self._chosen:
            self._chosen[count] = choose_rows(self._batch, count)
        return sorted(self._chosen[count]) if self._in_order else self._chosen[count]

    def by_results(self, count: int) -> tuple[Verdict, Runs, int]:
        """The verdict on `count` rows, and how the runs that gave it were made."""
        rows = self._rows(count)
        verdict, how, evidence = self._best(rows, graph=False)
        if evidence.failure and rows != sorted(rows):
            # sequences may have to lie by length, as the batch has them
            in_order = self._best(sorted(rows), graph=False)
            self._in_order = not in_order[2].failure
            if self._in_order:
                rows = sorted(rows)
                verdict, how, evidence = in_order
        if evidence.failure:
            # a forward that differentiates by itself fails without gradients
            verdict, how, evidence = self._best(rows, graph=True)
        if verdict.rule is not None and evidence.drew_besides_torch:
            verdict = self._with_other_draws(verdict, how, rows)
        return replace(verdict, needs_gradients=how.graph), how, count

    def _with_other_draws(self, verdict: Verdict, how: Runs, rows: list[int]) -> Verdict:
        """`verdict`, unless runs with other draws from Python and NumPy refuse: few rows may be shuffled alike."""
        for ahead in range(1, _OTHER_DRAWS + 1):
            evidence = compare(self._forward, self._batch, self._modules, rows, replace(how, ahead=ahead))
            other = judge(evidence, self._trust, len(rows))
            if other.rule is None and not other.undecided:
                return other
        return verdict

    def _best(self, rows: list[int], graph: bool) -> tuple[Verdict, Runs, Evidence]:
        """The first verdict that allows a split, or else that of a run which did not fail; what it was given for."""
        found: tuple[Verdict, Runs, Evidence] | None = None
        drew = held = True
        for holds_out, replays in ((True, True), (True, False), (False, True), (False, False)):
            if (not replays and not drew) or (not holds_out and not held):
                continue  # the same runs again
            how = Runs(graph, holds_out, replays)
            evidence = compare(self._forward, self._batch, self._modules, rows, how)
            # penalties are told of whatever the verdict is
            verdict = replace(judge(evidence, self._trust, len(rows)), differentiates=evidence.differentiates)
            failed = bool(evidence.failure)
            if verdict.rule is not None:
                self._alike_masks[len(rows)] = evidence.alike_masks
            if found is None or (found[2].failure and not failed) or verdict.rule is not None:
                found = verdict, how, evidence
            # what is written or bent does not change with the targets, and is not watched in every run
            if verdict.rule is not None or verdict.undecided or ((evidence.wrote or evidence.bends) and not failed):
                break
            if holds_out and replays and not failed:
                drew, held = evidence.drew, evidence.held
        assert found is not None
        return found

    def confirmed(self, earlier: Verdict, count: int) -> Verdict | None:
        """An earlier verdict, if a few rows confirm all of it."""
        rows = self._rows(count)
        divides = bool(earlier.divisors)
        how = Runs(graph=earlier.needs_gradients or divides, graph_of_whole=True, light=True, divides=divides)
        evidence = compare(self._forward, self._batch, self._modules, rows, how)
        verdict = judge(evidence, rows=count)
        same = replace(earlier, drew=verdict.drew, held=verdict.held)
        same = replace(same, needs_gradients=False, differentiates=False, from_nothing=False, means=0)
        if not earlier.calls:
            same = replace(same, calls=verdict.calls)
        return earlier if verdict == same else None

    def by_masks(self, how: Runs, count: int) -> Verdict | None:
        """The verdict where masks that happen to tell no rows apart have gaps; None if none do, or they are refused."""
        rows = self._rows(count)
        gaps = gaps_for_masks(self._batch, rows)
        if all(gap is None for gap in gaps):
            return None
        evidence = compare(self._forward, self._batch, self._modules, rows, how, gaps=gaps)
        return None if evidence.failure else judge(evidence)

    def by_computed_masks(self, how: Runs, count: int) -> Verdict | None:
        """As `by_masks`, for masks that the forward computes."""
        compared = partial(compare, self._forward, self._batch, self._modules, self._rows(count))
        # fewer rows than the verdict was given on: those did not fit again
        alike = self._alike_masks[count] if count in self._alike_masks else compared(how).alike_masks
        if not alike:
            return None
        evidence = compared(replace(how, mask_gaps=alike))
        return None if evidence.failure else judge(evidence)

    def by_gradients(self, how: Runs, count: int, gaps: Sequence[float | None] = ()) -> Verdict | None:
        """The verdict on the gradients of a few small parameters, which show factors that have no gradient."""
        rows = self._rows(count)
        # a checkpoint in the forward runs again in backward, where no targets can be held out
        how = replace(how, graph=True, holds_out=False)
        # chosen before the runs, in which each look at a parameter is watched
        see = partial(_loss_and_gradients, self._compared(), next_node())
        evidence = compare(self._forward, self._batch, self._modules, rows, how, see, gaps)
        verdict = judge_gradients(evidence)
        return None if evidence.failure else replace(verdict, means=evidence.means, calls=evidence.calls)

    def by_divisors(self, how: Runs, count: int) -> Verdict | None:
        """The verdict where the parts weigh what their losses divide by, with gaps in masks; None if it is none to use.

        Rows of which a mask leaves as much each show nothing of such a mean.
        """
        rows = self._rows(count)
        compared = partial(compare, self._forward, self._batch, self._modules, rows)
        how = replace(how, graph=True, light=False, divides=True)
        gaps = gaps_for_masks(self._batch, rows)
        how = replace(how, mask_gaps=compared(how, gaps=gaps).alike_masks)
        evidence = compared(how, gaps=gaps)
        verdict = judge(evidence, rows=count)
        if verdict.units != "targets" or verdict.nll_losses or not verdict.divisors:
            return None
        gradients = self.by_gradients(how, count, gaps)
        if gradients is None or gradients.rule is None:
            return None
        from_nothing: bool | None = False
        how = replace(how, mask_gaps=frozenset(), empties=True)
        for nothing in leaving_nothing(self._batch):
            from_nothing = _from_nothing(verdict, compared(how, gaps=nothing), count)
            if from_nothing is None:
                return None
            if from_nothing:
                break
        return replace(verdict, held=True, from_nothing=bool(from_nothing))

    def _compared(self) -> list[torch.Tensor]:
        """The parameters whose gradients are compared: small ones, of no module too, or the smallest."""
        of_modules = [p for module in self._modules for p in module._parameters.values() if p is not None]
        parameters = [*of_modules, *leaves_in(self._forward)]
        trained: list[torch.Tensor] = [
            p for p in parameters if p.requires_grad and p.dtype in _GRADIENT_TOLERANCE and p.numel()
        ]
        if not trained:
            return []
        small = [p for p in trained if p.numel() <= _SMALL] or [min(trained, key=torch.numel)]
        return small[:: -max(1, len(small) // _COMPARED)]


def _loss_and_gradients(
    parameters: list[torch.Tensor], first_node: int, result: Any
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The loss in `result` and its gradients, none where it has a graph from before the node numbered `first_node`."""
    loss = outputs.loss_in(result)
    if loss is None or not loss.requires_grad or loss.numel() != 1 or not parameters:
        return loss, []
    if reach(loss).began_before(first_node):
        return loss, []  # a graph that was there before the check is not for it to pass
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss, [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


def judge(evidence: Evidence, trust: bool = False, rows: int = 0) -> Verdict:
    """The verdict that the results of a comparison on `rows` rows give; arguments as for `check`."""
    if evidence.failure:
        return Verdict(None, f"it fails on {rows} rows of the batch ({evidence.failure})")
    if evidence.wrote and not trust:
        return Verdict(None, f"it keeps state of its own between calls: {evidence.wrote}")
    simulated = simulation.assumption
    if simulated is not None and simulated.coupled and not trust:
        return Verdict(None, simulated.coupled)
    if evidence.changes_gradients:
        return Verdict(None, CHANGES_GRADIENTS)
    loss = outputs.loss_in(evidence.whole)
    if loss is not None and loss.numel() != 1:
        loss = None  # an evaluation returns what it likes
    if loss is not None and simulated is None and not loss.isfinite().all():
        return Verdict(None, "its loss is not a number on a few rows", undecided=True)
    rule = rule_choice.choose(evidence.whole, evidence.parts, evidence.shares)
    trusted = trust and (rule is None or bool(evidence.wrote))
    if rule is None and trust:
        rule = rule_choice.likely(evidence.whole, evidence.parts[0])
    of_loss = rule if loss is None or loss is evidence.whole else _rule_of_loss(evidence)
    if rule is None:
        of_others = "what a few rows return besides the loss cannot be put together from two parts"
        return Verdict(None, _DEPEND if of_loss is None else of_others)
    if loss is not None and not trust and _alike_alone(evidence):
        return Verdict(None, "two of its rows, each alone, show nothing that tells them apart", undecided=True)
    if evidence.bends and not trust:
        return Verdict(None, _BENDS)
    if evidence.selects and not trust:
        return Verdict(None, "it selects among the samples of a batch, which a few rows cannot show")
    if loss is not None and not trust and _leaves_open(of_loss, evidence):
        return Verdict(None, "its loss is 0 on a few rows, which leaves open what it is a mean of", undecided=True)
    return Verdict(
        rule,
        units=_units(of_loss),
        nll_losses=evidence.nll_losses,
        divisors=evidence.divisors,
        held=evidence.held,
        drew=evidence.drew,
        calls=0 if evidence.drew else evidence.calls,
        draws=evidence.draws,
        once_outside=evidence.once_outside,
        left=evidence.left,
        one_part=evidence.nll_losses > 0 and not trust and not all(share.targets for share in evidence.shares),
        trusted=trusted,
    )


def judge_gradients(evidence: Evidence) -> Verdict:
    """The verdict that losses and gradients give; undecided where they cannot be compared."""
    loss, gradients = evidence.whole
    rule = rule_choice.choose(loss, [part[0] for part in evidence.parts], evidence.shares) if gradients else Zero()
    if rule is None and all(bool(of_part.isfinite()) for of_part, _ in evidence.parts):
        return Verdict(None, _DEPEND)
    if rule is None or rule == Zero():
        return Verdict(None, undecided=True)  # a deviation is not a number of one row
    collector, sizes = rule.collector(0), [gradient.numel() for gradient in gradients]
    for (_, of_part), share in zip(evidence.parts, evidence.shares, strict=True):
        collector.add(_joined(of_part), share)
    errors = _largest(_joined(gradients) - collector.result(), sizes)
    scales = [
        max(pair) for pair in zip(*(_largest(_joined(of_part), sizes) for _, of_part in evidence.parts), strict=True)
    ]
    # where the true gradient is 0 (the bias of attention's keys), rounding of the others is all there is
    largest = max(scales)
    for gradient, error, scale in zip(gradients, errors, scales, strict=True):
        tolerance = _GRADIENT_TOLERANCE[gradient.dtype]
        if error > tolerance * max(scale, tolerance * largest):
            return Verdict(None, _GRADIENTS_DEPEND)
    return Verdict(rule)


def _from_nothing(verdict: Verdict, emptied: Evidence, rows: int) -> bool | None:
    """Whether what the loss divides by was 0 for a part in which nothing counts; None if `verdict` does not hold then.

    A program may divide by something else instead (`max(count, 1)`), and terms of a loss that has such a divisor may
    count nevertheless.
    """
    if emptied.failure:
        return False
    if emptied.divisors != verdict.divisors:
        return None
    if emptied.shares[0].targets > NEXT_TO_NOTHING:
        return False
    seen = judge(emptied, rows=rows)
    return seen.units == "targets" if seen.rule is not None else False if seen.undecided else None


def _joined(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _largest(joined: torch.Tensor, sizes: list[int]) -> list[float]:
    """The largest absolute entry of each of the tensors that were joined; waits for the device once."""
    largest: list[float] = torch.stack([part.max() for part in torch.split(joined.abs(), sizes)]).tolist()
    return largest


def _rule_of_loss(evidence: Evidence) -> Rule | None:
    losses = [outputs.loss_in(part) for part in evidence.parts]
    return rule_choice.choose(outputs.loss_in(evidence.whole), losses, evidence.shares)


def _leaves_open(rule: Rule | None, evidence: Evidence) -> bool:
    """Whether the rows gave a loss that a sum and a mean both explain, because it, or a part of it, is 0."""
    if rule == Zero():
        return True
    losses = [outputs.loss_in(part) for part in evidence.parts]
    return rule == Sum() and any(loss is not None and not loss.any() for loss in losses)


def _alike_alone(evidence: Evidence) -> bool:
    """Whether the parts are single rows with one and the same loss, as of statistics that one row has none of."""
    losses = [outputs.loss_in(part) for part in evidence.parts]
    alone = all(share.rows == 1 for share in evidence.shares)
    return alone and simulation.assumption is None and rule_choice.equal(losses[0], losses[1])


def _units(rule: Rule | None) -> str:
    if rule is None:
        return "rows"
    if rule == Sum():
        return "calls"
    return "targets" if outputs.contains(rule, Mean("targets")) else "rows"
