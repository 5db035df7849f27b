"""What a trace's storages were for, and what they add up to."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from oomfix.profile.allocator import rounded
from oomfix.profile.trace import MemoryTrace, Storage

CATEGORIES = (
    "weights", "optimizer state", "gradients", "other", "inputs", "activations", "temporaries", "workspaces",
)  # fmt: skip
_MOST_MOMENTS = 400


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
        live_bytes: what tensors held at its end, without what the allocator's blocks have to spare.
        kept_bytes: of these, what is older than the step: it was made before the step before had ended.
    """

    peak_allocated_bytes: int
    live_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Moment:
    """What the card holds at one moment.

    Attributes:
        step: the optimizer step that is under way, from 1.
        phase: "setup", "forward", "backward", "optimizer" or "between".
        reserved_bytes: what the allocator has reserved.
        breakdown: bytes by category; their sum is what is allocated.
    """

    step: int
    phase: str
    reserved_bytes: int
    breakdown: dict[str, int]


class Ledger:
    """A trace's storages, each with its final category."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._trace = trace
        backwards = [position for position, phase in trace.phases if phase == "backward"]
        ends = sorted([*backwards, *trace.forward_ends])
        steps = [position for position, _, _ in trace.steps]
        self._categories = [_category(storage, ends, steps) for storage in trace.storages]
        # optimizers that take turns make one step together: it ends with the last one's
        self._last_optimizer = trace.steps[-1][2] if trace.steps else None

    def breakdown(self, event: int) -> dict[str, int]:
        """Bytes by category of what is alive just before an event."""
        totals: dict[str, int] = defaultdict(int)
        for index in self._alive(event):
            totals[self._categories[index]] += self._trace.storages[index].nbytes
        return {category: totals[category] for category in CATEGORIES if totals[category]}

    def top_tensors(self, event: int, most: int = 15) -> list[TopTensor]:
        """The kinds of storages that take the most just before an event, largest first."""
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
        """Every step of the optimizer that stepped last; steps of others are part of them."""
        result = []
        totals = self._totals()
        start = self._trace.start_event
        for position, _, optimizer in self._trace.steps:
            if optimizer == self._last_optimizer:
                live = [self._trace.storages[index] for index in self._alive(position)]
                held = sum(rounded(storage.requested_bytes) for storage in live)
                kept = sum(rounded(storage.requested_bytes) for storage in live if storage.born < start)
                result.append(Step(max(totals[start:position], default=held), held, kept))
                start = position
        return result

    def timeline(self) -> list[Moment]:
        """The fullest moment of each of evenly spread stretches of the run."""
        events, totals = self._trace.events, self._totals()
        first, end = self._trace.start_event, self._trace.end_event
        end = len(events) if end is None else end
        stride = max(1, (end - first) // _MOST_MOMENTS)
        fullest = {
            max(range(start, min(start + stride, end)), key=totals.__getitem__) for start in range(first, end, stride)
        }
        # the end shows what stays, or what was there when memory ran out
        fullest |= {end - 1} if end > first else set()
        now = dict.fromkeys(CATEGORIES, 0)
        moments = []
        for position, event in enumerate(events[:end]):
            index = event if event >= 0 else ~event
            nbytes = self._trace.storages[index].nbytes
            now[self._categories[index]] += nbytes if event >= 0 else -nbytes
            if position in fullest:
                moments.append(self._moment(position + 1, now))
        return moments

    def _moment(self, event: int, breakdown: dict[str, int]) -> Moment:
        trace = self._trace
        # a phase begins with the event at its position
        phase = trace.phases[bisect_right(trace.phases, event - 1, key=itemgetter(0)) - 1][1]
        steps = sum(1 for position, _, number in trace.steps if number == self._last_optimizer and position < event)
        reserved = trace.reserved[bisect_right(trace.reserved, event, key=itemgetter(0)) - 1][1]
        return Moment(steps + 1, phase, reserved, dict(breakdown))

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


def _category(storage: Storage, ends: list[int], steps: list[int]) -> str:
    """What a storage was for.

    Args:
        storage: with its own category, where that is known.
        ends: where forwards ended and backwards began.
        steps: where steps ended. What no pass made and outlives one of them (an average of the weights, a total) is
            neither an activation nor a temporary.
    """
    if storage.category:
        return storage.category
    if storage.phase in ("setup", "between"):
        following = bisect_right(steps, storage.born)
        if following < len(steps) and (storage.died is None or storage.died >= steps[following]):
            return "other"
    if storage.phase in ("backward", "optimizer"):
        return "temporaries"
    # what a forward makes and leaves behind is an activation, whether a backward ever comes for it or not
    if storage.died is None:
        return "activations"
    following = bisect_right(ends, storage.born)
    survives = following < len(ends) and storage.died >= ends[following]
    return "activations" if survives else "temporaries"
