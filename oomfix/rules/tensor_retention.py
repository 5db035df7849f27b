"""OOM102 tensor-retention."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import NOT_ONE_TENSOR, RUNS_NETWORKS, SHARED, Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.syntax.edits import detach


class TensorRetention(Rule):
    """A tensor is kept beyond its iteration together with its autograd graph.

    What: `losses.append(loss)`, `outputs[i] = out`, or `meter.update(loss)` where the class of the meter is in the file
    and keeps what it is given. `self.attention = attention` in the forward of a module keeps one graph, not all of
    them, and is a warning.

    Why: each tensor that is kept holds the graph it came from. Without a backward through it, that is every activation
    of the iteration, so memory grows by a whole forward per batch. With a backward, only graph nodes stay (a warning).
    For an output of 0.5 MiB, a network of 8 blocks keeps 40.0 MiB (bench/results/rules.md).

    Quiet when:

    - what is kept is detached, a number, or computed without gradients;
    - the list is stacked and backpropagated later (episodes, time steps);
    - the class of the meter is not in the file.

    Fix: `losses.append(loss.detach())`, offered as an edit where the value is certainly one tensor. For predictions
    that are only needed on the host, `out.detach().cpu()`.
    """

    code = "OOM102"
    name = "tensor-retention"
    severity = Severity.ERROR
    needs = (*RUNS_NETWORKS, b"def training_step(", b"def compute_loss(")

    def check(self, script: Script) -> Iterator[Finding]:
        for keep in script.kept_graphs():
            if keep.manner == "add":
                continue
            value = script.source.segment(keep.value)
            freed = script.trace.frees(keep)
            growth = (
                "with the graph nodes of every iteration (backward frees the activations)"
                if freed
                else "with every iteration's graph and activations"
            )
            yield self.finding(
                script.place(keep.node),
                f"`{script.source.segment(keep.node)}` keeps the tensor {growth}"
                if keep.manner == "meter"
                else f"`{value}` is kept in `{keep.target}` {growth}",
                severity=Severity.WARNING if freed else Severity.ERROR,
                edits=detach(script.source, keep.detachable) if keep.detachable else (),
                by_hand=SHARED if keep.shared else NOT_ONE_TENSOR,
            )
        for kept in script.attention_maps_kept():
            read = script.reads_attribute(kept.name)
            not_alone = SHARED if kept.shared else NOT_ONE_TENSOR
            yield self.finding(
                script.place(kept.node),
                f"`{script.source.segment(kept.node)}` keeps the attention map and its graph until the next forward",
                severity=Severity.WARNING,
                edits=detach(script.source, kept.detachable) if kept.detachable and not read else (),
                by_hand=f"`{kept.name}` is read elsewhere, and may be part of a loss" if read else not_alone,
            )

    INVALID = [
        Invalid(
            """
losses = []
for x, y in loader:
    loss = criterion(model(x), y)
    losses.append(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sum(losses))
""",
            (5,),
            """
losses = []
for x, y in loader:
    loss = criterion(model(x), y)
    losses.append(loss.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sum(losses))
""",
        ),
        Invalid(
            """
class Meter:
    def __init__(self):
        self.sum = 0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

meter = Meter()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    meter.update(loss, len(x))
""",
            (16,),
            """
class Meter:
    def __init__(self):
        self.sum = 0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

meter = Meter()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    meter.update(loss.detach(), len(x))
""",
        ),
        Invalid(
            """
class Meter:
    def __init__(self):
        self.sum = 0

    def update(self, loss, outputs):
        self.sum += loss * outputs.std()

meter = Meter()
for x, y in loader:
    outputs = model(x)
    loss = criterion(outputs, y)
    loss.backward()
    optimizer.step()
    meter.update(loss, outputs)
""",
            (15,),
        ),
        Invalid(
            """
def predict(model, loader):
    model.eval()
    outputs = []
    for x in loader:
        outputs.append(model(x))
    return outputs
""",
            (6,),
        ),
        Invalid(
            """
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qk = nn.Linear(dim, 2 * dim)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        attention = (q @ k.transpose(-2, -1)).softmax(-1)
        self.attention_map = attention
        return attention @ x

for x, y in loader:
    criterion(model(x), y).backward()
""",
            (12,),
            """
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qk = nn.Linear(dim, 2 * dim)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        attention = (q @ k.transpose(-2, -1)).softmax(-1)
        self.attention_map = attention.detach()
        return attention @ x

for x, y in loader:
    criterion(model(x), y).backward()
""",
        ),
        Invalid(
            """
from lightning import LightningModule

class Classifier(LightningModule):
    def training_step(self, batch, index):
        loss = self.criterion(self.net(batch["x"]), batch["y"])
        self.losses.append(loss)
        return loss
""",
            (7,),
            """
from lightning import LightningModule

class Classifier(LightningModule):
    def training_step(self, batch, index):
        loss = self.criterion(self.net(batch["x"]), batch["y"])
        self.losses.append(loss.detach())
        return loss
""",
        ),
    ]
    VALID = [
        """
losses = []
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    losses.append(loss.item())
""",
        """
import torch
losses = []
for x, y in loader:
    losses.append(criterion(model(x), y))
torch.stack(losses).mean().backward()
""",
        """
import torch
for x, y in loader:
    outputs = []
    for part in x.chunk(4):
        outputs.append(model(part))
    criterion(torch.cat(outputs), y).backward()
""",
        """
class Meter:
    def update(self, value, n=1):
        self.sum += value * n

meter = Meter()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    meter.update(loss.item(), len(x))
""",
        """
import torch
@torch.no_grad()
def predict(model, loader):
    outputs = []
    for x in loader:
        outputs.append(model(x))
    return outputs
""",
        """
for x, y in loader:
    out = model(x)
    criterion(out, y).backward()
    predictions.append(out.argmax(dim=1))
    probabilities.extend(out.detach().cpu().numpy())
""",
    ]
