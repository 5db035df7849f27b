"""A backward on one side of an `if`: of a switch for training, or for the mixed precision of another library."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP

# an optimizer of another file that runs the backward itself, as apex's FP16_Optimizer does
WRAPPED = """\
import types
library = types.ModuleType("library")
exec('''
import torch
class Wrapped(torch.optim.SGD):
    def backward(self, loss):
        (2 * loss).backward()
''', library.__dict__)
optimizer = library.Wrapped(model.parameters(), lr=0.1)

"""
SIDES = {
    "else": """\
        if half:
            optimizer.backward(loss)
        else:
            loss.backward()
""",
    "else behind an elif": """\
        if half:
            optimizer.backward(loss)
        elif loss is None:
            print("nothing")
        else:
            loss.backward()
""",
    "elif": """\
        if half:
            optimizer.backward(loss)
        elif loss_counts:
            loss.backward()
        else:
            print("nothing")
""",
    "joined behind else": """\
        if half:
            optimizer.backward(loss)
        else: loss.backward(); print("plain")
""",
}


def training(side: str) -> str:
    return (
        TOP
        + WRAPPED
        + textwrap.dedent("""\
        def train(half, loss_counts=True):
            for x, y in loader:
                out = model(x)
                loss = F.cross_entropy(out, y)
                if half > 1:
                    loss = loss / half
                optimizer.zero_grad()
        {side}
                print(loss.item(), out.shape)
                optimizer.step()

        train(0)
        train(2)
        """).replace("{side}\n", side)
    )


@pytest.mark.parametrize("side", ["else", "joined behind else"])
def test_a_loss_that_another_library_differentiates_on_the_other_side_is_split(side):
    text = training(SIDES[side])
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "            loss, out = forward(x, y)\n            optimizer.backward(loss)\n" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(rewritten(text, micro_batches=3, precision="fp32").text))


def test_a_test_that_looks_at_the_loss_keeps_it_in_place():
    text = training(SIDES["else behind an elif"])
    ((form, reason),) = [(loop.rewrite, loop.reason) for loop in rewritten(text).loops]
    assert form == "in-place" and reason.endswith("depends on the loss")


def test_a_loss_behind_an_elif_is_evaluated_on_each_other_side():
    text = training(SIDES["elif"])
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "            loss, out = memory.evaluate(forward, x, y)\n            print" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_lines_that_compute_the_losses_of_two_sides_stay_in_place():
    text = training("        if half:\n            (2 * loss).backward()\n        else:\n            loss.backward()\n")
    after = rewritten(text)
    ((form, reason),) = [(loop.rewrite, loop.reason) for loop in after.loops]
    assert form == "in-place" and "computes more than one loss" in reason
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_statements_behind_the_test_of_a_switch_get_lines_of_their_own():
    text = TOP + textwrap.dedent("""\
        def run(train):
            for x, y in loader:
                if train: optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if train: loss.backward(); optimizer.step()  # learn
                print(loss.item())

        run(True)
        run(False)
        """)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert (
        textwrap.indent(
            textwrap.dedent("""\
        if train:
            loss = memory.forward_backward(forward, x, y)
            memory.step(optimizer, zero_grad=False)  # learn
        else:
            loss = memory.evaluate(forward, x, y)
        """),
            " " * 8,
        )
        in after.text
    )
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_point_between_samples_whose_gradient_is_asked_for_is_new():
    """The gradient penalty of a critic, written out in the loop."""
    text = TOP + textwrap.dedent("""\
        for x, y in loader:
            optimizer.zero_grad()
            between = (0.3 * x.data + (1 - 0.3) * x.flip(1)).requires_grad_(True)
            out = model(between)
            (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
            loss = F.cross_entropy(model(x), y) + ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(rewritten(text, micro_batches=3, precision="fp32").text))
