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


IN_AUTOCAST = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(3)]:
    with torch.autocast("cpu", enabled=False):
        {ahead}
        # forget the last batch
        {reset}

        loss = (out - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("reset", ["optimizer.zero_grad()", "model.zero_grad()"])
def test_a_reset_in_a_block_of_autocast_goes_ahead_of_it(reset):
    text = IN_AUTOCAST.format(ahead="out = model(x)", reset=reset)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.line, loop.rewrite, loop.reason) for loop in after.loops] == [(7, "micro-batched", None)]
    assert "    # forget the last batch\n    model.zero_grad()\n" in after.text or reset.startswith("optimizer")
    assert parts_as_whole(text, after.text, after.text) == 3


def test_a_reset_that_begins_a_block_of_autocast_leaves_no_blank_line_there():
    text = IN_AUTOCAST.format(ahead="pass", reset="model.zero_grad()").replace("(out - y)", "(model(x) - y)")
    after = rewritten(text.replace("        pass\n", ""), micro_batches=3, precision="fp32")
    assert "enabled=False):\n            loss = " in after.text
    assert parts_as_whole(text, after.text, after.text) == 3


@pytest.mark.parametrize(
    "ahead",
    [
        "out = model(x); print([p.grad is None for p in model.parameters()])",
        "out = model(x)\n        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "out = model(x)\n        model(x).mean().backward()",
        "out = model(x)\n        held.optimizer = optimizer",
    ],
)
def test_a_reset_that_what_stands_ahead_of_it_notices_stays_in_autocast(ahead):
    reset = "held.optimizer.zero_grad()" if "held" in ahead else "optimizer.zero_grad()"
    after = rewritten(IN_AUTOCAST.format(ahead=ahead, reset=reset))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
