"""Where `.detach()` is written: on one tensor that is seen to be all that is kept, and nowhere else."""

from __future__ import annotations

from textwrap import dedent

import pytest

from oomfix.rewrite.edits import apply_edits
from oomfix.rules import all_rules
from oomfix.script import Script
from oomfix.source import Source

TRAINED = """
    {meter}
    total = 0
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        {kept}
"""
METER = """class Meter:
        total = 0
        def update(self, value, n=1):
            self.total += value
    class Pairs:
        total = 0
        def update(self, pair):
            self.total += pair[0] + pair[1]
    class Sum:
        total = 0
        def update(self, value):
            self.total += value + self.other
    meter, pairs, both = Meter(), Pairs(), Sum()"""


def detached(kept: str) -> str:
    """The line that keeps something, after its edit; as it was where it has none."""
    code = dedent(TRAINED).lstrip("\n").format(meter=dedent(METER.replace("class", "    class", 1)), kept=kept)
    script = Script.read(Source.from_bytes("train.py", code.encode()))
    findings = [f for rule in all_rules() for f in rule.check(script) if f.code in ("OOM101", "OOM102")]
    assert len(findings) == 1
    assert bool(findings[0].edits) is not findings[0].message.endswith("(by hand: not seen to be one tensor)")
    return apply_edits(code, [edit for finding in findings for edit in finding.edits]).splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("kept", "fixed"),
    [
        ("total += loss", "total += loss.detach()"),
        ("total = total + loss", "total = total + loss.detach()"),
        ("meter.update(loss)", "meter.update(loss.detach())"),
        ("meter.update(value=loss, n=len(x))", "meter.update(value=loss.detach(), n=len(x))"),
    ],
)
def test_one_tensor_is_detached(kept, fixed):
    assert detached(kept) == fixed


@pytest.mark.parametrize(
    "kept",
    [
        "total = total + loss + out.mean()",
        "pairs.update([loss, out.mean()])",
        "pairs.update((loss, out.mean()))",
        "parts = []; parts.append(loss); parts.append(out.mean()); pairs.update(parts)",
        "both.other = network(x); both.update(loss)",
    ],
)
def test_several_are_not(kept):
    assert detached(kept) == kept
