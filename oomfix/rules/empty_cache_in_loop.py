"""OOM501 empty-cache-in-loop."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.analyses.every_iteration import runs_every_iteration


class EmptyCacheInLoop(Rule):
    """`torch.cuda.empty_cache()` runs on every iteration of a batch loop.

    Why: the caching allocator exists so that the next iteration gets its blocks without asking the driver. Emptying it
    gives them back and asks again, and both wait for the GPU: 6 calls to the driver in every iteration instead of 0 for
    a network of 8 blocks, at the same peak of 40.0 MiB (bench/results/rules.md). The peak is reached within an
    iteration, so not one byte is saved.

    Quiet when: it runs every N-th iteration, between epochs or stages, or after a caught out-of-memory error.

    Fix: remove it. `oomfix.runtime` empties the cache only where it is fragmented.
    """

    code = "OOM501"
    name = "empty-cache-in-loop"
    severity = Severity.WARNING
    needs = (b"empty_cache",)

    def check(self, script: Script) -> Iterator[Finding]:
        habitual = [
            call
            for call in script.calls_to("torch.cuda.empty_cache")
            if script.is_in_batch_loop(call) and runs_every_iteration(call)
        ]
        for call in script.distinct(habitual):
            yield self.finding(
                script.place(call.node),
                "empties the CUDA cache on every iteration: steps are slower, and the peak is no lower",
                edits=script.removal_of(call.node),
            )

    INVALID = [
        Invalid(
            """
import torch
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
    torch.cuda.empty_cache()
""",
            (6,),
            """
import torch
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
""",
        ),
        Invalid(
            """
import torch
for x, y in loader:
    if args.clean and torch.cuda.is_available():
        torch.cuda.empty_cache()
    criterion(model(x), y).backward()
    optimizer.step()
""",
            (5,),
            """
import torch
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
""",
        ),
    ]
    VALID = [
        """
import torch
for i, (x, y) in enumerate(loader):
    criterion(model(x), y).backward()
    if i % 100 == 0:
        torch.cuda.empty_cache()
""",
        """
import torch
for epoch in range(10):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    torch.cuda.empty_cache()
""",
        """
import torch
for x, y in loader:
    try:
        criterion(model(x), y).backward()
    except RuntimeError:
        torch.cuda.empty_cache()
""",
        """
import torch
for path in checkpoints:
    model.load_state_dict(torch.load(path, map_location="cpu"))
    with torch.no_grad():
        show(model(examples))
    torch.cuda.empty_cache()
""",
    ]
