"""What a simulated run found, as plain data: bytes, names and sentences."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oomfix.presets import PRESETS, Card
from oomfix.profile.allocator import Block, CachingAllocator
from oomfix.profile.overheads import CONTEXT_BYTES, Margin
from oomfix.profile.trace import MemoryTrace, Storage

GIB = 2**30
CATEGORIES = (
    "weights", "optimizer state", "gradients", "inputs", "activations", "temporaries", "workspaces",
)  # fmt: skip
_MOST_POINTS = 400


@dataclass(frozen=True)
class TopTensor:
    """Storages of one kind that are alive at the peak.

    Attributes:
        nbytes: all of them together (bytes).
        count: how many there are.
        category, module, operation, shape, dtype: what they are, and who made them.
        line: "file:line" of the code that made them; "" where none is known.
    """

    nbytes: int
    count: int
    category: str
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    line: str


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        peak_allocated_bytes: the most that was allocated from the end of the step before to the end of this one.
        live_bytes: what was still allocated at its end.
    """

    peak_allocated_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Fit:
    """Whether a run fits a memory budget.

    Attributes:
        budget_bytes: what the allocator may reserve, context and margin already taken off.
        fits: whether the allocator, capped there, gets through the whole run, giving back caches on the way.
    """

    budget_bytes: int
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """The memory of a training run on a simulated card.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes: what `torch.cuda.max_memory_allocated` and
            `max_memory_reserved` would say (bytes).
        peak_phase: "setup", "forward", "backward", "optimizer" or "between", where the allocated peak is.
        breakdown: bytes by category at that peak; the sum is `peak_allocated_bytes`.
        top_tensors: the largest groups of storages at the peak, largest first.
        timeline: (phase, bytes by category) at evenly spread moments.
        steps: one entry per step of the optimizer that stepped last; others' steps between are part of them.
        growth_bytes_per_step: by how much `live_bytes` grew per step after the first; 0 with fewer than two steps.
        fits: by preset name, and under "card" for the simulated card.
        card: the simulated card.
        context_bytes: what the CUDA context takes besides `peak_reserved_bytes`.
        margin_fraction, margin_reason: by how much a measured peak may exceed the estimate, and why.
        assumptions: what had to be assumed, as sentences.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: str
    breakdown: dict[str, int]
    top_tensors: list[TopTensor]
    timeline: list[tuple[str, dict[str, int]]]
    steps: list[Step]
    growth_bytes_per_step: int
    fits: dict[str, Fit]
    card: Card
    context_bytes: int
    margin_fraction: float
    margin_reason: str
    assumptions: list[str]

    def as_json(self) -> dict[str, Any]:
        """The estimate in types that `json` writes."""
        return asdict(self)


def report(
    trace: MemoryTrace, card: Card, margin: Margin, assumptions: Sequence[str] = (), expandable_segments: bool = False
) -> Estimate:
    """Everything that a finished trace has to say about `card`."""
    ledger = _Ledger(trace)
    steps = ledger.steps()
    growth = (steps[-1].live_bytes - steps[0].live_bytes) // (len(steps) - 1) if len(steps) > 1 else 0
    return Estimate(
        peak_allocated_bytes=trace.allocator.peak_allocated_bytes,
        peak_reserved_bytes=trace.allocator.peak_reserved_bytes,
        peak_phase=trace.peak_phase,
        breakdown=ledger.breakdown(trace.peak_event),
        top_tensors=ledger.top_tensors(trace.peak_event),
        timeline=ledger.timeline(),
        steps=steps,
        growth_bytes_per_step=max(0, growth),
        fits=_fits(trace, card, margin, expandable_segments),
        card=card,
        context_bytes=CONTEXT_BYTES,
        margin_fraction=margin.fraction,
        margin_reason=margin.reason,
        assumptions=list(assumptions),
    )


def replay(
    trace: MemoryTrace, capacity_bytes: int | None, expandable_segments: bool = False
) -> CachingAllocator | None:
    """The allocator after the whole run with another capacity; None: it ran out of memory."""
    allocator = CachingAllocator(capacity_bytes, expandable_segments)
    blocks: dict[int, Block] = {}
    for event in trace.events:
        if event < 0:
            allocator.free(blocks.pop(~event))
            continue
        block = allocator.allocate(trace.storages[event].requested_bytes)
        if block is None:
            return None
        blocks[event] = block
    return allocator


def _fits(trace: MemoryTrace, card: Card, margin: Margin, expandable_segments: bool) -> dict[str, Fit]:
    budgets = {"card": int(card.capacity_gib * GIB) - CONTEXT_BYTES}
    budgets |= {preset.name: int(preset.budget_gib * GIB) for preset in PRESETS.values() if preset.budget_gib}
    known: dict[int, bool] = {}
    result = {}
    for name, budget in budgets.items():
        capacity = int(budget / (1 + margin.fraction))
        if capacity not in known:
            known[capacity] = _gets_through(trace, capacity, expandable_segments)
        result[name] = Fit(capacity, known[capacity])
    return result


def _gets_through(trace: MemoryTrace, capacity: int, expandable_segments: bool) -> bool:
    allocator = trace.allocator
    if allocator.expandable_segments == expandable_segments and allocator.peak_reserved_bytes <= capacity:
        return True
    # blocks in use can never be given back: no replay is needed to know that this does not fit
    if allocator.peak_allocated_bytes > capacity * 1.05:
        return False
    return replay(trace, capacity, expandable_segments) is not None


class _Ledger:
    """A trace's storages, each with its final category."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._trace = trace
        backwards = [position for position, phase in trace.phases if phase == "backward"]
        self._categories = [_category(storage, backwards) for storage in trace.storages]

    def breakdown(self, event: int) -> dict[str, int]:
        totals: dict[str, int] = defaultdict(int)
        for index in self._alive(event):
            totals[self._categories[index]] += self._trace.storages[index].nbytes
        return {category: totals[category] for category in CATEGORIES if totals[category]}

    def top_tensors(self, event: int, most: int = 15) -> list[TopTensor]:
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index in self._alive(event):
            storage = self._trace.storages[index]
            line = f"{storage.line[0]}:{storage.line[1]}" if storage.line else ""
            dtype = str(storage.dtype).removeprefix("torch.") if storage.dtype else "bytes"
            key = (self._categories[index], storage.module, storage.operation, storage.shape, dtype, line)
            groups[key].append(storage.nbytes)
        found = [TopTensor(sum(sizes), len(sizes), *key) for key, sizes in groups.items()]
        return sorted(found, key=lambda tensor: -tensor.nbytes)[:most]

    def steps(self) -> list[Step]:
        result = []
        totals = self._totals()
        start = 0
        # optimizers that take turns make one step together: it ends with the last one's
        last = self._trace.steps[-1][2] if self._trace.steps else None
        for position, live, optimizer in self._trace.steps:
            if optimizer == last:
                result.append(Step(max(totals[start:position], default=live), live))
                start = position
        return result

    def timeline(self) -> list[tuple[str, dict[str, int]]]:
        events, phases = self._trace.events, self._trace.phases
        positions = [position for position, _ in phases]
        stride = max(1, len(events) // _MOST_POINTS)
        now = dict.fromkeys(CATEGORIES, 0)
        points = []
        for position, event in enumerate(events, 1):
            index = event if event >= 0 else ~event
            nbytes = self._trace.storages[index].nbytes
            now[self._categories[index]] += nbytes if event >= 0 else -nbytes
            if position % stride == 0 or position in (self._trace.peak_event, len(events)):
                phase = phases[bisect_right(positions, position) - 1][1]
                points.append((phase, dict(now)))
        return points

    def _alive(self, event: int) -> Iterable[int]:
        for index, storage in enumerate(self._trace.storages):
            if storage.born < event and (storage.died is None or storage.died >= event):
                yield index

    def _totals(self) -> list[int]:
        total, totals = 0, []
        for event in self._trace.events:
            total += self._trace.storages[event].nbytes if event >= 0 else -self._trace.storages[~event].nbytes
            totals.append(total)
        return totals


def _category(storage: Storage, backwards: list[int]) -> str:
    if storage.category:
        return storage.category
    if storage.phase in ("backward", "optimizer"):
        return "temporaries"
    # what the forward makes and a backward still finds is an activation
    if storage.died is None:
        return "activations"
    following = bisect_right(backwards, storage.born)
    survives = following < len(backwards) and storage.died > backwards[following]
    return "activations" if survives else "temporaries"
