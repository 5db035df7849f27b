"""Where `.detach()` is written: on one tensor that is seen to be all that is kept, and nowhere else."""

from __future__ import annotations

from textwrap import dedent

import pytest

from oomfix.rewrite.text.edits import apply_edits
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
    reason = "it may not be a single tensor"
    assert bool(findings[0].edits) is not findings[0].message.endswith(f"(no automatic fix: {reason})")
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


ATTENTION = """
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qk = nn.Linear(dim, 2 * dim)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        {targets} = (q @ k.transpose(-2, -1)).softmax(-1)
        return attention @ x
"""
SEVERAL = """
def attend(q, k):
    attention = (q @ k.transpose(-2, -1)).softmax(-1)
    return attention @ k, attention
""" + ATTENTION.replace("{targets} = (q @ k.transpose(-2, -1)).softmax(-1)", "{kept}")
KEPT = """
history = {{}}
for step, (x, y) in enumerate(loader):
    {targets} = criterion(model(x), y)
    loss.backward()
"""


@pytest.mark.parametrize(
    ("code", "targets"),
    [
        (KEPT, "history[step] = loss"),
        (KEPT, "loss = history[step]"),
        (ATTENTION, "self.attention_map = attention"),
        (ATTENTION, "attention = self.attention_map"),
    ],
)
def test_what_another_name_is_given_too_keeps_its_graph(code, targets):
    """`history[step] = loss = criterion(...).detach()` would leave nothing to backpropagate."""
    script = Script.read(Source.from_bytes("train.py", code.format(targets=targets).encode()))
    (finding,) = [f for rule in all_rules() for f in rule.check(script) if f.code == "OOM102"]
    assert not finding.edits
    assert finding.message.endswith(
        "(no automatic fix: the statement also binds the value to another name, which may need the graph)"
    )


@pytest.mark.parametrize(
    "kept",
    [
        "attention, self.attention_map = attend(q, k)",
        "self.attention_map, attention = (q @ k.transpose(-2, -1)).softmax(-1), x",
        "attention = self.qk(x); self.attention_map = [attention, q]",
        "attention = self.qk(x); self.attention_map = {'first': attention}",
        "attention = self.qk(x); self.attention_map = attention, q",
        "attention = self.qk(x); self.attention_map = attention if self.training else None",
    ],
)
def test_what_is_no_tensor_is_not_asked_to_detach(kept):
    """A tuple, list or dict has no such method, and the first batch would end there."""
    code = SEVERAL.format(kept=kept)
    script = Script.read(Source.from_bytes("train.py", code.encode()))
    (finding,) = [f for rule in all_rules() for f in rule.check(script) if f.code == "OOM102"]
    assert not finding.edits
    assert finding.message.endswith("(no automatic fix: it may not be a single tensor)")


def test_a_map_that_only_a_tensor_can_give_is_detached():
    code = ATTENTION.format(targets="attention").replace(
        "        return", "        self.attention_map = attention\n        return"
    )
    code = code.replace("(q @ k.transpose(-2, -1)).softmax(-1)", "self.qk(x).squeeze(-1).softmax(-1)")
    script = Script.read(Source.from_bytes("train.py", code.encode()))
    (finding,) = [f for rule in all_rules() for f in rule.check(script) if f.code == "OOM102"]
    assert "self.attention_map = attention.detach()" in apply_edits(code, list(finding.edits))
