"""Gradients that a script makes itself, or adds to, are not divided by a scale that is not in them."""

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP, apply

LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize("added", ["+= 0.01 * model.weight.detach()", "-= noise"])
def test_what_is_added_to_a_gradient_is_added_once_it_is_unscaled(added):
    """In fp16 it would be 65536 times too small beside the gradient."""
    text, forms = apply(f"noise = torch.rand(2, 4)\n{LOOP.format(between=f'model.weight.grad {added}')}")
    assert forms == [("micro-batched", None)]
    assert f"    memory.unscale_(optimizer)\n    model.weight.grad {added}\n    memory.step(optimizer)" in text


def test_a_function_that_adds_to_gradients_keeps_losses_unscaled():
    decay = "def decay(network):\n    for p in network.parameters():\n        p.grad += 0.01 * p.data\n\n"
    result = rewritten(f"{TOP}{decay}{LOOP.format(between='decay(model)')}")
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 10 adds to `p.grad`, a gradient that may be scaled"


def test_a_gradient_that_is_multiplied_keeps_its_scale():
    text, _ = apply(LOOP.format(between="model.weight.grad *= 0.5"))
    assert "unscale_" not in text and "no-fp16" not in text


GIVEN = """\
other = nn.Linear(4, 2)
optimizer_2 = torch.optim.SGD(other.parameters(), lr=0.1)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gradients = torch.autograd.grad(F.cross_entropy(other(x), y), other.parameters())
    for parameter, gradient in zip(other.parameters(), gradients):
        parameter.grad = {gradient}
    optimizer_2.step()
"""


@pytest.mark.parametrize("gradient", ["gradient", "-gradient.clone()"])
def test_where_a_script_gives_parameters_gradients_of_its_own_no_loss_is_scaled(gradient):
    """`memory.step` would divide them by a scale that they were never multiplied by."""
    result = rewritten(f"{TOP}{GIVEN.format(gradient=gradient)}")
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 17 gives `parameter.grad` a value that is not scaled"
    assert 'runtime.preset("16gb", precision="no-fp16")' in result.text


@pytest.mark.parametrize("gradient", ["None", "torch.zeros_like(parameter)"])
def test_a_gradient_of_nothing_has_every_scale(gradient):
    assert "no-fp16" not in rewritten(f"{TOP}{GIVEN.format(gradient=gradient)}").text


def test_a_step_behind_the_loop_on_a_backward_of_its_own_keeps_losses_unscaled():
    last = "loss = F.cross_entropy(model(x), y)\nloss.backward()\noptimizer.step()\n"
    result = rewritten(f"{TOP}{LOOP.format(between='pass')}optimizer.zero_grad()\n{last}")
    (note,) = result.loops[0].notes
    assert note == "losses are not scaled, so no fp16: line 16 steps on the backward of line 15, which is in no loop"
    tail = "if len(loader) % 2:\n    optimizer.step()\n"
    assert "no-fp16" not in rewritten(f"{TOP}{LOOP.format(between='pass')}{tail}").text


TWO_PHASES = """\
from architect import Architect
other = nn.Linear(4, 2)
optimizer_2 = torch.optim.SGD(other.parameters(), lr=0.1)
architect = Architect(model)
for x, y in loader:
    {reset}
    architect.unrolled_backward(x, y, optimizer)
    optimizer_2.step()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    {behind}
"""


@pytest.mark.parametrize(
    ("reset", "behind", "note"),
    [
        ("optimizer_2.zero_grad()", "pass", "line 15 steps on gradients of no backward in sight"),
        ("pass", "optimizer_2.step()", None),
    ],
)
def test_an_optimizer_that_steps_ahead_of_all_backwards_has_gradients_of_another_file(reset, behind, note):
    """As in the search for architectures: the scaler would find nothing scaled, and end the run."""
    result = rewritten(f"{TOP}{TWO_PHASES.format(reset=reset, behind=behind)}")
    told = [said for said in result.loops[0].notes if "in sight" in said]
    assert told == ([] if note is None else [f"losses are not scaled, so no fp16: {note}"])
    assert ("no-fp16" in result.text) is (note is not None)
