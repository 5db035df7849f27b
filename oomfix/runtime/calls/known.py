"""What the manager has learned about one forward: its models, its verdict, its size."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomfix.runtime.batches.batch import Batch, Place
from oomfix.runtime.batches.sample_dims import Reading
from oomfix.runtime.calls.distributed import ranks_of
from oomfix.runtime.calls.kept_state import KeptState
from oomfix.runtime.calls.sizing import Sizing
from oomfix.runtime.compat import is_compiled
from oomfix.runtime.modules import modules_in
from oomfix.runtime.precision import ModelCalls, device_type_of
from oomfix.runtime.state.gradients import has_hook
from oomfix.runtime.state.identity import Numbers, flags_inside, identity
from oomfix.runtime.state.referenced import code_of, generators_in, reachable_modules
from oomfix.runtime.state.running_statistics import iterates_power, uses_batch_statistics
from oomfix.runtime.steps.optimizers import parameters_of
from oomfix.runtime.verification.verdict import Verdict
from oomfix.runtime.verification.ways import Ways

_TELLING = 3  # samples that show more than rows that are repeated
_MOST_KNOWN = 256  # flags that change in every call shall not fill the memory


class Known:
    """One forward and the models it runs, from its first call on.

    Models are held weakly: what was learned about a deleted model does not keep it in memory.

    Attributes:
        name: what to call the forward in messages.
        calls: how many have begun, this one included.
        explores: the present call is the first, or one of those that are powers of two: everything is looked at anew.
        verdict: the last check's, None before the first.
        sizing: the micro-batches that fit.
        ranks: the processes that run it together with this one.
        state: what is put back after a failure.
        generators: random number generators of the program's own that it may draw from.
        keeps_cpu_generator: at every call: it runs on a card, or was seen to draw from torch's generator for the CPU.
        draws_outside_torch: it was seen to draw from Python's or NumPy's generator.
        writes_batch: it was seen to write its batch in place.
        writes_gradients: it was seen to run a backward of its own into gradients, or to fill them with zeros.
        model_calls: runs its models under autocast; None: it computes in fp32.
        unseen: leaves that its loss was not seen to reach, and might.
        split_calls: how many went well in micro-batches.
        fp32: autocast made it fail, or it differentiates by itself under fp16.
        rows_in_doubt: of micro-batches that take a way no check has seen; to be checked themselves.
        steps_seen: an optimizer has stepped since the first call, so its state exists.
        meets_graphs: its micro-batches use graphs from before the call, which end at a border.
        passes_graphs: its loss has been seen to reach such a graph.
        reading: what its batches were seen to be, see `Batch.reading`; None: a check has not told yet.
    """

    def __init__(self, forward: Callable[..., Any], trains: bool, roots: list[nn.Module], first_parts: int) -> None:
        # held so that its id, under which this is found, stays its own
        self.code = code_of(forward)
        self.name = getattr(forward, "__qualname__", type(forward).__name__)
        self._roots = [weakref.ref(root) for root in roots]
        # a criterion may be made anew in each iteration
        self._models = [weakref.ref(root) for root in roots if next(root.parameters(), None) is not None]
        self.calls = 0
        self.explores = False
        self.verdict: Verdict | None = None
        self.sizing = Sizing(first_parts)
        self.ranks = ranks_of(forward, roots, trains)
        self.state = KeptState(self.modules())
        self.generators = generators_in(forward, self.modules())
        self.keeps_cpu_generator = False
        self.draws_outside_torch = False
        self.writes_batch = False
        self.writes_gradients = False
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self.unseen: list[weakref.ref[torch.Tensor]] = []
        self.model_calls: ModelCalls | None = None
        self.fp32 = False
        self.split_calls = 0
        self.steps_seen = False
        self.meets_graphs = False
        self.passes_graphs = False
        self.reading: Reading | None = None
        self._checked_at = 0
        self._check_again_at = 0
        self._rows_seen = 0
        self._left_open = 0
        self._looked_again_at = 0
        self._refused: Verdict | None = None
        self._ways = Ways()
        self.rows_in_doubt: list[int] = []
        self._cut_before: dict[tuple[Reading, Place], bool] = {}
        self._ragged: list[bool] = []
        self._whole_places: dict[Reading, frozenset[Place]] = {}
        self._first_version: int | None = None
        self._numbers: Numbers = ()
        self._moving: frozenset[int] = frozenset()
        self._number_moved = False
        self._checks_for_numbers = 0
        self._modes: list[tuple[bool, int]] = []
        self._flags: list[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether all its models still exist."""
        return None not in [place() for place in self._models]

    def roots(self) -> list[nn.Module]:
        """The models themselves."""
        return [module for root in self._roots if (module := root()) is not None]

    def modules(self) -> list[nn.Module]:
        """The models with everything inside them, each once, without wrappers that have nothing but a model."""
        found = {id(module): module for root in self.roots() for module in modules_in(root)}
        return [module for module in found.values() if not isinstance(module, DistributedDataParallel)]

    def device_type(self, batch: Iterable[torch.Tensor]) -> str:
        """Where the forward runs: where its models are, or else its batch."""
        first = [next(root.parameters(), None) for root in self.roots()]
        return device_type_of([*(parameter for parameter in first if parameter is not None), *batch])

    def begin_call(self) -> None:
        """Count a call, and learn from a parameter's version whether an optimizer has stepped since the first."""
        self.calls += 1
        self.rows_in_doubt = []
        self.explores = self.calls & (self.calls - 1) == 0
        if not self.steps_seen and any(leaf._version != self._first_version for leaf in self.reached()[:1]):
            self._saw_step()

    def keep_whole(self, batch: Batch) -> None:
        """Leave what has been whole before in `batch` whole: a short batch may be as long as it is.

        What comes as cut for the first time, or in lists of entries that differ in length for the first time, or of
        which some are empty, shows something new, so the verdict is forgotten.
        """
        reading = batch.reading
        batch.whole = self._whole_places.get(reading, frozenset())
        layout = {(reading, place): cut for place, cut in batch.layout()}
        self._whole_places[reading] = batch.whole.union(place for (_, place), cut in layout.items() if not cut)
        if self.verdict is not None and any(self._cut_before.get(place) != cut for place, cut in layout.items()):
            self.verdict = None
        self._cut_before.update(layout)
        ragged = [is_so for one in batch.numbers_per_sample() for is_so in (len(set(one)) > 1, 0 in one)]
        if len(ragged) != len(self._ragged):
            self._ragged = ragged
        elif any(now and not before for now, before in zip(ragged, self._ragged, strict=True)):
            self._ragged = [now or before for now, before in zip(ragged, self._ragged, strict=True)]
            self.verdict = None

    def read(self, batch: Batch, verdict: Verdict) -> None:
        """Remember what `batch` is, which a check may have read otherwise than it was told."""
        self.keep_whole(batch)
        tells = self.reading is not None or batch.may_hold_views or batch.reading in ("steps", "folded", "input")
        if tells and verdict.rule is not None:
            self.reading = batch.reading

    def check_is_due(self, size: int, parts: int = 1) -> bool:
        """Whether the next split needs a check first: never checked, or its turn has come again.

        Auxiliary terms ramp up and hard-example mining kicks in later than at the first call, so a forward is
        checked again at calls 2, 4, 8 and so on, when a batch of `size` samples shows more than one of which rows had
        to be repeated, and when the first of its `parts` is to be a single row.
        """
        if self._needs_single_rows(size, parts):
            return True
        if self._checked_at == self.calls:
            return False
        return self.verdict is None or self.calls >= self._check_again_at or self._rows_seen < _TELLING <= size

    def _needs_single_rows(self, size: int, parts: int) -> bool:
        verdict, are_single = self.verdict, 1 < parts <= size < 2 * parts
        return are_single and verdict is not None and verdict.rule is not None and verdict.single_rows is None

    def look_again(self) -> None:
        """Let an undecided verdict be looked into at this call, due or not, unless it was."""
        if self.verdict is not None and self.verdict.undecided and self._checked_at != self.calls:
            self.verdict = None

    def found_out(self, verdict: Verdict) -> None:
        """Remember what the micro-batches of this call showed."""
        self.verdict = verdict
        self._refused = verdict if verdict.may_have_own_targets else None
        if self._refused is not None and self._looked_again_at != self.calls:
            self._looked_again_at, self._checked_at = self.calls, 0
        # rows in doubt are checked at once
        if verdict.undecided and not self.rows_in_doubt:
            self._look_again_soon()

    def checked(self, verdict: Verdict, size: int, parts: int = 1) -> None:
        """Remember the verdict of the check made at this call on a batch of `size`, unless an earlier one saw more.

        Where it could not see whether a single row may be one of the `parts`, none will be.
        """
        self._learn_from(verdict, size)
        if self.verdict is not None and self._needs_single_rows(size, parts):
            self.verdict = replace(self.verdict, single_rows=False)

    def _learn_from(self, verdict: Verdict, size: int) -> None:
        earlier = self.verdict
        self._checked_at = self.calls
        if verdict.rule is not None:
            self._ways.learn(verdict.graphs)
            if self.rows_in_doubt and not verdict.left_out:
                self._ways.admit()
        self.rows_in_doubt = []
        if earlier is not None and size < _TELLING <= self._rows_seen:
            self._check_again_at = self.calls + 1
            return
        self._rows_seen = size
        self._check_again_at = 1 << self.calls.bit_length()
        if verdict.undecided:
            self._look_again_soon()
        elif earlier is not None and earlier.rule is None and earlier.reason == verdict.reason:
            self._check_again_at *= 2
        blind = verdict.undecided or (
            verdict.nll_losses > 0 and verdict.rule is not None and (verdict.one_part or not verdict.held)
        )
        # a mean over what masks leave looks like one over samples where they leave as much of each
        by_rows = verdict.rule is not None and not verdict.divisors
        blind = blind or (by_rows and earlier is not None and bool(earlier.divisors))
        if earlier is None or not blind or not (earlier.held or (verdict.undecided and not earlier.undecided)):
            self.verdict = verdict

    def earlier(self) -> Verdict | None:
        """The verdict that the next check may go by; where there is none, the one that micro-batches showed last."""
        return self._refused if self.verdict is None else self.verdict

    def begin_parts(self) -> None:
        """The micro-batches of a call are about to run."""
        self._ways.begin()

    @property
    def decides(self) -> bool:
        """Whether it was seen to go by what is true of its batch, see `truths`."""
        return self._ways.are_decided

    def refuses_way(self, loss: torch.Tensor, shape: int, truths: tuple[bool, ...], rows: int) -> str | None:
        """Why a micro-batch with this loss may not be what a check has seen, see `Ways.refuses`, or None."""
        return self._ways.refuses(loss, shape, truths, rows)

    def doubt(self, rows: list[int]) -> None:
        """Let `rows` be checked, of two micro-batches one of which was refused; that ends, since ways are few."""
        self.rows_in_doubt = rows
        self._checked_at = 0

    def _look_again_soon(self) -> None:
        # other rows may show more; where they never do, looking costs less and less
        self._left_open += 1
        self._check_again_at = self.calls + (1 << max(0, self._left_open - 4))

    def reached(self) -> list[torch.Tensor]:
        """The tensors that its loss has been seen to reach, and that still exist."""
        return [leaf for place in self._leaves if (leaf := place()) is not None]

    def telling_leaves(self) -> list[torch.Tensor]:
        """Leaves whose gradients tell whether the forward changes some itself: two, or all at a call that explores."""
        if not self.explores:
            return [leaf for place in (*self._leaves[:1], *self._leaves[-1:]) if (leaf := place()) is not None]
        inside = [p for module in self.modules() for p in module._parameters.values() if p is not None]
        return [*self.reached(), *(parameter for parameter in inside if parameter.requires_grad)]

    def may_get_gradients(self) -> list[torch.Tensor]:
        """Leaves whose gradients a call may change.

        Those that its loss has been seen to reach, and of those that it might reach this time the ones that hold a
        gradient, which could be lost.
        """
        unseen = self.unseen_with_gradients() if self.unseen else ()
        return [*self.reached(), *unseen, *self.ranks.shards()]

    def unseen_with_gradients(self) -> list[torch.Tensor]:
        """Leaves that hold a gradient, though no loss was seen to reach them.

        It may be of the present call: a reentrant checkpoint runs a backward of its own, and its leaves are not to be
        seen in the graph of the loss.
        """
        return [leaf for place in self.unseen if (leaf := place()) is not None and leaf.grad is not None]

    def newcomers(self) -> list[torch.Tensor]:
        """Parameters of its modules that hold a gradient, those too that modules have got since the last look."""
        parameters = [p for module in self.modules() for p in module._parameters.values()]
        return [parameter for parameter in parameters if parameter is not None and parameter.grad is not None]

    def reaches(self, leaves: list[torch.Tensor]) -> None:
        """Remember what the loss reaches."""
        known = {id(leaf) for leaf in self.reached()}
        self._leaves = [place for place in self._leaves if place() is not None]
        self._leaves += [weakref.ref(leaf) for leaf in leaves if id(leaf) not in known]
        if self._first_version is None and leaves:
            self._first_version = leaves[0]._version

    def may_reach(self, loose: Iterable[torch.Tensor]) -> None:
        """Remember what the loss might reach at a later call: parameters of its models, and `loose` ones."""
        known = {id(leaf) for leaf in self.reached()}
        inside = [p for module in self.modules() for p in module._parameters.values() if p is not None]
        self.unseen = [weakref.ref(parameter) for parameter in (*inside, *loose) if id(parameter) not in known]

    def notice_numbers(self, numbers: Numbers) -> None:
        """Learn which of the numbers that the forward reads have changed, before a call.

        One that changes again and again is a counter, or follows a schedule. One that stood still until now may turn
        on a term of the loss, so the forward is checked as if it were new, in one of sixteen calls at most.
        """
        before, self._numbers = self._numbers, numbers
        moving: frozenset[int] = frozenset()
        if numbers != before and len(numbers) == len(before):
            pairs = zip(before, numbers, strict=True)
            moving = frozenset(index for index, (old, new) in enumerate(pairs) if old != new)
            self._number_moved = self._number_moved or not moving <= self._moving
        self._moving = moving
        if self._number_moved:
            self._doubt(self.calls + 1)

    def notice_modes(self) -> None:
        """Forget the verdict if a module has another mode, or more or fewer forward hooks, than at the last check.

        Other flags of modules count as numbers do: they may say which terms a loss has, or what was run last.
        """
        modules = self.modules()
        modes = [(m.training, len(m._forward_hooks) + len(m._forward_pre_hooks)) for m in modules]
        flags = flags_inside(modules)
        if self.verdict is not None and modes != self._modes:
            self.verdict = None
        self._number_moved = self._number_moved or (self._flags is not None and flags != self._flags)
        self._modes, self._flags = modes, flags
        self._doubt(self.calls)

    def _doubt(self, call: int) -> None:
        """Forget the verdict at `call` if something has moved that stood still, and this has not happened too often."""
        if self._number_moved and self.verdict is not None and self._checks_for_numbers * 16 <= self.calls:
            self._checks_for_numbers += call < self._check_again_at
            self._number_moved = False
            self.verdict = None

    def stepped(self, optimizer: Any) -> None:
        """Learn that `optimizer` has stepped: fused forms leave the versions of parameters as they were."""
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        if not self.steps_seen and any(id(leaf) in stepped for leaf in self.reached()):
            self._saw_step()

    def _saw_step(self) -> None:
        self.steps_seen = True
        self.sizing.forget_failures()

    def must_be_whole(self) -> str | None:
        """Why its batches may not be split whatever a check says, or None."""
        if self.ranks.whole_because is not None:
            return self.ranks.whole_because
        for module in self.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                return f"{type(module).__name__} has a backward hook, which would see gradients of parts"
            if getattr(module, "scale_grad_by_freq", False):
                return f"{type(module).__name__} scales its gradients by how often a batch has each index"
            for name, parameter in module._parameters.items():
                if parameter is not None and has_hook(parameter):
                    return f"parameter {name!r} has a hook, which would see gradients of parts"
        return None

    def may_close_border(self) -> bool:
        """Whether what it uses of graphs from before a call may be replaced, see `border`."""
        # a model that is compiled would be compiled together with what sees its functions
        return not self.ranks.in_step and not any(map(is_compiled, self.modules()))

    def least_rows(self) -> int:
        """Samples that a micro-batch needs: two where one by itself fails, or is normalised by its own statistics."""
        alone_fails = self.verdict is not None and self.verdict.single_rows is False
        return 2 if alone_fails or uses_batch_statistics(self.modules()) else 1

    def compares_samples(self) -> bool:
        """Whether splitting changes what normalisation layers see."""
        modules = self.modules()
        return uses_batch_statistics(modules) or iterates_power(modules)


class KnownForwards:
    """Finds what is known about a forward by its code and the models it names.

    Args:
        first_parts: first guess of the number of micro-batches where a whole batch does not fit.
    """

    def __init__(self, first_parts: int) -> None:
        self._first_parts = first_parts
        self._known: dict[tuple[Any, ...], Known] = {}

    def about(self, forward: Callable[..., Any], trains: bool, batch: Batch, prepared: Iterable[nn.Module]) -> Known:
        """What is known about `forward` with this batch: nothing if it, a model or a flag of it is new."""
        what, numbers = identity(forward, batch.args, batch.kwargs)
        key = (trains, what)
        known = self._known.get(key)
        if known is None or not known.alive:
            self._known = {key: known for key, known in self._known.items() if known.alive}
            self._known = dict(list(self._known.items())[-_MOST_KNOWN:])
            reachable = reachable_modules(forward, (batch.args, batch.kwargs))
            roots = list(dict.fromkeys([*reachable, *prepared]))
            known = self._known[key] = Known(forward, trains, roots, self._first_parts)
        known.notice_numbers(numbers)
        return known

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())
