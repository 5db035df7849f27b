"""Checks of `oomfix.runtime` under simulation, where tensors hold no numbers to compare."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches
from oomfix.profile.process import COUPLED, INDEPENDENT
from oomfix.runtime import checkpointing, comparison, kept_tensors, rows, rule_choice, splitter, verify
from oomfix.runtime.batch import Batch
from oomfix.runtime.comparison import Evidence
from oomfix.runtime.outputs import Rule
from oomfix.runtime.verdict import Verdict
from oomfix.runtime.verify import check, judge

_FOUND = {True: INDEPENDENT, False: COUPLED}


def answer_checks(patches: Patches, trace: CardTrace, independent: bool) -> None:
    """Let the runtime's check of a forward run as it does, but for its comparisons of numbers.

    What it sees without numbers stays: whether the forward fails on a few rows, and what it writes.

    Args:
        patches: what is to be put back later.
        trace: is told what was assumed.
        independent: what the comparisons find: whether samples do not depend on each other.
    """

    def checked(
        forward: Callable[..., Any],
        batch: Batch,
        modules: list[Module],
        most_rows: int,
        trust: bool = False,
        *_: Any,
        sharded: bool = False,
    ) -> Verdict:
        trace.assume(_FOUND[independent])
        return check(forward, batch, modules, most_rows, trust, sharded=sharded)

    def judged(evidence: Evidence, trust: bool = False, rows: int = 0) -> Verdict:
        if independent or trust or evidence.failure or evidence.wrote:
            return judge(evidence, trust, rows)
        return Verdict(None, _FOUND[independent])

    def of_one_value(whole: Any, parts: list[Any], weights: object) -> Rule | None:
        return rule_choice.likely(whole, parts[0])

    patches.set(splitter, check=checked)
    patches.set(rule_choice, _choose_value=of_one_value)
    patches.set(comparison, bend_apart=lambda whole, part: False)
    # gradients, what tells rows apart, and copies of a batch are nothing but numbers
    patches.set(verify, judge=judged, judge_gradients=lambda evidence: Verdict(None, undecided=True))
    patches.set(checkpointing, _close=lambda a, b: (a is None) == (b is None))
    patches.set(rows, _tells=lambda *_: False, _sums=lambda *_: torch.empty(0))
    patches.set(kept_tensors, _contents=lambda *_: None)
