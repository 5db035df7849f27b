"""A name that the script asks whether it is an optimizer: one on one way of a branch, a function on the other."""

import pytest

from tests.rewrite.equivalence import rewritten, run

SCRIPT = """\
import sys

import torch
from torch import nn, optim


def sgd(params, lr, batch_size):
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()


def train_epoch(net, data, loss, updater):
    for X, y in data:
        l = loss(net(X), y)
        if isinstance(updater, {asked}):
            updater.zero_grad()
            l.mean().backward()
            updater.step()
        else:
            l.sum().backward()
            updater(X.shape[0])
        print(float(l.sum()))


torch.manual_seed(0)
net = nn.Linear(4, 2).to("cuda" if torch.cuda.is_available() else "cpu")
if len(sys.argv) > 1:
    updater = lambda rows: sgd(list(net.parameters()), 0.1, rows)
else:
    updater = optim.SGD(net.parameters(), lr=0.1)
data = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]
train_epoch(net, data, nn.MSELoss(reduction="none"), updater)
print(net.weight.sum().item(), net.bias.sum().item())
"""


@pytest.mark.parametrize("asked", ["torch.optim.Optimizer", "optim.Optimizer", "(optim.Optimizer, type(None))"])
def test_an_updater_is_stepped_by_the_manager_where_it_is_an_optimizer_and_called_where_it_is_not(asked):
    result = rewritten(SCRIPT.format(asked=asked))
    assert [loop.rewrite for loop in result.loops] == ["in-place"], result.loops
    assert "memory.step(updater" in result.text
    assert "            updater(X.shape[0])\n" in result.text
    assert "memory.forward(net, X)" in result.text


def test_gradients_that_a_function_steps_with_on_one_way_of_a_branch_are_never_scaled():
    result = rewritten(SCRIPT.format(asked="torch.optim.Optimizer"))
    assert 'precision="no-fp16"' in result.text
    (note,) = (note for note in result.loops[0].notes if "no fp16" in note)
    assert note.endswith("line 23 calls `updater`, a function that steps where it is no optimizer")


@pytest.mark.parametrize("argv", [[], ["by-hand"]])
@pytest.mark.parametrize("preset", ["off", ""])
def test_a_script_with_an_updater_trains_the_same(argv, preset):
    before = run(SCRIPT.format(asked="torch.optim.Optimizer"), argv)
    after = run(rewritten(SCRIPT.format(asked="torch.optim.Optimizer"), precision="fp32").text, argv, preset=preset)
    assert after.printed == before.printed


BY_HAND = """\
import torch
import torch.nn.functional as F


def sgd(params, lr, rows):
    for param in params:
        {update}


def linear(x, w, b):
    return x @ w + b


torch.manual_seed(0)
w, b = torch.zeros(4, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
data = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]
for x, y in data:
    loss = ((linear(x, w, b) - y) ** 2).sum()
    loss.backward()
    sgd([w, b], 0.1, len(x))
    w.grad.data.zero_()
    b.grad.data.zero_()
    print(f"{{loss.item():.6f}} {{w.sum().item():.6f}} {{b.sum().item():.6f}}")
"""


def test_a_function_that_updates_parameters_by_their_gradients_is_a_step_in_sight():
    text = BY_HAND.format(update="param.data -= lr * param.grad / rows")
    after = rewritten(text)
    (loop,) = after.loops
    assert loop.rewrite != "none"
    assert 'precision="no-fp16"' in after.text
    assert run(after.text, preset="off").printed == run(text).printed


def test_a_function_that_only_looks_at_gradients_is_no_step():
    (loop,) = rewritten(BY_HAND.format(update="print(param.grad / rows)")).loops
    assert loop.reason == "no optimizer step and no update of parameters is in sight"
