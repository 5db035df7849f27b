"""OOM203 zero-grad."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script
from oomfix.script.syntax.edits import add_keyword
from oomfix.script.syntax.nodes import only_argument


class ZeroGrad(Rule):
    """Gradients are filled with zeros instead of being freed.

    What: `zero_grad(set_to_none=False)` and loops of `p.grad.zero_()` (warnings), and every bare `zero_grad()` (a note;
    a warning if the target torch is below 2.0, where filling was the default).

    Why: zeroed gradients stay allocated through the next forward, one more copy of the trainable parameters at its peak
    (16.1 MiB for 16.1 MiB of weights, bench/results/rules.md), and each is written twice for nothing.

    Quiet when: `set_to_none=True` is given. It is the default from torch 2.0 on. Giving it makes the script mean the
    same on older versions, hence only a note.

    Fix: `optimizer.zero_grad(set_to_none=True)`, or nothing at all where `memory.step` does it. There is no automatic
    fix where zeros are asked for: without them, momentum and weight decay no longer move a parameter that a batch does
    not reach. Nor is there one for an optimizer that the file does not make of a class of `torch.optim`: a class around
    one may have a `zero_grad` without arguments.
    """

    code = "OOM203"
    name = "zero-grad"
    severity = Severity.NOTE
    needs = (b"zero_grad", b"grad.zero_", b"grad.data.zero_")
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        old = script.target_torch is not None and script.target_torch < (2, 0)
        for call in script.calls_of_method("zero_grad"):
            argument = only_argument(call)
            if argument is not None:
                if not (isinstance(argument, ast.Constant) and argument.value is False):
                    continue
                yield self.finding(
                    script.place(call),
                    "`set_to_none=False` keeps the gradients allocated through the next forward",
                    severity=Severity.WARNING,
                )
            else:
                fixed = script.takes_set_to_none(call)
                yield self.finding(
                    script.place(call),
                    "on torch below 2.0, fills gradients with zeros instead of freeing them",
                    severity=Severity.WARNING if old else Severity.NOTE,
                    edits=add_keyword(script.source, call, "set_to_none=True") if fixed else (),
                )
        for call in script.gradients_zeroed_by_hand():
            yield self.finding(
                script.place(call),
                "zeroing gradients by hand keeps them allocated through the next forward: set them to None",
                severity=Severity.WARNING,
            )

    INVALID = [
        Invalid(
            """
optimizer.zero_grad(set_to_none=False)
""",
            (2,),
        ),
        Invalid(
            """
model.zero_grad()
""",
            (2,),
            """
model.zero_grad(set_to_none=True)
""",
        ),
        Invalid(
            """
import torch.optim as optim
optimizer = optim.Adam(model.parameters())
def train(optimizer):
    optimizer.zero_grad()
""",
            (5,),
            """
import torch.optim as optim
optimizer = optim.Adam(model.parameters())
def train(optimizer):
    optimizer.zero_grad(set_to_none=True)
""",
        ),
        Invalid(
            """
for p in model.parameters():
    if p.grad is not None:
        p.grad.zero_()
""",
            (4,),
        ),
    ]
    VALID = [
        """
optimizer.zero_grad(set_to_none=True)
optimizer.zero_grad(True)
""",
        """
for p in model.parameters():
    p.grad = None
""",
        """
buffer.zero_()
x.grad.zero_()
""",
    ]
