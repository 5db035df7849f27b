"""A simulated GPU: torch sees a card, and a trace records what happens on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from oomfix.presets import Card
from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.boundary import CardTrace
from oomfix.profile.cards import CONTEXT_BYTES
from oomfix.profile.fakes_on_cuda import fakes_on_cuda
from oomfix.profile.patches import Patches
from oomfix.profile.policy import cuda_policy, replace_parameters
from oomfix.profile.report import Estimate, report
from oomfix.profile.simulated_cuda import simulate_cuda
from oomfix.profile.workspaces import Workspaces


class SimulatedGPU:
    """A card that is simulated while the context lasts: `trace` records what happens on it."""

    def __init__(self, card: Card, capacity_bytes: int | None = None, expandable_segments: bool | None = False) -> None:
        self.card = card
        self.workspaces = Workspaces(card.compute_capability)
        self.trace = CardTrace(
            CachingAllocator(capacity_bytes, expandable_segments),
            scratch=self.workspaces.scratch_bytes,
            keeps=self.workspaces.kept_bytes,
        )
        self.trace.context_bytes = CONTEXT_BYTES
        self.patches = Patches()

    @contextmanager
    def running(
        self, moved: Callable[[nn.Parameter, nn.Parameter], object] = lambda old, new: None
    ) -> Iterator[CardTrace]:
        """Context in which torch sees the card; `moved(old, new)` is told of parameters that modules replace."""
        with cuda_policy(self.card.compute_capability, lambda: self.workspaces.kinds.add("recurrent")), self.patches:
            simulate_cuda(self.patches, self.card, self.trace.allocator)
            fakes_on_cuda(self.patches, self.trace)
            replace_parameters(self.patches, moved)
            with self.trace:
                yield self.trace

    def report(self, assumptions: list[str]) -> Estimate:
        """What was found so far."""
        margin = self.workspaces.margin()
        return report(self.trace, self.card, margin, assumptions)


def assumptions(trace: CardTrace) -> list[str]:
    """What had to be assumed, as sentences with file and line, the most frequent first."""
    sentences = []
    for (what, line), count in trace.assumed.most_common():
        where = f" at {line[0]}:{line[1]}" if line else ""
        times = f", {count} times" if count > 1 else ""
        sentences.append(f"{what}{where}{times}")
    return sentences
