"""OOM305 backward-in-autocast."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class BackwardInAutocast(Rule):
    """`.backward()` runs inside an autocast block.

    Why: each backward operation already runs in the dtype that autocast chose for its forward. Under autocast, casts
    are made and cached a second time, and the cache of cast weights lives until the block ends, beside the gradients:
    24.1 MiB instead of 16.1 MiB when the backward has ended (bench/results/rules.md). The documentation of autocast
    advises against it.

    Quiet when: autocast is disabled on this path, or a framework runs the backward.

    Fix: end the block after the loss.
    """

    code = "OOM305"
    name = "backward-in-autocast"
    severity = Severity.WARNING
    needs = TRAINS
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        inside = [
            backward
            for backward in script.backwards
            if backward.site.autocast not in (None, "held") and backward.framework is None and not backward.is_grad_call
        ]
        for backward in script.distinct(inside):
            yield self.finding(
                script.place(backward.node),
                "backward runs inside autocast: end the block after the loss",
            )

    INVALID = [
        Invalid(
            """
import torch
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            (6,),
        ),
    ]
    VALID = [
        """
import torch
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
""",
        """
import torch
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
        with torch.autocast("cuda", enabled=False):
            scaler.scale(loss).backward()
""",
    ]
