"""May this batch be split? A few rows are run together and in two parts, and the results compared.

Whether a loss is a mean over independent samples cannot be read off its code (in-batch negatives, balance
losses, batch-normalised dice, pairwise attention that runs in training only), but it shows in numbers: the
results of the parts must give the result of the whole, under one of the rules in `outputs`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat, outputs
from oomfix.runtime.batch import Batch
from oomfix.runtime.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.outputs import Choice, Mean, Rule, Sum, Weight
from oomfix.runtime.probe import Draws, Probe, Writes, counters_kept
from oomfix.runtime.rollback import RandomState
from oomfix.runtime.running_statistics import quiet

_MOST_ROWS = 32  # as many as one micro-batch has, up to this
_SMALL = 4096  # entries of a parameter whose gradient is compared
_COMPARED = 6  # parameters whose gradients are compared
_GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest entry in a part
_FEWEST_ROWS = 3  # the least that make two unequal parts


@dataclass(frozen=True)
class Verdict:
    """What a check found out about a forward.

    Attributes:
        rule: how the results of micro-batches give the result of the batch; None: it may not be split.
        reason: why it may not be split, as the end of a sentence.
        nll_losses: cross entropies with a mean that the forward computes.
        counts_targets: the loss (in an evaluation without one, some result) is a mean over targets, so
            micro-batches weigh what their cross entropies divide by; if False although there
            are such losses, that divisor must be the same for every sample.
        sums: the loss is a sum over samples, not a mean.
        needs_gradients: the forward differentiates by itself (gradient penalties).
        trusted: no rule fits, but the user asked for splitting.
        undecided: the rows left a question open; to be looked at again soon.
        held: a cross entropy was run with targets held out, so a mean over targets would have been seen.
        mode: whether targets were held out, and whether draws were replayed, in the comparison that decided.
    """

    rule: Rule | None
    reason: str = ""
    nll_losses: int = 0
    counts_targets: bool = False
    sums: bool = False
    needs_gradients: bool = False
    trusted: bool = False
    undecided: bool = False
    held: bool = False
    mode: tuple[bool, bool] = (False, False)


def check(
    forward: Callable[..., Any],
    batch: Batch,
    modules: list[nn.Module],
    most_rows: int,
    trust: bool = False,
    again: bool = False,
) -> Verdict:
    """Compare `forward` on a few rows of `batch` with `forward` on two unequal parts of them.

    Nothing remains of it: random number generators, modes, whatever the forward wrote into tensors that existed
    before, and numbers that modules count with are put back; no gradient is accumulated. Autocast is off.

    Args:
        forward: returns the loss, or a container whose first value (or "loss") it is.
        batch: the samples; of fewer than three, rows are repeated.
        modules: every module that the forward may run.
        most_rows: rows of one micro-batch, which bound what the check may hold in memory.
        trust: the user asked for splitting whatever the check says: values that no rule fits get the one that
            their shapes suggest.
        again: an earlier check has compared full masks and gradients; leave that out.

    Returns:
        The verdict; an undecided one where not even two rows fit.
    """
    most = max(min(most_rows, _MOST_ROWS), _FEWEST_ROWS)
    for rows in sorted({most, max((most + 1) // 2, _FEWEST_ROWS), _FEWEST_ROWS, 2}, reverse=True):
        try:
            chosen = choose_rows(batch, rows)
            verdict = _check_rows(forward, batch, modules, chosen, trust)
            if verdict.rule is None or trust or again:
                return verdict
            try:
                return _look_closer(forward, batch, modules, chosen, verdict)
            except RuntimeError as error:
                if rows > 2 or not is_out_of_memory(error):
                    raise
                return verdict
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_what_is_left(thorough=True)
    return Verdict(None, "there is no memory to check it on a few rows", undecided=True)


def choose_rows(batch: Batch, count: int) -> list[int]:
    """`count` rows spread over `batch`, unlike each other where flags, labels and masks tell them apart.

    A batch may be sorted, or its first rows complete while later ones are masked. Rows of a batch smaller than
    `count` are named again, so that two unequal parts can be made of any batch.
    """
    size = batch.size
    spread = [index * (size - 1) // max(count - 1, 1) for index in range(count)] if count < size else list(range(size))
    if count < size:
        unlike = list(dict.fromkeys(row for tensor in batch.tensors() for row in _extreme_rows(tensor, size)))
        spread = list(dict.fromkeys([*unlike[: count - 2], *spread]))[:count]
    # so that the two parts hold different numbers of what is masked
    for tensor in batch.tensors():
        counts = _entries(tensor, size).tolist()
        if len(set(counts)) > 1:
            spread.sort(key=counts.__getitem__, reverse=True)
            # one of the fullest rows with the emptiest ones, the other full ones in the second part
            second = count - (count // 2 + 1)
            spread = [spread[0], *spread[1 + second :], *spread[1 : 1 + second]]
            break
    return [spread[index % len(spread)] for index in range(count)]


def _extreme_rows(tensor: torch.Tensor, size: int) -> list[int]:
    """The rows with the fewest and the most entries that count; [] for plain inputs."""
    counts = _entries(tensor, size)
    return [int(counts.argmin()), int(counts.argmax())] if len(counts) else []


def _entries(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """For each row, how many entries are neither 0 nor a negative label; empty for plain inputs."""
    nothing = torch.empty(0)
    if tensor.is_nested or tensor.layout != torch.strided or tensor.dim() == 0 or tensor.shape[0] != size:
        return nothing
    entries = tensor.detach().reshape(size, -1) if tensor.numel() else tensor.reshape(size, 0)
    if not tensor.numel() or entries.is_complex() or (entries.is_floating_point() and not _is_mask(entries)):
        return nothing
    return (entries > 0).sum(1)


def _is_mask(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _check_rows(
    forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], rows: list[int], trust: bool
) -> Verdict:
    verdict = Verdict(None)
    comparison = _Comparison(forward, batch, modules, rows)
    for needs_gradients in (False, True):
        failed = False
        for holds_out, replays in ((True, True), (True, False), (False, True), (False, False)):
            if (not replays and comparison.drew_nothing) or (not holds_out and comparison.held_nothing):
                continue
            comparison = _Comparison(forward, batch, modules, rows)
            try:
                verdict = comparison.verdict(needs_gradients, holds_out, replays, trust)
                failed = False
            except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
                if is_out_of_memory(error):
                    raise
                said = str(error).strip().splitlines() or [""]
                why = f"{type(error).__name__}: {said[0]}"
                verdict = Verdict(None, f"it fails on {len(rows)} rows of the batch ({why})")
                failed = True
            if verdict.rule is not None or verdict.undecided or (comparison.wrote and not failed):
                return verdict
        # a forward that differentiates by itself fails without gradients; others have had their verdict
        if not failed:
            return verdict
    return verdict


def _look_closer(
    forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], rows: list[int], verdict: Verdict
) -> Verdict:
    """The verdict, unless masks that happen to be full, or gradients, show that samples depend on each other."""
    holds_out, replays = verdict.mode
    for masks, gradients in ((True, False), (False, True)):
        # a graph needs more memory than the run of a check without one
        chosen = choose_rows(batch, min(len(rows), max(_FEWEST_ROWS, len(rows) // 2))) if gradients else rows
        comparison = _Comparison(forward, batch, modules, chosen, masks, gradients)
        try:
            closer = comparison.verdict(verdict.needs_gradients or gradients, holds_out, replays, False)
        except Exception as error:  # the forward is the user's, and may refuse other masks in any way
            if is_out_of_memory(error):
                raise
            continue
        if comparison.looked and closer.rule is None and not closer.undecided:
            return closer
    return verdict


class _Comparison:
    """One run on all rows and one on each of two unequal parts."""

    def __init__(
        self,
        forward: Callable[..., Any],
        batch: Batch,
        modules: list[nn.Module],
        chosen: list[int],
        masks: bool = False,
        gradients: bool = False,
    ) -> None:
        self._forward = forward
        self._modules = modules
        self._chosen = chosen
        self.looked = False
        self._batch = self._with_other_masks(batch) if masks else batch
        self._rows = len(chosen)
        self._cut = min(self._rows // 2 + 1, self._rows - 1)
        self._gradients = gradients
        self._selected: list[list[int]] = []
        self._writes = Writes()
        self._draws = Draws()
        self.wrote = ""
        self.drew_nothing = True
        self.held_nothing = True

    def verdict(self, needs_gradients: bool, holds_out: bool, replays: bool, trust: bool) -> Verdict:
        """Run, compare and undo.

        Args:
            needs_gradients: run with gradients on.
            holds_out: let cross entropies ignore some targets of the first row.
            replays: the parts draw the rows of what the whole drew. If not, they go on drawing, which is the
                same for a forward that draws sample by sample in a loop.
            trust: values that no rule fits get the one that their shapes suggest.
        """
        parts = [(0, self._cut), (self._cut, self._rows)]
        generators = RandomState()
        draws = self._draws if replays else None
        try:
            with self._undisturbed(needs_gradients):
                whole, nll_weights = self._run(0, self._rows, draws, holds_out)
                results = []
                for begin, end in parts:
                    if replays or begin == 0:
                        generators.restore()
                    if replays:
                        self._draws.replay(begin, self._rows)
                    results.append(self._run(begin, end, draws, holds_out and begin == 0))
        finally:
            self.drew_nothing = not self._draws.recorded and not generators.moved_outside_torch()
            generators.restore()
        if self.wrote and not trust:
            reason = f"it keeps state of its own between calls: {self.wrote}"
            return Verdict(None, reason, needs_gradients=needs_gradients)
        shares = [
            # unless targets were held out, both kinds of mean fit and the one over samples is the safer one:
            # it is used only as long as every sample counts the same
            Weight(end - begin, end - begin if self.held_nothing or not holds_out else weights[0])
            for (begin, end), (_, weights) in zip(parts, results, strict=True)
        ]
        verdict = self._compare(whole, [result for result, _ in results], shares, trust)
        if verdict.rule is not None and not trust and self._selects_among_samples():
            return Verdict(None, "it selects among the samples of a batch, which a few rows cannot show")
        return replace(
            verdict,
            nll_losses=len(nll_weights),
            needs_gradients=needs_gradients,
            held=not self.held_nothing,
            mode=(holds_out, replays),
        )

    def _selects_among_samples(self) -> bool:
        """Whether a selection (topk and the like) was made among a number of entries that grows with the rows."""
        whole, *parts = self._selected
        sizes = zip(whole, *parts, strict=False)
        return any(total != first or total != second for total, first, second in sizes)

    @contextmanager
    def _undisturbed(self, needs_gradients: bool) -> Iterator[None]:
        with ExitStack() as stack:
            counters = stack.enter_context(counters_kept(self._modules))
            stack.enter_context(quiet(self._modules))
            stack.enter_context(compat.force_eager())
            stack.enter_context(torch.set_grad_enabled(needs_gradients))
            try:
                yield
            finally:
                if self._writes:
                    self.wrote = "it writes parameters, buffers or other tensors that outlive it"
                    self._writes.undo()
        if counters:
            self.wrote = f"it changes {counters[0]}"

    def _run(self, begin: int, end: int, draws: Draws | None, holds_out: bool) -> tuple[Any, list[float]]:
        args, kwargs = self._batch.chosen(self._chosen[begin:end])
        probe = Probe(self._writes, draws)
        hold_out = _HoldOut(end - begin if holds_out else 0, spare=self._cut > 1)
        # the mode is passed by every function of torch, so only the run that needs it gets it
        with hold_out if holds_out else nullcontext(), probe:
            result = self._forward(*args, **kwargs)
            if self._gradients:
                result = self._gradient_of(result)
        self.held_nothing = self.held_nothing and not hold_out.held
        self._selected.append(probe.selected_among)
        return outputs.detached(result), probe.nll_weights

    def _with_other_masks(self, batch: Batch) -> Batch:
        """The batch with half of the first row of each full (or empty) mask cleared (or filled)."""
        first = self._chosen[0]

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not len(_entries(leaf, batch.size)):
                return leaf
            rows = leaf.detach()[self._chosen]
            # an index of 1 may be made 0; an index of 0 made 1 may be out of range
            full, empty = bool((rows == 1).all()), rows.dtype == torch.bool and not bool(rows.any())
            if not (full or empty):
                return leaf
            self.looked = True
            changed = leaf.detach().clone()
            row = changed[first].reshape(-1)
            row[: max(row.numel() // 2, 1)] = 0 if full else 1
            changed[first] = row.view(changed[first].shape)
            return changed

        return batch.mapped(other)

    def _gradient_of(self, result: Any) -> Any:
        """The loss and its gradients to a few small parameters, which show factors that have no gradient."""
        loss = outputs.loss_in(result)
        if loss is None or not loss.requires_grad or loss.numel() != 1:
            return loss, []
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        small = [p for p in parameters if p.requires_grad and p.numel() <= _SMALL and p.dtype in _GRADIENT_TOLERANCE]
        if not small:
            return loss, []
        gradients = torch.autograd.grad(loss, small[-_COMPARED:], allow_unused=True, materialize_grads=True)
        return loss, list(gradients)

    def _compare_gradients(self, whole: Any, parts: list[Any], shares: list[Weight]) -> Verdict:
        loss, gradients = whole
        choice = outputs.choose(loss, [part[0] for part in parts], shares) if gradients else None
        if choice is None or choice.undecided:
            return Verdict(None, "its gradients cannot be compared", undecided=True)
        self.looked = True
        for index, gradient in enumerate(gradients):
            collector = choice.rule.collector(0)
            for (_, of_part), share in zip(parts, shares, strict=True):
                collector.add(of_part[index], share)
            scale = max(float(of_part[index].abs().max()) for _, of_part in parts)
            error = float((gradient - collector.result()).abs().max())
            if error > _GRADIENT_TOLERANCE[gradient.dtype] * scale:
                return Verdict(None, "samples depend on each other: a few rows give another gradient in two parts")
        return Verdict(choice.rule)

    def _compare(self, whole: Any, parts: list[Any], shares: list[Weight], trust: bool) -> Verdict:
        loss = outputs.loss_in(whole)
        if loss is not None and loss.numel() != 1:
            loss = None  # an evaluation returns what it likes
        if loss is not None and not loss.isfinite().all():
            # other rows may show more
            return Verdict(None, "its loss is not a number on a few rows", undecided=True)
        if self._gradients:
            return self._compare_gradients(whole, parts, shares)
        choice = outputs.choose(whole, parts, shares)
        trusted = trust and (choice is None or bool(self.wrote))
        if choice is None and trust:
            choice = Choice(outputs.likely(whole, parts[0]))
        if choice is None:
            return Verdict(None, "samples depend on each other: a few rows give something else in two parts")
        rule = None if loss is None else outputs.choose(loss, [outputs.loss_in(part) for part in parts], shares)
        losses = [outputs.loss_in(part) for part in parts]
        empty = rule is not None and rule.rule == Sum() and any(part is not None and not part.any() for part in losses)
        if rule is not None and (rule.undecided or empty) and not trust:
            return Verdict(None, "its loss is 0 on a few rows, which leaves open what it is a mean of", undecided=True)
        return Verdict(
            choice.rule,
            counts_targets=outputs.contains(choice.rule if rule is None else rule.rule, Mean("targets")),
            sums=rule is not None and isinstance(rule.rule, Sum),
            trusted=trusted,
            undecided=choice.undecided,
        )


class _HoldOut(TorchFunctionMode):
    """Lets cross entropies ignore half of the targets of the first row, or the row if it has one target.

    Without it, a check on rows that have no ignored target could not tell a mean over targets from a mean over
    samples, and the difference would only show in a later batch.

    Args:
        rows: samples in this run; 0 leaves all targets alone.
        spare: the first row is not alone in its part, so the part has targets left without it.
    """

    def __init__(self, rows: int, spare: bool) -> None:
        super().__init__()
        self._rows = rows
        self._spare = spare
        self.held = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._rows and func in (F.cross_entropy, F.nll_loss):
            ignored = kwargs.get("ignore_index", -100)
            if "target" in kwargs:
                kwargs["target"] = self._without_some(kwargs["target"], ignored)
            else:
                args = (args[0], self._without_some(args[1], ignored), *args[2:])
        return func(*args, **kwargs)

    def _without_some(self, target: torch.Tensor, ignored: int) -> torch.Tensor:
        if target.is_floating_point() or not target.dim() or target.shape[0] % self._rows:
            return target
        by_row = target.clone().view(self._rows, -1)
        half = by_row.shape[1] // 2
        if not half and not self._spare:
            return target
        by_row[0, : max(half, 1)] = ignored
        self.held = True
        return by_row.view(target.shape)
