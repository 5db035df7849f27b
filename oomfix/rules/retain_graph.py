"""OOM103 retain-graph."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.syntax.edits import remove_keyword


class RetainGraph(Rule):
    """`backward(retain_graph=True)` is called although no later backward needs the graph.

    Why: a backward frees each activation as soon as it is used. With `retain_graph=True` all of them stay until the
    last name that leads to the loss is gone, usually through the whole next forward. The activations of two iterations
    are then alive at once: the peak was 1.7 times as high in a loop over a network of 8 blocks
    (bench/results/rules.md).

    Quiet when:

    - another backward, or `torch.autograd.grad`, goes through the same forward afterwards;
    - the graph is carried into the next iteration, or a part of it was made once, before the loop;
    - a network out of sight begins with a state before the loop (`net.reset_states()`), and may hand it on;
    - the flag is not literally `True`;
    - what is differentiated was computed in code that is not in the file.

    Fix: drop the argument.
    """

    code = "OOM103"
    name = "retain-graph"
    severity = Severity.WARNING
    needs = (b"retain_graph",)

    def check(self, script: Script) -> Iterator[Finding]:
        retaining = [backward for backward in script.backwards if backward.retains]
        needed = {backward.node for backward in retaining if script.is_needed_later(backward)}
        for backward in script.distinct(retaining):
            if backward.node not in needed:
                yield self.finding(
                    script.place(backward.node),
                    "`retain_graph=True` keeps all activations alive, but no later backward needs them",
                    edits=remove_keyword(script.source, backward.node, "retain_graph"),
                )

    INVALID = [
        Invalid(
            """
for x, y in loader:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
""",
            (5,),
            """
for x, y in loader:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        ),
        Invalid(
            """
class Model:
    def add_penalty(self, weights):
        self.penalty = torch.zeros(1)
        self.penalty += torch.stack([w.square().sum() for w in weights]).sum()

    def fit(self, loader):
        for x, y in loader:
            self.add_penalty(self.net.parameters())
            loss = criterion(self.net(x), y) + self.penalty
            loss.backward(retain_graph=True)
            self.optimizer.step()
""",
            (11,),
        ),
        Invalid(
            """
loss, hidden = 0, None
for i, (x, y) in enumerate(loader):
    out, hidden = model(x, hidden)
    loss = loss + criterion(out, y)
    if i % 20 == 0:
        loss.backward(retain_graph=True)
        optimizer.step()
        loss, hidden = 0, hidden.detach()
""",
            (7,),
        ),
    ]
    VALID = [
        """
for x, y in loader:
    out = model(x)
    first, second = criterion(out, y), penalty(out)
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
""",
        """
import torch
for x, y in loader:
    out = model(x)
    loss = criterion(out, y)
    loss.backward(retain_graph=True)
    gradient = torch.autograd.grad(out.sum(), x)
""",
        """
hidden = None
for x, y in loader:
    out, hidden = model(x, hidden)
    criterion(out, y).backward(retain_graph=True)
    optimizer.step()
""",
        """
class Model:
    def __init__(self, net, weights):
        self.net = net
        self.penalty = torch.zeros(1)
        self.add_penalty(weights)

    def add_penalty(self, weights):
        self.penalty += torch.stack([w.square().sum() for w in weights]).sum()

    def fit(self, loader):
        for x, y in loader:
            loss = criterion(self.net(x), y) + self.penalty
            loss.backward(retain_graph=True)
            self.optimizer.step()
""",
        """
hidden = None
for i, (x, y) in enumerate(loader):
    if i % 20 == 0:
        hidden = hidden.detach()
    out, hidden = model(x, hidden)
    criterion(out, y).backward(retain_graph=True)
    optimizer.step()
""",
    ]
