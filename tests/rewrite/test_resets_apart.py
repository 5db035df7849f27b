"""Gradients reset in the branch of the forward: the reset goes to the backward that is run with it."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

PHASES = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(3)]
epoch = 0


def run(phase):
    for x, y in batches:
        if {test}:
            optimizer.zero_grad()
            out = model(x)
        else:
            with torch.no_grad():
                out = model(x)
        loss = (out - y).pow(2).mean()
        {between}
        if {test}:
            loss.backward()
            optimizer.step()
        print(loss.item())


for epoch in range(2):
    run("train")
    run("test")
"""


@pytest.mark.parametrize(("test", "steps"), [('phase == "train"', 6), ('epoch == 0 or not phase == "test"', 9)])
def test_a_reset_beside_the_forward_goes_to_the_backward_under_the_same_test(test, steps):
    text = PHASES.format(test=test, between="pass")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.line, loop.rewrite, loop.reason) for loop in after.loops] == [(12, "micro-batched", None)]
    assert "zero_grad()" not in after.text
    assert parts_as_whole(text, after.text, after.text) == steps


@pytest.mark.parametrize(
    "between",
    [
        "print([p.grad is None for p in model.parameters()])",
        'phase = "train"',
        "if loss.item() > 9: continue",
    ],
)
def test_a_reset_that_is_noticed_ahead_of_the_backward_stays_where_it_is(between):
    text = PHASES.format(test='phase == "train"', between=between)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert '        if phase == "train":\n            optimizer.zero_grad()\n' in after.text
    if "phase =" not in between:
        assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_reset_alone_in_its_branch_stays_between_forward_and_backward():
    text = PHASES.format(test='phase == "train"', between="pass").replace(
        "            optimizer.zero_grad()\n            out = model(x)\n", "            out = model(x)\n"
    )
    text = text.replace("        pass\n", '        if phase == "train":\n            optimizer.zero_grad()\n')
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, after.text) == 6
