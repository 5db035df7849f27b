"""OOM302 accumulation-tail."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class AccumulationTail(Rule):
    """The optimizer never steps on the last, incomplete accumulation window of an epoch.

    Why: with 103 batches and a step every 4, the gradients of the last 3 (2.9% of the epoch, bench/results/rules.md)
    either are thrown away by the next `zero_grad`, so that these samples never train the model, or leak into the first
    step of the next epoch.

    Quiet when:

    - the condition also fires on the last batch, or a step follows the loop;
    - the window is counted across epochs, by a counter that is not reset.

    Fix: `oomfix.runtime` steps on the tail with the right weight. By hand, add `or (i + 1) == len(loader)` to the
    condition.
    """

    code = "OOM302"
    name = "accumulation-tail"
    severity = Severity.ERROR
    needs = TRAINS
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        for loop in script.loops:
            if loop.window is None or script.steps_tail_by_itself(loop):
                continue
            for decision in script.lost_tails(loop):
                yield self.finding(
                    script.header(decision),
                    f"the optimizer never steps on a last window of fewer than `{loop.window.size}` batches",
                )

    INVALID = [
        Invalid(
            """
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
            (5,),
        ),
        Invalid(
            """
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 4).backward()
    if (i + 1) % 4 != 0:
        continue
    optimizer.step()
    optimizer.zero_grad()
""",
            (4,),
        ),
        Invalid(
            """
for i, (x, y) in enumerate(loader):
    step = i + 1
    (criterion(model(x), y) / 4).backward()
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
            (5,),
        ),
    ]
    VALID = [
        """
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0 or (i + 1) == len(loader):
        optimizer.step()
""",
        """
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
optimizer.step()
""",
        """
step = 0
for epoch in range(epochs):
    for x, y in loader:
        (criterion(model(x), y) / 4).backward()
        step += 1
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
        """
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        step = epoch * len(loader) + i + 1
        (criterion(model(x), y) / 4).backward()
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ]
