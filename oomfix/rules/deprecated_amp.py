"""OOM401 deprecated-amp."""

from __future__ import annotations

from collections.abc import Iterator

from oomfix.rules.base import Finding, Invalid, Rule, Severity
from oomfix.script import Script


class DeprecatedAmp(Rule):
    """`torch.cuda.amp.*` and `torch.cpu.amp.*` are deprecated since torch 2.4."""

    code = "OOM401"
    name = "deprecated-amp"
    severity = Severity.WARNING
    needs = (b"cuda.amp", b"cpu.amp", b"cuda import amp", b"cpu import amp")

    def check(self, script: Script) -> Iterator[Finding]:
        for node, old, new in script.deprecated_amp():
            yield self.finding(script.place(node), f"`{old}` is deprecated since torch 2.4: use `{new}`")

    INVALID = [
        Invalid(
            """
from torch.cuda.amp import autocast
with autocast():
    pass
""",
            (2, 3),
        ),
    ]
    VALID = [
        """
import torch
with torch.amp.autocast("cuda"):
    pass
""",
    ]
