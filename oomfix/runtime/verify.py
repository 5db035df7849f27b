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

_MOST_ROWS = 5
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
        undecided: the rows left open whether a value is a count or a mean; to be looked at again soon.
    """

    rule: Rule | None
    reason: str = ""
    nll_losses: int = 0
    counts_targets: bool = False
    sums: bool = False
    needs_gradients: bool = False
    trusted: bool = False
    undecided: bool = False


def check(
    forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], most_rows: int, trust: bool = False
) -> Verdict:
    """Compare `forward` on a few rows of `batch` with `forward` on two unequal parts of them.

    Nothing remains of it: random number generators, modes, whatever the forward wrote into tensors that existed
    before, and numbers that modules count with are put back; no gradient is accumulated. Autocast is off.

    Args:
        forward: returns the loss, or a container whose first value (or "loss") it is.
        batch: at least two samples.
        modules: every module that the forward may run.
        most_rows: rows of one micro-batch, which bound what the check may hold in memory.
        trust: the user asked for splitting whatever the check says: values that no rule fits get the one that
            their shapes suggest.

    Raises:
        torch.OutOfMemoryError: not even these few rows fit.
    """
    most = min(batch.size, _MOST_ROWS, max(most_rows, _FEWEST_ROWS))
    for rows in range(most, 1, -1):
        try:
            return _check_several(forward, batch, modules, rows, trust)
        except RuntimeError as error:
            if not is_out_of_memory(error) or rows == 2:
                raise
        free_what_is_left()
    return Verdict(None, "it is a single sample")


def _check_several(
    forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], rows: int, trust: bool
) -> Verdict:
    verdict = Verdict(None)
    for start in _starts(batch.size, rows):
        verdict = _check_rows(forward, batch, modules, start, rows, trust)
        if not verdict.undecided:
            break
    return verdict


def _starts(size: int, rows: int) -> Iterator[int]:
    """First rows, last rows, rows in the middle: where one run of rows leaves a question open, another may not."""
    yield from dict.fromkeys((0, size - rows, (size - rows) // 2))


def _check_rows(
    forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], start: int, rows: int, trust: bool
) -> Verdict:
    verdict = Verdict(None)
    comparison = _Comparison(forward, batch, modules, start, rows)
    for needs_gradients in (False, True):
        failed = False
        for holds_out, replays in ((True, True), (True, False), (False, True), (False, False)):
            if (not replays and comparison.drew_nothing) or (not holds_out and comparison.held_nothing):
                continue
            comparison = _Comparison(forward, batch, modules, start, rows)
            try:
                verdict = comparison.verdict(needs_gradients, holds_out, replays, trust)
                failed = False
            except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
                if is_out_of_memory(error):
                    raise
                said = str(error).strip().splitlines() or [""]
                verdict = Verdict(None, f"it fails on {rows} rows of the batch ({type(error).__name__}: {said[0]})")
                failed = True
            if verdict.rule is not None or comparison.wrote:
                return verdict
        # a forward that differentiates by itself fails without gradients; others have had their verdict
        if not failed:
            return verdict
    return verdict


class _Comparison:
    """One run on all rows and one on each of two unequal parts."""

    def __init__(
        self, forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], start: int, rows: int
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._modules = modules
        self._start = start
        self._rows = rows
        self._cut = (rows + 1) // 2
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
            return Verdict(None, f"it keeps state of its own between calls: {self.wrote}")
        shares = [
            # unless targets were held out, both kinds of mean fit and the one over samples is the safer one:
            # it is used only as long as every sample counts the same
            Weight(end - begin, end - begin if self.held_nothing or not holds_out else weights[0])
            for (begin, end), (_, weights) in zip(parts, results, strict=True)
        ]
        verdict = self._compare(whole, [result for result, _ in results], shares, trust)
        return replace(verdict, nll_losses=len(nll_weights), needs_gradients=needs_gradients)

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
        args, kwargs = self._batch.rows(self._start + begin, self._start + end)
        probe = Probe(self._writes, draws)
        hold_out = _HoldOut(end - begin if holds_out else 0, spare=self._cut > 1)
        # the mode is passed by every function of torch, so only the run that needs it gets it
        with hold_out if holds_out else nullcontext(), probe:
            result = self._forward(*args, **kwargs)
        self.held_nothing = self.held_nothing and not hold_out.held
        return outputs.detached(result), probe.nll_weights

    def _compare(self, whole: Any, parts: list[Any], shares: list[Weight], trust: bool) -> Verdict:
        loss = outputs.loss_in(whole)
        if loss is not None and loss.numel() != 1:
            loss = None  # an evaluation returns what it likes
        if loss is not None and not loss.isfinite().all():
            # other rows may show more
            return Verdict(None, "its loss is not a number on a few rows", undecided=True)
        choice = outputs.choose(whole, parts, shares)
        trusted = trust and (choice is None or bool(self.wrote))
        if choice is None and trust:
            choice = Choice(outputs.likely(whole, parts[0]))
        if choice is None:
            return Verdict(None, "samples depend on each other: a few rows give something else in two parts")
        rule = None if loss is None else outputs.choose(loss, [outputs.loss_in(part) for part in parts], shares)
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
