"""OOM304 fp16-without-scaler."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import TRAINS, Finding, Invalid, Rule, Severity
from oomfix.script import Script


class Fp16WithoutScaler(Rule):
    """Training runs under fp16 autocast without a gradient scaler.

    Why: fp16 has no numbers between 0 and 6e-8. Gradients below that silently become zero, layer by layer, and the
    model trains worse or not at all: 74% of the gradients of a segmentation loss over 32768 pixels that are mostly
    right already, 0% at a scale of 65536 (bench/results/rules.md). Loss scaling keeps them in range; bf16, which has
    the range of fp32, needs none.

    `autocast("cuda")` without a dtype means fp16.

    Quiet when:

    - a gradient scaler is used or named where the loop is written, unless it is seen to scale only other losses of the
      loop;
    - the loss is multiplied by a large factor;
    - the dtype is bfloat16, or decided elsewhere;
    - a framework or an object of another file (`optimizer.backward(loss)`) runs the backward.

    Fix: `oomfix.runtime`, which scales where the card has no bf16. By hand, `torch.amp.GradScaler("cuda")`.
    """

    code = "OOM304"
    name = "fp16-without-scaler"
    severity = Severity.ERROR
    needs = TRAINS
    fixed_by_runtime = True

    def check(self, script: Script) -> Iterator[Finding]:
        for loop in script.loops:
            unscaled = script.precision.unscaled(loop)
            if unscaled:
                yield self.finding(
                    script.place(unscaled[0].node),
                    "training under float16 autocast without a gradient scaler: small gradients underflow to zero",
                )

    INVALID = [
        Invalid(
            """
import torch
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
            (5,),
        ),
    ]
    VALID = [
        """
import torch
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
        """
import torch
for x, y in loader:
    with torch.autocast("cpu"):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
    ]
