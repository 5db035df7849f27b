"""A forward run on a few rows together and on two parts of them, with everything undone that it did."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from oomfix.runtime import compat, simulation, trees
from oomfix.runtime.batches import outputs, rule_choice
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.bounds import Bounds
from oomfix.runtime.batches.outputs import Weight
from oomfix.runtime.batches.rows import Gaps, first_part, make_gaps
from oomfix.runtime.memory.oom import is_out_of_memory
from oomfix.runtime.state.attributes import Attributes, Containers
from oomfix.runtime.state.data_places import DataPlaces
from oomfix.runtime.state.gradients import GradientsNoted
from oomfix.runtime.state.probe import Draws, Probe, Writes, storages_of
from oomfix.runtime.state.random_state import RandomState, is_generator
from oomfix.runtime.state.referenced import generators_in, owners_of, tensors_of
from oomfix.runtime.state.running_statistics import quiet
from oomfix.runtime.state.variables import Variables
from oomfix.runtime.state.whole_draws import DrawnShapes, sizes_by_rows
from oomfix.runtime.verification.border import around_checked
from oomfix.runtime.verification.compared_numbers import Bent
from oomfix.runtime.verification.computed_masks import alike, empty
from oomfix.runtime.verification.counted_first import DividedMeans, Means, NotedMeans, are_counted, vary
from oomfix.runtime.verification.divisors import Divisor, common_bound, counting, divisors, of_each, read
from oomfix.runtime.verification.evidence import Evidence, Runs
from oomfix.runtime.verification.hinges import closed_alike
from oomfix.runtime.verification.left_attributes import Left, left_by, recorded
from oomfix.runtime.verification.one_run import OneRun
from oomfix.runtime.verification.own_targets import Noted, OwnMeans
from oomfix.runtime.verification.thresholds import (
    are_cut_later,
    go_across,
    leave_torch,
    note_hidden_terms,
    note_thresholds,
)
from oomfix.runtime.verification.told_numbers import ToldNumbers
from oomfix.runtime.verification.watching import HeldOut, Watch

_WROTE_BATCH = "it writes its batch in place, of which micro-batches would be copies"
_WROTE = "it writes parameters, buffers or other tensors that outlive it"


def compare(
    forward: Callable[..., Any],
    batch: Batch,
    modules: list[nn.Module],
    rows: list[int],
    how: Runs,
    see: Callable[[Any], Any] = lambda result: result,
    gaps: Gaps = MappingProxyType({}),
) -> Evidence:
    """Run `forward` on `rows` of `batch`, and on two parts of them.

    Random number generators, modes, what the forward wrote into tensors that existed before, and attributes of
    modules are put back; no gradient is accumulated. Only what it appended to lists of the program, which it does not
    read, stays there.
    Autocast is off, BatchNorm and Dropout are in eval mode.

    Args:
        see: what to keep of each result, called before the run ends.
        gaps: to be made in the first row, or the first part, see `rows.make_gaps`.

    Raises:
        RuntimeError: the device ran out of memory.
    """
    return _Comparison(forward, batch, rows, how, see, gaps).evidence(modules)


class _Comparison:
    def __init__(
        self,
        forward: Callable[..., Any],
        batch: Batch,
        rows: list[int],
        how: Runs,
        see: Callable[[Any], Any],
        gaps: Gaps,
    ) -> None:
        self._gaps = gaps
        self._forward = forward
        self._batch = batch
        self._rows = rows
        self._how = how
        self._see = see
        self._writes = Writes()
        self._draws = Draws(how.reverses)
        self._held_out = HeldOut()
        self._outside: list[torch.Tensor] = []
        self._storages: set[int] = set()
        self._own: list[Any] = []
        self._attributes = Attributes([])
        self._owners: list[Any] = []
        self._noted: Noted | None = None
        self._own_means: OwnMeans | None = None
        self._means: list[Means] = []
        self._numbers: list[ToldNumbers] = []
        self._turned: list[tuple[torch.Tensor, int]] = []

    def evidence(self, modules: list[nn.Module]) -> Evidence:
        found = Evidence()
        holders = [names for module in modules for names in (module._parameters, module._buffers) if names]
        self._outside = [held for names in holders for held in names.values() if held is not None]
        self._outside += tensors_of(self._forward, modules)
        self._storages = storages_of(self._outside)
        places = DataPlaces(self._outside)
        gradients = GradientsNoted(t for t in self._outside if t.requires_grad and t.is_leaf)
        given = filter(is_generator, (*self._batch.args, *self._batch.kwargs.values()))
        self._own = [*generators_in(self._forward, modules), *given]
        before = generators = RandomState(own=self._own)
        if self._how.ahead:
            before.draw_ahead(self._how.ahead)
            generators = RandomState(own=self._own)
        try:
            with self._undisturbed(modules, found):
                self._compare(found, generators)
        except Exception as error:  # the forward is the user's, and may fail on a few rows in any way
            if is_out_of_memory(error):
                raise
            said = str(error).strip().splitlines() or [""]
            found.failure = f"{type(error).__name__}: {said[0]}"
        finally:
            self._note_draws(found, generators)
            if found.drew or self._how.ahead:
                before.restore()
            if places.restore():
                found.wrote = _WROTE
            if gradients.put_back():
                found.changes_gradients = True
        if any(copy._version != version for copy, version in self._turned):
            found.wrote = _WROTE_BATCH
        found.held = self._held_out.something
        return found

    def _compare(self, found: Evidence, generators: RandomState) -> None:
        count = len(self._rows)
        cut = first_part(count)
        whole = self._run(0, count, self._how.light)
        if not self._how.light or self._how.graph:
            # one that is to be confirmed, known to draw nothing, is asked in the end
            self._note_draws(found, generators)
        # operations that the functions called show all of, and that draw nothing, need not be watched in the parts
        light = whole.functions_tell and not found.drew
        found.whole, found.calls, found.differentiates = whole.result, whole.calls, whole.differentiates
        found.terms, found.picks = whole.terms, whole.watch.picks
        places = () if self._noted is None else self._noted.places()
        if self._noted is not None and self._how.mask_gaps:
            # what masks leave out then does not stand in the batch
            amounts = self._noted.amounts
            self._own_means = OwnMeans([None] * len(amounts), self._noted.batch, count, amounts)
        elif self._noted is not None and places:
            self._own_means = OwnMeans(places, self._noted.batch, count)
        parts: list[OneRun] = []
        drawn_shapes = [whole.drawn_shapes]
        after = RandomState(own=self._own, of_cpu=False) if found.drew_besides_torch else None
        found.once_outside = after is not None and self._how.replays
        for begin, end in ((0, cut), (cut, count)):
            if found.drew and (self._how.replays or begin == 0):
                generators.restore()
            if self._how.replays:
                self._draws.replay(begin, count)
            watched = begin == 0 or whole.watch.decides()
            part = self._run(begin, end, light, watched)
            found.once_outside = found.once_outside and after is not None and not after.moved_besides_torch()
            drawn_shapes.append(part.drawn_shapes)
            parts.append(part)
            found.parts.append(part.result)
            # what is selected among a number of entries that grows with the rows cannot be judged on a few rows
            pairs = zip(whole.selected_among, part.selected_among, strict=False)
            found.selects |= any(total != among for total, among in pairs)
            found.selects |= are_cut_later(whole, count, part, end - begin, self._batch.size)
            if begin == 0:
                masks = whole.watch.masks.seen, part.watch.masks.seen
                found.alike_masks, found.empty_masks = alike(*masks, found.drew), empty(*masks)
                found.closed_hinges = closed_alike(whole.watch.hinges, part.watch.hinges)
                found.selects |= go_across(whole, count, part, cut)
                found.leaves = leave_torch(whole, count, part, cut)
        # those that keep to their mean are hidden from what divides the others (checkpoints, compiled code)
        are_divided = self._own_means is not None and self._own_means.all_counted()
        found.own_targets = places if are_divided and not any(part.nll_weights for part in parts) else ()
        self._note_means(found, parts)
        found.numbers = self._numbers[:3]
        self._weigh(found, whole, parts)
        if simulation.assumption is None:
            note_thresholds(found, [whole, *parts])
            note_hidden_terms(found, [whole, *parts])
        found.draws = sizes_by_rows(drawn_shapes, [count, cut, count - cut])
        depends = left_by(whole.left, [part.left for part in parts], found.shares)
        # with a graph, beside the gradients of all rows, one run more would take more memory than a micro-batch
        asks = bool(depends) or (bool(whole.added) and not self._how.graph)
        if depends is None or (asks and not self._repeats(whole, parts[0].added, generators)):
            names = [self._name(*key) for key in whole.left or whole.added]
            found.wrote = f"it changes {', '.join(names[:2])}"
        found.left = tuple(attribute for attribute in depends or () if not attribute.has_rows)

    def _weigh(self, found: Evidence, whole: OneRun, parts: list[OneRun]) -> None:
        """Note what each part weighs."""
        count = len(self._rows)
        sizes = (first_part(count), count - first_part(count))
        divisors = [part.nll_weights for part in parts]
        found.nll_losses = len(whole.nll_weights)
        if found.nll_losses and all(
            len(of_part) * count == found.nll_losses * size for of_part, size in zip(divisors, sizes, strict=True)
        ):
            # a loop over the samples: each cross entropy divides by what is in one of them, whatever the batch holds
            found.nll_losses, divisors = 0, [[], []]
        if found.own_targets or found.counted_means:
            found.nll_losses = 0  # they are means over samples now
        if simulation.assumption is None:
            common = of_each([run.divisors for run in (whole, *parts)])
            amounts, *of_parts = ([one.divided_by for one in read(of_run)[0]] for of_run in common)
            counted = counting(amounts, of_parts)
            found.means = tuple(position in counted for position in range(len(amounts)))
        if self._how.divides:
            self._divide(found, whole, parts, sizes)
            return
        found.shares = [Weight(n, of_part[0] if of_part else n) for n, of_part in zip(sizes, divisors, strict=True)]

    def _note_means(self, found: Evidence, parts: Sequence[OneRun]) -> None:
        """Note what the means divide by, if they were watched."""
        found.amounts = [means.amounts for means in self._means]
        asked = self._how.counted_means
        if asked:
            whole, *of_parts = found.amounts
            found.miscounted = not are_counted(asked, whole, of_parts)
            found.varies = vary(asked, whole, of_parts)
            found.counted_means = () if found.miscounted or any(part.nll_weights for part in parts) else asked

    @staticmethod
    def _divide(found: Evidence, whole: OneRun, parts: list[OneRun], sizes: tuple[int, ...]) -> None:
        """Note what each part weighs where they weigh what their losses divide by."""
        of_whole, *of_parts = (read(run.divisors)[0] for run in (whole, *parts))
        amounts = [[one.amount for one in counted] for counted in of_parts]
        found.divisors = counting([one.amount for one in of_whole], amounts)
        found.shares = [Weight(size, size) for size in sizes]
        if not found.divisors:
            return
        # of the whole and of both parts
        counted = [[of_run[position] for position in found.divisors] for of_run in (of_whole, *of_parts)]
        bounds = [common_bound(of_run) for of_run in counted]
        if any(bound != (True, bounds[0][1]) for bound in bounds):
            found.divisors = ()
            return
        found.bound = bounds[0][1]
        firsts = [of_run[0] for of_run in counted[1:]]
        found.shares = [
            Weight(size, first.amount, first.divided_by, first.bound) for size, first in zip(sizes, firsts, strict=True)
        ]

    @staticmethod
    def _note_draws(found: Evidence, generators: RandomState) -> None:
        found.drew = found.drew or generators.moved()
        found.drew_besides_torch = found.drew_besides_torch or (found.drew and generators.moved_besides_torch())

    def _repeats(self, whole: OneRun, by_part: Left, generators: RandomState) -> bool:
        """Whether the forward gives the same again, though it finds what it left in attributes and containers."""
        self._attributes.put(whole.left | recorded(whole.added, by_part))
        generators.restore()
        if self._how.replays:
            self._draws.replay(0, len(self._rows))
        try:
            return rule_choice.equal(self._run(0, len(self._rows), self._how.light).result, whole.result)
        except Exception as error:  # the forward is the user's, and may fail on its own state in any way
            if is_out_of_memory(error):
                raise
            return False

    def _name(self, owner: int, name: str) -> str:
        is_variable = isinstance(self._owners[owner], Variables | Containers)
        return f"the variable {name!r}" if is_variable else f"{type(self._owners[owner]).__name__}.{name}"

    def _run(self, begin: int, end: int, light: bool, watched: bool = True) -> OneRun:
        args, kwargs = self._batch.chosen(self._rows[begin:end])
        if self._gaps and begin == 0:
            emptied = first_part(len(self._rows)) if self._how.empties else 0
            make_gaps(self._batch.placed(args, kwargs), self._gaps, emptied)
        held_out = self._held_out if self._how.holds_out and begin == 0 else None
        mask_gaps = self._how.mask_gaps if begin == 0 else ()
        steps_first = self._batch.reading == "steps"
        given = {id(tensor) for tensor in self._batch.tensors()}
        copies = [tensor for tensor in trees.tensors((args, kwargs)) if id(tensor) not in given]
        self._turned += [(copy, copy._version) for copy in copies if steps_first]
        border, opened = around_checked(), self._how.opened
        rows_of_batch = storages_of(trees.tensors((args, kwargs)))
        watch = Watch(
            end - begin, held_out, self._writes, self._storages, mask_gaps, opened, steps_first, rows_of_batch
        )
        # passed by every function of torch, so only the runs that are compared by it get it
        watches = light or watched or bool(opened)
        closing = watch.closing(border) if watches else border or nullcontext()
        if light:
            graph = self._how.graph or (self._how.graph_of_whole and end - begin == len(self._rows))
            with watch, torch.set_grad_enabled(graph):
                result, divided_by, terms = self._result(args, kwargs, watch, end - begin, closing)
                calls = watch.calls
                result = outputs.detached(self._see(result))
            weights, among = watch.nll_weights, watch.selected_among
            return OneRun(result, *self._changes(), weights, divided_by, among, watch, calls, False, terms, [], True)
        probe = Probe(self._writes, self._draws if self._how.replays else None, copies)
        drawn = DrawnShapes()
        with watch if watches else nullcontext(), probe, drawn:
            result, divided_by, terms = self._result(args, kwargs, watch, end - begin, closing)
            calls, differentiates = watch.calls, probe.differentiates
            result = outputs.detached(self._see(result))
        tell = held_out is not None and watch.selected_among == probe.selected_among
        tell = tell and len(watch.nll_weights) == len(probe.nll_weights)
        weights, among, left = probe.nll_weights, probe.selected_among, self._changes()
        return OneRun(
            result, *left, weights, divided_by, among, watch, calls, differentiates, terms, drawn.drawn_shapes, tell
        )

    def _result(
        self, args: Any, kwargs: Any, watch: Watch, rows: int, closing: AbstractContextManager[Any]
    ) -> tuple[Any, list[Divisor], list[torch.Tensor]]:
        """What the forward returns, what the loss in it divides by, and its terms."""
        bounds = Bounds(watch.bent) if self._how.divides else None
        dividing = self._dividing(args, kwargs, rows, watch.bent)
        # what notes the places of calls inside of it would find another way to them behind one context more
        with closing, bounds or nullcontext(), dividing, self._noting(watch):
            result = self._forward(*args, **kwargs)
        loss = outputs.loss_in(result)
        if loss is None or loss.numel() != 1:
            return result, [], []
        return result, divisors(loss, bounds), watch.terms_of(loss)

    def _dividing(self, args: Any, kwargs: Any, rows: int, bent: list[Bent]) -> AbstractContextManager[Any]:
        """What the forward of so many rows runs in, so that cross entropies are divided by what the whole has."""
        if self._how.own_targets and rows == len(self._rows):
            self._noted = Noted(self._batch.placed(args, kwargs))
            return self._noted
        counted, of_rows = self._how.counted_means, len(self._rows)
        if counted is not None:
            whole = [amount.number for amount in self._means[0].amounts] if self._means else []
            is_part = counted and rows != of_rows
            self._means.append(DividedMeans(counted, whole, rows / of_rows, bent) if is_part else NotedMeans(bent))
            return self._means[-1]
        return nullcontext() if self._own_means is None else self._own_means.part(rows)

    def _noting(self, watch: Watch) -> AbstractContextManager[Any]:
        if not self._how.notes_numbers:
            return nullcontext()
        self._numbers.append(ToldNumbers(sys._getframe(1), watch.is_made))
        return self._numbers[-1]

    def _changes(self) -> tuple[Left, Left]:
        """What has changed in attributes and containers, and which of these were only added to."""
        if self._attributes.are_untouched():
            return {}, {}
        both = self._attributes.changes(), self._attributes.grown()
        changed, grown = ({key: outputs.detached(value) for key, value in found.items()} for found in both)
        return changed, grown

    @contextmanager
    def _undisturbed(self, modules: list[nn.Module], found: Evidence) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(quiet(modules))
            stack.enter_context(compat.force_eager())
            stack.enter_context(compat.without_autocast())
            stack.enter_context(torch.set_grad_enabled(self._how.graph))
            self._owners = owners_of(self._forward, modules)
            self._attributes, tells = Attributes(self._owners), True
            try:
                yield
            except Exception as error:
                tells = is_out_of_memory(error)  # a forward that failed has not shown what it reads
                raise
            finally:
                if self._writes:
                    found.wrote = _WROTE
                    self._writes.undo()
                self._attributes.restore(keeps_records=tells and not found.wrote)
