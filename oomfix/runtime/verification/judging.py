"""The verdict that the results of a comparison give: is the result of the whole made of those of its parts?"""

import math
from dataclasses import replace

from oomfix.runtime import simulation
from oomfix.runtime.batches import outputs, rule_choice
from oomfix.runtime.batches.outputs import Array, Inside, Mean, Rule, Sum, Zero
from oomfix.runtime.state.gradients import CHANGES_GRADIENTS
from oomfix.runtime.verification.evidence import Evidence
from oomfix.runtime.verification.verdict import Verdict

DEPEND = "samples depend on each other: a few rows give something else in two parts"
SEVERAL_DEPEND = (
    "samples depend on each other, or the means in its loss divide by different numbers of targets: a few rows give "
    "something else in two parts"
)
OTHERS = "what a few rows return besides the loss cannot be put together from two parts"
OPEN = "its loss is 0 on a few rows, which leaves open what it is a mean of"
FLAT = "its gradients are 0 on a few rows, which leaves open whether they depend on each other"
PLAIN = "its loss is a plain number, or none, for some of its samples, which add nothing to it"
NO_NUMBER = "its loss is not a number on a few rows"
NOTHING = "the means in its loss are over nothing, or too little, on some of a few rows"
HIDES = "samples depend on each other in a term of its loss whose weight is 0 now"
LEAVES = (
    "it reads what it computed of each sample as numbers (numpy(), tolist()), and may select among the samples by "
    "these, which is not seen"
)
BENDS = (
    "a number for the whole batch meets a threshold (clamp, abs, relu), or counts its distinct values, and parts may "
    "have another"
)


def judge(evidence: Evidence, trust: bool = False, rows: int = 0) -> Verdict:
    """The verdict that the results of a comparison on `rows` rows give; `trust`: a split was asked for all the same."""
    if evidence.failure:
        return Verdict(None, f"it fails on {rows} rows of the batch ({evidence.failure})")
    if evidence.wrote and not trust:
        return Verdict(None, f"it keeps state of its own between calls: {evidence.wrote}")
    simulated = simulation.assumption
    if simulated is not None and simulated.coupled and not trust:
        return Verdict(None, simulated.coupled)
    if evidence.changes_gradients:
        return Verdict(None, CHANGES_GRADIENTS)
    if evidence.varies:
        return Verdict(None, SEVERAL_DEPEND)
    if evidence.miscounted or evidence.counts_little:
        return Verdict(None, NOTHING, undecided=True)
    loss = outputs.loss_in(evidence.whole)
    if loss is not None and loss.numel() != 1:
        loss = None  # an evaluation returns what it likes
    if loss is not None and simulated is None and not loss.isfinite().all():
        return Verdict(None, NO_NUMBER, undecided=True)
    rule = rule_choice.choose(evidence.whole, evidence.parts, evidence.shares, evidence.terms)
    trusted = trust and (rule is None or bool(evidence.wrote))
    if rule is None and trust:
        rule = rule_choice.likely(evidence.whole, evidence.parts[0])
    of_loss = rule if loss is None or loss is evidence.whole else _rule_of_loss(evidence)
    if rule is None and _adds_nothing_somewhere(evidence):
        return Verdict(None, PLAIN, undecided=True)
    if rule is None:
        depend = SEVERAL_DEPEND if evidence.nll_losses > 1 else DEPEND
        return Verdict(None, depend if of_loss is None else OTHERS)
    if loss is not None and not trust and _alike_alone(evidence):
        return Verdict(None, "two of its rows, each alone, show nothing that tells them apart", undecided=True)
    if loss is not None and not trust and _is_a_sum_of_as_many(of_loss, evidence):
        return Verdict(None, DEPEND)
    if evidence.bends and not trust:
        return Verdict(None, BENDS)
    if evidence.selects and not trust:
        return Verdict(None, "it selects among the samples of a batch, which a few rows cannot show")
    if evidence.hides and not trust:
        return Verdict(None, HIDES)
    if evidence.leaves and loss is not None and not trust:
        return Verdict(None, LEAVES)
    if loss is not None and not trust and _leaves_open(of_loss, evidence):
        return Verdict(None, OPEN, undecided=True)
    if evidence.counts_nothing and not trust:
        return Verdict(None, "a number that meets a threshold is 0 on a few rows, which leaves it open", undecided=True)
    return Verdict(
        rule,
        units=units(of_loss),
        nll_losses=evidence.nll_losses,
        divisors=evidence.divisors,
        bound=evidence.bound,
        own_targets=evidence.own_targets,
        counted_means=evidence.counted_means,
        held=evidence.held,
        tells_means=rule_choice.are_told_apart(evidence.shares),
        drew=evidence.drew,
        calls=0 if evidence.drew else evidence.calls,
        draws=evidence.draws,
        once_outside=evidence.once_outside,
        left=evidence.left,
        one_part=evidence.nll_losses > 0 and not trust and not all(share.targets for share in evidence.shares),
        single_rows=True if any(share.rows == 1 for share in evidence.shares) else None,
        trusted=trusted,
    )


def _rule_of_loss(evidence: Evidence) -> Rule | None:
    losses = [outputs.loss_in(part) for part in evidence.parts]
    return rule_choice.choose(outputs.loss_in(evidence.whole), losses, evidence.shares, evidence.terms)


def _adds_nothing_somewhere(evidence: Evidence) -> bool:
    """Whether the loss is a tensor on all rows only, or in one part only, as `total = 0` and `total += ...` give it."""
    losses = [outputs.loss_in(result) for result in (evidence.whole, *evidence.parts)]
    return any(loss is None for loss in losses) and any(loss is not None for loss in losses)


def _leaves_open(rule: Rule | None, evidence: Evidence) -> bool:
    """Whether the rows gave a loss that a sum and a mean both explain, because it, or a part of it, is 0."""
    if rule == Zero():
        return True
    losses = [outputs.loss_in(part) for part in evidence.parts]
    return rule == Sum() and any(loss is not None and not loss.any() for loss in losses)


def _is_a_sum_of_as_many(rule: Rule | None, evidence: Evidence) -> bool:
    """Whether means over targets times samples look like a sum because each sample has as many targets here.

    With targets held out they do not.
    """
    if rule != Sum() or not evidence.nll_losses or evidence.held:
        return False
    one, other = evidence.shares
    return math.isclose(one.targets * other.rows, other.targets * one.rows)


def _alike_alone(evidence: Evidence) -> bool:
    """Whether the parts are single rows with one and the same loss, as of statistics that one row has none of."""
    losses = [outputs.loss_in(part) for part in evidence.parts]
    alone = all(share.rows == 1 for share in evidence.shares)
    return alone and simulation.assumption is None and rule_choice.equal(losses[0], losses[1])


def contradict(verdict: Verdict, other: Verdict) -> bool:
    """Whether a value is a sum or a mean on some rows and another one elsewhere: it is neither.

    As is a mean over a few of them, or over what masks leave; with as many targets held out as a mask got gaps, that
    looks like one over targets.
    """
    if verdict.rule is None or other.rule is None:
        return False
    is_sum = (verdict.units == "calls") != (other.units == "calls")
    return is_sum or (verdict.tells_means and other.tells_means and _are_over_others(verdict.rule, other.rule))


def _are_over_others(rule: Rule, other: Rule) -> bool:
    if isinstance(rule, Inside) and isinstance(other, Inside):
        return any(map(_are_over_others, rule.rules, other.rules))
    if isinstance(rule, Array) and isinstance(other, Array):
        return _are_over_others(rule.rule, other.rule)
    return isinstance(rule, Mean) and isinstance(other, Mean) and rule.by != other.by


def settled(verdict: Verdict, other: Verdict) -> Verdict:
    """`verdict`, over what another one says that its means are, where its own rows have left that open."""
    if verdict.rule is None or other.rule is None or verdict.tells_means or not other.tells_means:
        return verdict
    if type(verdict.rule) is not type(other.rule):
        return verdict  # one is that of the loss alone
    rule = _with_means_of(verdict.rule, other.rule)
    return replace(verdict, rule=rule, units=other.units, tells_means=True)


def _with_means_of(rule: Rule, other: Rule) -> Rule:
    if isinstance(rule, Inside) and isinstance(other, Inside):
        return replace(rule, rules=tuple(map(_with_means_of, rule.rules, other.rules)))
    if isinstance(rule, Array) and isinstance(other, Array):
        return Array(_with_means_of(rule.rule, other.rule))
    return other if isinstance(rule, Mean) and isinstance(other, Mean) else rule


def units(rule: Rule | None) -> str:
    """What a rule says that a loss is a mean of, see `Verdict.units`."""
    if rule is None:
        return "rows"
    if rule == Sum():
        return "calls"
    return "targets" if outputs.means_over_targets(rule) else "rows"
