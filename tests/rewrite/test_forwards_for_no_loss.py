"""A network that runs between a forward and its backward, and that no loss needs, runs behind the backward."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(rate), nn.Linear(8, 2)
        self.seen = 0

    def forward(self, x):
        self.seen = x.detach().sum().item()
        return self.last(self.drop(torch.tanh(self.first(x))))


def accuracy(net, x, y):
    return (net(x).argmax(1) == y).float().mean().item()


net, teacher = Net({rate}), Net({rate})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{ahead}for x, y in [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]:
    out = net(x)
    {between}
    loss = F.cross_entropy(out, y)
    {behind}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.9f}}")
"""
PLAIN = {"rate": 0.0, "ahead": "", "between": "pass", "behind": "pass"}


@pytest.mark.parametrize(
    "changes",
    [
        {"between": "goal = teacher(x)"},
        {"behind": "goal = teacher(x)\n    print(f'{F.mse_loss(out, goal).item():.9f}')"},
        {"behind": "print(f'{accuracy(net, x, y):.9f}')"},
        {"behind": "if loss < 9:\n        print(f'{accuracy(teacher, x, y):.9f}')"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_network_that_no_loss_needs_runs_behind_the_backward(changes, rate):
    text = SCRIPT.format(**PLAIN | changes | {"rate": rate})
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    call = after.text.index("memory.forward_backward(")
    assert call < max(after.text.find("goal = teacher(x)"), after.text.rfind("accuracy(")) < after.text.index(".step(")
    assert_same_bits(run(text), run(after.text, preset="off"))
    if not rate:
        assert parts_as_whole(text, after.text, after.text) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"between": "goal = teacher(x)\n    out = F.dropout(out, 0.5)", "rate": 0.5},
        {"between": "goal = teacher(x)\n    out = out + net(x)", "rate": 0.5},
        {"between": "goal = net(2 * x)\n    out = out * net.seen"},
        {"behind": "goal = teacher(x)\n    goal.mean().backward()"},
    ],
    ids=str,
)
def test_a_network_that_the_loss_may_see_run_keeps_its_place(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_a_network_ahead_of_a_backward_that_steps_in_its_branch_keeps_its_place():
    text = SCRIPT.format(**PLAIN | {"behind": "print(f'{accuracy(net, x, y):.9f}')"})
    trained = "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    text = text.replace(trained, "    if len(x) > 1:\n" + trained.replace("    ", "        "))
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))
