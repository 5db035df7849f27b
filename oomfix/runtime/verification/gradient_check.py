"""The gradients of a few rows are compared with those of two parts: they show factors of a loss that have none."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from oomfix.runtime.batches import outputs, rule_choice
from oomfix.runtime.batches.outputs import Zero
from oomfix.runtime.batches.rows import Gaps, has_single_row
from oomfix.runtime.state.gradients import has_hook, next_node, reach
from oomfix.runtime.state.referenced import leaves_in
from oomfix.runtime.state.running_statistics import changes_its_code
from oomfix.runtime.verification.border import leaves_in_checked
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.judging import DEPEND, FLAT, NO_NUMBER, OPEN, PLAIN, SEVERAL_DEPEND, units
from oomfix.runtime.verification.verdict import Verdict
from oomfix.runtime.verification.ways import Edges, Graphs, edges

GRADIENTS_DEPEND = "samples depend on each other: a few rows give another gradient in two parts"
_SMALL = 4096  # entries of a parameter whose gradient is compared
_COMPARED = 24  # parameters whose gradients are compared, spread over the model
_ENTRIES = 1 << 20  # of those that are compared where these show nothing
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest entry in a part


def by_gradients(few: FewRows, how: Runs, count: int, gaps: Gaps = MappingProxyType({})) -> Verdict | None:
    """The verdict on the gradients of a few small parameters; None where the forward fails."""
    found, evidence = compared_gradients(few, how, count, gaps)
    return None if evidence.failure else found


def compared_gradients(
    few: FewRows, how: Runs, count: int, gaps: Gaps = MappingProxyType({}), *, rows: Sequence[int] = ()
) -> tuple[Verdict, Evidence]:
    """As `by_gradients`, on `rows` if there are any, and what the verdict was given for; undecided for a failure.

    Where all of these gradients are 0, as those behind weights that begin at 0 (adapters), others are compared.
    """
    # a checkpoint in the forward runs again in backward, where no targets can be held out
    how = replace(how, graph=True, holds_out=False)
    # chosen before the runs, in which each look at a parameter is watched
    trained = _trained_in(few)
    for parameters in (_few_of(trained), _others_of(trained)):
        see = partial(_seen, parameters, next_node())
        evidence = few.compared(count, how, see, gaps, rows=rows)
        if evidence.failure:
            return Verdict(None, undecided=True), evidence
        verdict = _judge(evidence)
        if verdict.reason != FLAT:
            break
    single_rows = has_single_row(count) or None
    sizes = [int(share.rows) for share in evidence.shares]
    graphs = Graphs.of(evidence.whole[2], [of_part[2] for of_part in evidence.parts], sizes, evidence.truths)
    found = replace(
        verdict,
        means=evidence.means,
        calls=evidence.calls,
        single_rows=single_rows,
        graphs=None if changes_its_code(few.modules) else graphs,
    )
    return found, evidence


def _trained_in(few: FewRows) -> list[torch.Tensor]:
    """The parameters whose gradients can be compared, of no module too.

    What every part is given whole counts: of a noise that the program trains, `noise[: len(x)]` is other rows in parts.
    """
    of_modules = [p for module in few.modules for p in module._parameters.values() if p is not None]
    parameters = [*of_modules, *leaves_in(few.forward, few.batch.uncut()), *leaves_in_checked()]
    trained = (p for p in parameters if p.requires_grad and p.dtype in _TOLERANCE and p.numel() and not p.is_meta)
    return [p for p in trained if not has_hook(p)]  # hooks are for gradients of the training


def _few_of(trained: list[torch.Tensor]) -> list[torch.Tensor]:
    """Small ones, or the smallest."""
    small = [p for p in trained if p.numel() <= _SMALL] or sorted(trained, key=torch.numel)[:1]
    return small[:: -max(1, len(small) // _COMPARED)]


def _others_of(trained: list[torch.Tensor]) -> list[torch.Tensor]:
    """The smallest, as many as have few entries together, and the last, which is most often that of a head."""
    smallest = sorted(trained, key=torch.numel)
    entries = accumulate(map(torch.numel, smallest))
    few = [p for p, until in zip(smallest, entries, strict=True) if until <= _ENTRIES]
    return [*few, *(p for p in trained[-1:] if all(p is not one for one in few))]


def _seen(
    parameters: list[torch.Tensor], first_node: int, result: Any
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], Edges]:
    """The loss in `result`, its gradients, and what is in its graph."""
    loss = outputs.loss_in(result)
    if loss is None or loss.numel() != 1:
        return loss, [], frozenset()
    of_graph = edges(loss)
    return loss, _gradients(loss, parameters, first_node), of_graph


def _gradients(loss: torch.Tensor, parameters: list[torch.Tensor], first_node: int) -> list[torch.Tensor | None]:
    """Those of `loss`, None of what it does not reach; none if it has a graph from before the node `first_node`."""
    if not loss.requires_grad or not parameters:
        return []
    if reach(loss).began_before(first_node):
        return []  # a graph that was there before the check is not for it to pass
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient for gradient in gradients]


def _judge(evidence: Evidence) -> Verdict:
    """The verdict that losses and gradients give; undecided where they cannot be compared."""
    if evidence.varies:
        return Verdict(None, SEVERAL_DEPEND)
    if evidence.miscounted:
        return Verdict(None, NO_NUMBER, undecided=True)
    loss, gradients, _ = evidence.whole
    losses = [part[0] for part in evidence.parts]
    if any((of_part is None) != (loss is None) for of_part in losses):
        return Verdict(None, PLAIN, undecided=True)
    rule = rule_choice.choose(loss, losses, evidence.shares, evidence.terms) if gradients else Zero()
    if rule is None and all(bool(of_part.isfinite()) for of_part, *_ in evidence.parts):
        return Verdict(None, DEPEND)
    if gradients and rule == Zero():
        return Verdict(None, OPEN if bool(loss.isfinite()) else NO_NUMBER, undecided=True)
    if rule is None or not gradients:
        return Verdict(None, undecided=True)  # a deviation is not a number of one row
    whole, *parts = _reached([gradients, *(of_part for _, of_part, _ in evidence.parts)])
    if not whole:
        return Verdict(rule, units=units(rule))
    collector, sizes = rule.collector(0), [gradient.numel() for gradient in whole]
    joined = [_joined(of_part) for of_part in parts]
    for of_part, share in zip(joined, evidence.shares, strict=True):
        collector.add(of_part, share)
    errors = _largest(_joined(whole) - collector.result(), sizes)
    scales = [max(pair) for pair in zip(*(_largest(of_part, sizes) for of_part in joined), strict=True)]
    # where the true gradient is 0 (the bias of attention's keys), rounding of the others is all there is
    largest = max(scales)
    for gradient, error, scale in zip(whole, errors, scales, strict=True):
        tolerance = _TOLERANCE[gradient.dtype]
        if error > tolerance * max(scale, tolerance * largest):
            return Verdict(None, GRADIENTS_DEPEND)
    tells_means = rule_choice.are_told_apart(evidence.shares)
    return Verdict(rule, units=units(rule), tells_means=tells_means) if largest else Verdict(None, FLAT, undecided=True)


def _reached(of_runs: list[list[torch.Tensor | None]]) -> list[list[torch.Tensor]]:
    """For each run, the gradients of the parameters that some run reaches; 0 where it does not itself.

    The loss of a part may be a constant, which has none.
    """
    count = len(of_runs[0])
    reached = []
    for of_one in zip(*(of_run or [None] * count for of_run in of_runs), strict=True):
        some = next((gradient for gradient in of_one if gradient is not None), None)
        if some is not None:
            reached.append([torch.zeros_like(some) if gradient is None else gradient for gradient in of_one])
    return [list(of_run) for of_run in zip(*reached, strict=True)] or [[] for _ in of_runs]


def _joined(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1).to(gradients[0].device) for gradient in gradients])


def _largest(joined: torch.Tensor, sizes: list[int]) -> list[float]:
    """The largest absolute entry of each of the tensors that were joined; waits for the device once."""
    largest: list[float] = torch.stack([part.max() for part in torch.split(joined.abs(), sizes)]).tolist()
    return largest
