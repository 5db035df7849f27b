"""Watching the functions of torch that a forward calls, while it runs on a few rows.

Far cheaper than watching every operation (`probe.Probe`), and enough for a forward that draws no random numbers.
"""

import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat, simulation
from oomfix.runtime.batches.rows import first_part
from oomfix.runtime.batches.sample_dims import as_it_was, by_row
from oomfix.runtime.state.probe import Writes
from oomfix.runtime.verification.border import Closed
from oomfix.runtime.verification.compared_numbers import Bent, exceeds, is_read, told_when_compared
from oomfix.runtime.verification.computed_masks import ComputedMasks
from oomfix.runtime.verification.function_kinds import BENDING, IN_PLACE, MAY_PICK, Kind, kind_of
from oomfix.runtime.verification.hinges import Hinges
from oomfix.runtime.verification.truths import EQUALS, Counts, truth_of

_MOST_ENTRIES = 1024  # of a tensor that is kept to be compared


def _picks(args: tuple[Any, ...]) -> bool:
    """Whether a call that takes entries of a tensor does so by a mask, or puts whole numbers into an order."""
    first, second = (*args, None, None)[:2]
    if isinstance(second, torch.Tensor):
        return second.dtype == torch.bool and second.dim() > 0
    # `where(mask)`, or experts by their numbers
    return len(args) == 1 and isinstance(first, torch.Tensor) and not first.is_floating_point()


def _compares_one_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call asks if one number is another one; what is done about 0 is seen by `truths`."""
    if func.__name__ not in EQUALS or len(args) != 2:
        return False
    value, other = args
    is_number = isinstance(other, int | float) and not isinstance(other, bool) and other != 0
    return is_number and isinstance(value, torch.Tensor) and not value.is_nested and not value.dim()


class HeldOut:
    """Which cross entropies of a run had targets held out, so that its first part holds out the same.

    Half of the targets of the first row are ignored, or the row if it has one target, except where the first part
    would have no target left: a part without targets shows nothing.
    """

    def __init__(self) -> None:
        self.decisions: list[bool] = []
        self.decided = False

    @property
    def something(self) -> bool:
        """Whether any cross entropy had targets held out."""
        return any(self.decisions)


@dataclass(frozen=True)
class Across:
    """What may go across samples, and shows nothing of it on a few rows that are far apart.

    Attributes:
        number: how many values an extreme (max, argmin) was taken of, along a dimension, or were numbered there, or
            went into a function that bends one by one, or gives a mask, or which there was a question about.
        by_pairs: it goes across if the number grows with the pairs of samples, not with the samples.
    """

    number: int
    by_pairs: bool

    def grows(self, rows: int, other: "Across", other_rows: int) -> bool:
        """Whether this, on so many rows, and the same on others show that it goes across samples."""
        power = 2 if self.by_pairs else 1
        return self.number != other.number and self.number * other_rows**power == other.number * rows**power


@dataclass(frozen=True)
class Kept:
    """Which of how many entries were kept.

    Attributes:
        number: so many were there.
        at_most: the first of so many are kept.
        since: those before this one are not.
    """

    number: int
    at_most: int
    since: int = 0

    def cuts_more(self, rows: int, other: "Kept", other_rows: int, batch: int) -> bool:
        """Whether this, on so many rows, and the same of a part kept all, and may not in a batch of so many.

        What is not kept from the first one on has its place in the batch, which a part does not have.
        """
        if (self.at_most, self.since) != (other.at_most, other.since) or self.number == other.number:
            return False
        by_rows = self.number * other_rows == other.number * rows
        if self.since:
            return by_rows
        if max(self.number, other.number) > self.at_most:
            return False
        # of what a mask leaves, there may be any number
        return not by_rows or self.number * batch > self.at_most * rows


class Watch(TorchFunctionMode):
    """Context around one run of a forward.

    Attributes:
        nll_weights: the divisor of each cross entropy with a mean, in the order of the calls.
        calls: functions that were called.
        bent: what went into functions that bend, numbers that were compared, and how many distinct values there were,
            in the order of the calls; empty where it is large.
        truths: see `truths`.
        selected_among: how many values each selection of floats was made among, and the bound of each draw of indices.
        across: what may go across samples, see `Across`, by the kind of function.
        kept: the first entries that were kept of others.
        masks: those that were computed by comparing.
        hinges: those that were called.
        picks: samples, or what belongs to them, were picked by a mask or put into an order.
        hidden: numbers [] that were multiplied by a plain number that is 0: terms of a loss before their time.

    Args:
        rows: samples in this run.
        held_out: lets cross entropies ignore some targets, the same as in the first run given it; None: ignore none.
        writes: keeps the contents of `outside` before they are written to.
        outside: storages of tensors that outlive the run, see `probe.storages_of`.
        gaps: numbers of the comparisons whose masks get a gap, see `computed_masks`.
        opened: numbers of the hinges that give what goes in, see `hinges`.
        steps_first: samples stand behind time steps.
        given: storages of what the run is given.
    """

    def __init__(
        self,
        rows: int,
        held_out: HeldOut | None,
        writes: Writes,
        outside: Collection[int] = (),
        gaps: Collection[int] = (),
        opened: Collection[int] = (),
        steps_first: bool = False,
        given: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._border: Closed | None = None
        self.nll_weights: list[float] = []
        self.selected_among: list[int] = []
        self.bent: list[Bent] = []
        self.truths: list[bool] = []
        self._counted_nothing = False
        self._counts = Counts()
        self.calls = 0
        self.across: dict[Kind, list[Across]] = {}
        self.kept: list[Kept] = []
        self.masks = ComputedMasks(rows, gaps, steps_first)
        self.hinges = Hinges(opened)
        self.picks = False
        self.hidden: list[torch.Tensor] = []
        self._added: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._rows = rows
        self._steps_first = steps_first
        self._held_out = held_out
        self._decided = iter(list(held_out.decisions)) if held_out is not None and held_out.decided else None
        self._writes = writes
        self._outside = outside
        self._given = given

    def __exit__(self, *error: Any) -> None:
        if self._held_out is not None:
            self._held_out.decided = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def closing(self, border: Closed | None) -> Iterator[None]:
        """As the context `border`, which by itself would be one more that every function passes."""
        self._border = border
        try:
            yield
        finally:
            self._border = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self._border is not None:
            args, kwargs = self._border.replaced(args, kwargs)
        kind = kind_of(func)
        if kind is Kind.OTHER:  # nearly all
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if kind is Kind.DIVIDES:
            kind = Kind.STEPS if kwargs.get("rounding_mode") else Kind.OTHER
        self.picks = self.picks or kind is Kind.PICKS or (kind in MAY_PICK and _picks(args))
        if kind is Kind.TAKES:
            self._keep_first(*args)
        if kind in (Kind.TAKES, Kind.PICKS):
            return func(*args, **kwargs)
        if kind is Kind.CROSS_ENTROPY:
            return self._cross_entropy(func, args, dict(kwargs))
        if kind is Kind.READS:
            return self._read(func(*args), args[0])
        if kind is Kind.MULTIPLIES:
            self._note_hidden(*args)
            return func(*args, **kwargs)
        if kind is Kind.LEAVES:
            self._let_leave(args[0])
            return func(*args, **kwargs)
        if kind in (Kind.CASTS, Kind.COUNTS):
            made = self._note_made(kind, func(*args, **kwargs), args)
            if kind is Kind.COUNTS:
                self._counts.note(func.__name__, args, made)
            return made
        if kind is Kind.ADDS:
            if func.__name__ in IN_PLACE:
                self._about_to_write(args)
            return self._add(func, args, kwargs)
        if kind is Kind.FLIPS:
            return self._flip(func, args, kwargs)
        if kind is Kind.WRITES:
            self._about_to_write(args)
        elif kind is Kind.SELECTS:
            self._select(args, kwargs)
        elif kind is Kind.EXTREMES:
            self._take_extreme(args, kwargs)
        elif kind is Kind.NUMBERS:
            self._number_marked(args, kwargs)
        elif kind is Kind.BENDS:
            self._take_each(kind, *args[:1])
        elif kind is Kind.DRAWS_INDICES:
            bounds = [number for number in args[:2] if isinstance(number, int)]
            self.selected_among += bounds[-1:]
        if kind in BENDING or (kind is Kind.MASKS and _compares_one_number(func, args)):
            self._note_bent(func, (*args, *kwargs.values()))
        if kind in (Kind.BENDS, Kind.STEPS, Kind.OTHER) and func.__name__.endswith("_"):
            self._about_to_write(args)
        bends = kind in (Kind.BENDS, Kind.EXTREMES)
        result = self.hinges.call(func, args, kwargs) if bends else func(*args, **kwargs)
        if kind is Kind.DISTINGUISHES and simulation.assumption is None:
            values = result[0] if isinstance(result, tuple) else result
            self.bent.append(Bent(torch.tensor(values.numel())))
        self._note_truth(kind, func, args, result)
        if kind not in (Kind.COMPARES, Kind.MASKS):
            return result
        self._take_each(kind, result)
        return self.masks.computed(result)

    def _note_made(self, kind: Kind, result: Any, args: tuple[Any, ...]) -> Any:
        """Note that a number for the whole batch was made whole, or that nothing was counted."""
        if not isinstance(result, torch.Tensor) or simulation.assumption is not None:
            return result
        with torch._C.DisableTorchFunction():
            if result.dim() or compat.beneath_transforms(result) is not result:
                return result
            if kind is Kind.COUNTS:
                self._counted_nothing = self._counted_nothing or not bool(result)
            elif not result.is_floating_point() and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                self.bent.append(self._kept(args[0]))
        return result

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was not there before."""
        return tensor.layout != torch.strided or tensor.untyped_storage()._cdata not in self._outside

    def _is_given(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._given

    def decides(self) -> bool:
        """Whether the program may go by one number for the whole batch, which all parts have to be asked for then."""
        return bool(self.truths or self.kept or self.hidden) or any(
            one.computed and one.value.numel() == 1 for one in self.bent
        )

    def _note_truth(self, kind: Kind, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if kind in (Kind.DECIDES, Kind.COMPARES) or (kind is Kind.MASKS and func.__name__ in EQUALS):
            truth = truth_of(func.__name__, args, result, self._counts)
            if truth is not None:
                self.truths.append(truth)
                self._note_across(Kind.DECIDES, Across(self._counts.entries(args[0]), by_pairs=True))

    def _note_bent(self, func: Any, values: tuple[Any, ...]) -> None:
        bent = [self._kept(value) for value in values if isinstance(value, torch.Tensor)]
        if len(bent) == 1 and len(values) == 2 and kind_of(func) is Kind.COMPARES and bent[0].value.numel() == 1:
            bent = [replace(bent[0], exceeds=exceeds(func.__name__, bent[0].value.item(), values[1]))]
        if self._counts.asks(func.__name__, values):
            # what is true of all parts is true of the whole; of entries that are not those of samples it need not be
            bent = [replace(one, computed=False, counted_of=self._counts.entries(values[0])) for one in bent]
        # the numbers that `where` chooses from are often 0
        self.bent += [replace(one, computed=False) for one in bent] if func.__name__ == "where" else bent

    def _read(self, number: Any, tensor: torch.Tensor) -> Any:
        """What a program gets that reads a number off a tensor."""
        return told_when_compared(number, self.bent, self._kept(tensor))

    def _kept(self, shown: torch.Tensor) -> Bent:
        value = compat.beneath_transforms(shown)
        if value is None or value.is_complex() or value.layout != torch.strided or value.is_nested:
            return Bent(torch.empty(0))
        if value.numel() > _MOST_ENTRIES:
            return Bent(torch.empty(0))
        is_computed = value.untyped_storage()._cdata not in self._outside
        return Bent(value.detach().clone(), is_computed, of_nothing=is_computed and self._counted_nothing)

    def _about_to_write(self, args: tuple[Any, ...]) -> None:
        for written in args[0] if args and isinstance(args[0], list | tuple) else args[:1]:
            if isinstance(written, torch.Tensor) and written.layout == torch.strided and not written.is_nested:
                # `grad` only marks what it wraps, and what `vmap` writes is seen by the probe that watches first
                is_plain = compat.beneath_transforms(written) is written
                if is_plain and written.untyped_storage()._cdata in self._outside:
                    self._writes.about_to_write(written)

    def terms_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """The numbers [] that were added up to the loss, by operators."""
        found, sums, seen = [], [loss], set()
        while sums:
            total = sums.pop()
            if id(total) not in seen and id(total) in self._added:
                seen.add(id(total))
                for term, value in self._added[id(total)][1]:
                    found.append(value)
                    sums.append(term)
        return found

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        terms = [value for value in args[:2] if isinstance(value, torch.Tensor)]
        are_numbers = all(term.dim() == 0 and term.is_floating_point() for term in terms)
        values = [(term, term.detach().clone()) for term in terms] if are_numbers else []
        result = func(*args, **kwargs)
        if values:
            # kept, so that no other tensor gets its number
            self._added.setdefault(id(result), (result, []))[1].extend(values)
        return result

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[0] if args else kwargs.get("input")
        if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dim():
            dims = [argument for argument in args[1:] if isinstance(argument, int) and not isinstance(argument, bool)]
            dim = kwargs.get("dim", dims[-1] if dims and -values.dim() <= dims[-1] < values.dim() else -1)
            self.selected_among.append(values.shape[dim])

    def _take_extreme(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[0] if args else kwargs.get("input")
        if isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), torch.Tensor):
            self._take_each(Kind.EXTREMES, values)  # the larger of two
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(values, torch.Tensor) and isinstance(dim, int) and -values.dim() <= dim < values.dim():
            self._note_across(Kind.EXTREMES, Across(values.shape[dim], by_pairs=False))

    def _keep_first(self, values: Any, taken: Any) -> None:
        first = taken[0] if isinstance(taken, tuple) and taken else taken
        if not isinstance(first, slice) or not isinstance(values, torch.Tensor) or not values.dim():
            return
        since, until = (
            operator.index(bound) if hasattr(bound, "__index__") else 0 for bound in (first.start, first.stop)
        )
        if since > 0 or (not since and until > 0):
            self.kept.append(Kept(len(values), until, since))

    def _number_marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a running count of marks in several columns: who comes first to an expert may be served."""
        values = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if simulation.assumption is not None or not isinstance(dim, int) or not isinstance(values, torch.Tensor):
            return
        marks = compat.beneath_transforms(values)
        if marks is None or marks.layout != torch.strided or marks.dim() < 2 or not -marks.dim() <= dim < marks.dim():
            return
        if not marks.is_complex() and bool(((marks == 0) | (marks == 1)).all()):
            self._note_across(Kind.NUMBERS, Across(values.shape[dim], by_pairs=False))

    def _note_hidden(self, one: Any, other: Any = None) -> None:
        term, factor = (one, other) if isinstance(one, torch.Tensor) else (other, one)
        if not isinstance(factor, int | float) or factor != 0 or is_read(factor) or not isinstance(term, torch.Tensor):
            return
        if not term.dim() and term.is_floating_point() and compat.beneath_transforms(term) is term:
            self.hidden.append(term.detach().clone())

    def _let_leave(self, values: torch.Tensor) -> None:
        """Note that numbers of samples leave torch, where the program may put them into an order."""
        if values.dim() and values.is_floating_point() and self.is_made(values) and not self._is_given(values):
            self._note_across(Kind.LEAVES, Across(values.numel(), by_pairs=False))

    def _take_each(self, kind: Kind, values: Any = None) -> None:
        if isinstance(values, torch.Tensor) and values.dim():
            self._note_across(kind, Across(values.numel(), by_pairs=True))

    def _note_across(self, kind: Kind, across: Across) -> None:
        self.across.setdefault(kind, []).append(across)

    def _flip(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.__name__.endswith("_"):
            self._about_to_write(args)
        return self.masks.drawn(func(*args, **kwargs))

    def _cross_entropy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ignored = kwargs.get("ignore_index", -100)
        target = kwargs["target"] if "target" in kwargs else args[1]
        if compat.beneath_transforms(target) is None:
            return func(*args, **kwargs)  # of one sample, or of one model of several
        target = self._without_some(target, ignored)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        if kwargs.get("reduction", "mean") == "mean" and not target.is_floating_point():
            counting = target != ignored
            counted = counting.sum() if weight is None else weight[target[counting]].sum()
            self.nll_weights.append(float(counted))
        if "target" in kwargs:
            return func(*args, **{**kwargs, "target": target})
        return func(args[0], target, *args[2:], **kwargs)

    def _without_some(self, target: torch.Tensor, ignored: int) -> torch.Tensor:
        if self._held_out is None:
            return target
        held = self._hold(target, ignored) if self._decided is None or next(self._decided, False) else None
        if self._decided is None:
            self._held_out.decisions.append(held is not None)
        return target if held is None else held

    def _hold(self, target: torch.Tensor, ignored: int) -> torch.Tensor | None:
        found = None if target.is_floating_point() else by_row(target.clone(), self._rows, self._steps_first)
        if found is None:
            return None
        (in_rows, dim), entries = found, found[0].reshape(self._rows, -1)
        entries[0, : max(entries.shape[1] // 2, 1)] = ignored
        if self._decided is None and bool((entries[: first_part(self._rows)] == ignored).all()):
            return None
        return as_it_was(entries.view(in_rows.shape), dim).view(target.shape)
