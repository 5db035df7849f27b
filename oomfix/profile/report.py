"""What a simulated run found, as plain data: bytes, names and sentences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oomfix.presets import PRESETS, Card
from oomfix.profile.allocator import Block, CachingAllocator
from oomfix.profile.cards import CONTEXT_BYTES
from oomfix.profile.ledger import Ledger, Moment, Step, TopTensor
from oomfix.profile.overheads import Margin
from oomfix.profile.trace import MemoryTrace

GIB = 2**30


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
        breakdown: bytes by category at that peak; the sum is `peak_allocated_bytes`. "other" is what no pass made and
            the script keeps, such as an average of the weights.
        top_tensors: the largest groups of storages at the peak, largest first.
        timeline: the fullest moments of evenly spread stretches of the run.
        steps: one entry per step of the optimizer that stepped last; others' steps between are part of them.
        growth_bytes_per_step: by how much both `live_bytes` and `kept_bytes` grew per step over the second half of the
            steps: neither what is made once, such as a copy of the best weights, nor a batch that is larger than the
            one before is growth. Of two steps, by how much `live_bytes` grew; 0 with fewer.
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
    timeline: list[Moment]
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


def report(trace: MemoryTrace, card: Card, margin: Margin, assumptions: Sequence[str] = ()) -> Estimate:
    """Everything that a finished trace has to say about `card`."""
    ledger = Ledger(trace)
    steps = ledger.steps()
    return Estimate(
        peak_allocated_bytes=trace.allocator.peak_allocated_bytes,
        peak_reserved_bytes=trace.allocator.peak_reserved_bytes,
        peak_phase=trace.peak_phase,
        breakdown=ledger.breakdown(trace.peak_event),
        top_tensors=ledger.top_tensors(trace.peak_event),
        timeline=ledger.timeline(),
        steps=steps,
        growth_bytes_per_step=_growth(steps),
        fits=_fits(trace, card, margin),
        card=card,
        context_bytes=CONTEXT_BYTES,
        margin_fraction=margin.fraction,
        margin_reason=margin.reason,
        assumptions=list(assumptions),
    )


def _growth(steps: Sequence[Step]) -> int:
    if len(steps) < 2:
        return 0
    number = len(steps) // 2 if len(steps) >= 3 else 0
    first, last = steps[number], steps[-1]
    grown = last.live_bytes - first.live_bytes
    if len(steps) >= 3:
        grown = min(grown, last.kept_bytes - first.kept_bytes)
    return max(0, grown // (len(steps) - 1 - number))


def replay(trace: MemoryTrace, capacity_bytes: int | None) -> CachingAllocator | None:
    """The allocator after the whole run with another capacity; None: it ran out of memory."""
    allocator = CachingAllocator(capacity_bytes, trace.allocator.expandable_segments)
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


def _fits(trace: MemoryTrace, card: Card, margin: Margin) -> dict[str, Fit]:
    budgets = {"card": int(card.capacity_gib * GIB) - CONTEXT_BYTES}
    budgets |= {preset.name: int(preset.budget_gib * GIB) for preset in PRESETS.values() if preset.budget_gib}
    known: dict[int, bool] = {}
    result = {}
    for name, budget in budgets.items():
        capacity = int(budget / (1 + margin.fraction))
        if capacity not in known:
            known[capacity] = _gets_through(trace, capacity)
        result[name] = Fit(capacity, known[capacity])
    return result


def _gets_through(trace: MemoryTrace, capacity: int) -> bool:
    allocator = trace.allocator
    if allocator.peak_reserved_bytes <= capacity:
        return True
    # blocks in use can never be given back: no replay is needed to know that this does not fit
    if allocator.peak_allocated_bytes > capacity * 1.05:
        return False
    return replay(trace, capacity) is not None
