"""OOM101 loss-accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import NOT_ONE_TENSOR, RUNS_NETWORKS, SHARED, Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.syntax.edits import detach


class LossAccumulation(Rule):
    """A running total keeps the autograd graph of every iteration.

    What: `total += loss`, `total = total + loss` or `log["loss"] += loss` where the added tensor carries a graph, and
    the total outlives the iteration and is only logged.

    Why: a tensor that requires grad holds the graph it came from, and the sum holds every tensor added to it. Where no
    backward runs through the loss, the graph holds every activation of the iteration: memory grows by a whole forward
    each time, until the card is full. Where a backward does run, before or after the addition, it frees the
    activations. Only the nodes of the graph stay, in host memory: a slow leak, reported as a warning. A network of 8
    blocks keeps 40.0 MiB per iteration in the first case, 59 nodes in the second (bench/results/rules.md).

    Quiet when:

    - the value is a number (`.item()`, `float(loss)`, `.tolist()`, a helper that returns one) or detached;
    - gradients are disabled where it is computed;
    - the terms are summed into one loss that is backpropagated.

    Fix: `total += loss.detach()`. It keeps the type and, unlike `.item()`, does not wait for the GPU on every
    iteration.
    """

    code = "OOM101"
    name = "loss-accumulation"
    severity = Severity.ERROR
    needs = (*RUNS_NETWORKS, b"def training_step(", b"def compute_loss(")

    def check(self, script: Script) -> Iterator[Finding]:
        for keep in script.kept_graphs():
            if keep.manner != "add":
                continue
            value = script.source.segment(keep.value)
            freed = script.trace.frees(keep)
            growth = (
                "keeps the graph nodes of every iteration alive (backward frees the activations)"
                if freed
                else "keeps every iteration's graph and activations alive"
            )
            yield self.finding(
                script.place(keep.statement or keep.node),
                f"adding `{value}` to `{keep.target}` {growth}",
                severity=Severity.WARNING if freed else Severity.ERROR,
                edits=detach(script.source, keep.detachable) if keep.detachable else (),
                by_hand=SHARED if keep.shared else NOT_ONE_TENSOR,
            )

    INVALID = [
        Invalid(
            """
total = 0
for x, y in loader:
    loss = criterion(model(x), y)
    total += loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
            (5,),
            """
total = 0
for x, y in loader:
    loss = criterion(model(x), y)
    total += loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        ),
        Invalid(
            """
def train(model, loader, criterion, optimizer):
    log = {"loss": 0.0, "n": 0}
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        log["loss"] = log["loss"] + loss * len(x)
        log["n"] += len(x)
    return log
""",
            (9,),
            """
def train(model, loader, criterion, optimizer):
    log = {"loss": 0.0, "n": 0}
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        log["loss"] = log["loss"] + (loss * len(x)).detach()
        log["n"] += len(x)
    return log
""",
        ),
        Invalid(
            """
class Trainer:
    def step(self, x, y):
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self, loader):
        for epoch in range(10):
            running = 0.0
            for x, y in loader:
                running += self.step(x, y)
            print(running / len(loader))
""",
            (13,),
        ),
    ]
    VALID = [
        """
total = 0
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.item()
""",
        """
def step(x, y):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()

total = 0
for x, y in loader:
    total += step(x, y)
""",
        """
import torch
with torch.no_grad():
    for x, y in loader:
        total += criterion(model(x), y)
""",
        """
for x, y in loader:
    loss = 0
    for out in model(x):
        loss += criterion(out, y)
    loss.backward()
    optimizer.step()
""",
        """
total = 0
for i, (x, y) in enumerate(loader):
    total = total + criterion(model(x), y)
    if (i + 1) % 4 == 0:
        (total / 4).backward()
        optimizer.step()
        total = 0
""",
        """
correct = 0
for x, y in loader:
    out = model(x)
    criterion(out, y).backward()
    correct += (out.argmax(1) == y).sum()
""",
    ]
