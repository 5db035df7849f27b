"""Checks of `oomfix.runtime` under simulation, where tensors hold no numbers to compare."""

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches
from oomfix.runtime import outputs, splitter, verify
from oomfix.runtime.batch import Batch
from oomfix.runtime.outputs import Rule
from oomfix.runtime.verdict import Verdict
from oomfix.runtime.verify import check


def answer_checks(patches: Patches, trace: CardTrace, independent: bool) -> None:
    """Let the runtime's check of a forward run as it does, but for its comparisons of numbers.

    What it sees without numbers stays: whether the forward fails on a few rows, and what it writes.

    Args:
        patches: what is to be put back later.
        trace: is told what was assumed.
        independent: what the comparisons find: whether samples do not depend on each other.
    """

    def checked(
        forward: Callable[..., Any], batch: Batch, modules: list[Module], most_rows: int, *_: bool, **__: bool
    ) -> Verdict:
        trace.assume("samples do not depend on each other" if independent else "samples depend on each other")
        # a second look at masks and gradients would compare nothing but numbers
        return check(forward, batch, modules, most_rows, trust=False, again=True)

    def of_one_value(whole: Any, parts: list[Any], weights: object) -> Rule | None:
        return outputs.likely(whole, parts[0]) if independent else None

    def first_rows(batch: Batch, count: int) -> list[int]:
        return [row % batch.size for row in range(count)]

    patches.set(splitter, check=checked)
    patches.set(outputs, _choose_value=of_one_value)
    # what tells rows apart is in their numbers
    patches.set(verify, choose_rows=first_rows, with_other_masks=lambda *_: None)
