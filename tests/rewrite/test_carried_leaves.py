"""What a round computes from a leaf and hands to the next goes on with its graph: the slice gives none."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
from torch import nn


def moved(batch, delta):
    batch["x"] = batch["x"] + delta
    return batch


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.rand(6, 3)
batch = {{"x": x}}
{leaf}
optimizer = torch.optim.Adam([delta], lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    with torch.no_grad():
        scale = net(torch.ones(1, 3)).abs()
    {moved}
    loss = (scale * net({moved_to})).mean()
    loss.backward({kept})
    optimizer.step()
    {after}
    print(f"{{loss.item():.9f}} {{delta.norm().item():.9f}}")
"""
LEAF = "delta = torch.zeros_like(x, requires_grad=True)"
IN_SLICE = [
    ("y = net(x) * 0 + delta; x = x + y", "x"),
    ("y = net(batch['x']) * 0; batch = moved(batch, delta + y)", "batch['x']"),
]


def script(moved, moved_to="x", kept="retain_graph=True", after="pass", leaf=LEAF):
    return SCRIPT.format(moved=moved, moved_to=moved_to, kept=kept, after=after, leaf=leaf)


@pytest.mark.parametrize("leaf", [LEAF, "delta = torch.zeros_like(x)\ndelta.requires_grad_()"])
@pytest.mark.parametrize(("moved", "moved_to"), IN_SLICE)
def test_a_loss_that_goes_back_through_earlier_rounds_stays_in_place(moved, moved_to, leaf):
    text = script(moved, moved_to, leaf=leaf)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "memory.backward(loss, retain_graph=True)" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


BLOCK = """\
    with torch.autocast("cpu", enabled=False):
        x = x + delta
        out = net(x)
    loss = (scale * out)"""


def test_a_graph_of_sums_alone_needs_not_be_kept_to_be_carried():
    text = script("x = x + delta", kept="").replace("    x = x + delta\n    loss = (scale * net(x))", BLOCK)
    after = rewritten(text)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [
        ("in-place", "x goes on into the loss of the next iteration, with its graph")
    ]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_kept_graph_that_the_next_round_goes_through_stays_kept():
    text = script("x = torch.tanh(x + delta)")
    after = rewritten(text)
    assert "retain_graph=True" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("moved", "after"),
    [
        ("x = x + delta", "x = x.detach()"),
        ("x = (x + delta.data)", "pass"),
        ("z = x + delta; last = z.mean().item()", "pass"),
    ],
)
def test_what_is_cut_off_or_made_anew_is_not_carried(moved, after):
    text = script(moved, "z" if "z" in moved else "x", kept="", after=after)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
