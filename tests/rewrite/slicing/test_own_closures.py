"""What only functions within a slice read of it is no output, though these may run at any time."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def train(batches):
    for number, (x, y) in enumerate(batches):
        out = net(x)
        {defined}
        rows = torch.stack(list(map(lambda row: best(row), out)))
        loss = F.cross_entropy(out, y) + 0.1 * rows.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {behind}
        print(f"{{loss.item():.9f}}")


train([(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)])
"""
DEFINED = "def best(row):\n            return row.max()\n"
PLAIN = {"defined": DEFINED, "behind": "pass"}


@pytest.mark.parametrize("defined", [DEFINED, "best = torch.max"], ids=str)
def test_a_function_that_a_lambda_of_the_slice_calls_stays_inside(defined):
    text = SCRIPT.format(**PLAIN | {"defined": defined})
    after = rewritten(text, micro_batches=3)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert "            return loss\n" in after.text
    assert parts_as_whole(text, after.text, after.text) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"behind": "print(f'{best(torch.ones(2)).item():.9f}')"},
        {"behind": "show = lambda: best(torch.ones(2))\n        print(f'{show().item():.9f}')"},
        {"behind": "del best"},
        {"behind": "assert 'best' in locals()"},
    ],
    ids=str,
)
def test_a_function_that_lines_behind_the_slice_mention_is_still_there(changes):
    text = SCRIPT.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert run(text).numbers == pytest.approx(run(after.text).numbers)


def test_what_a_lambda_reads_of_the_round_before_keeps_the_loss_in_place():
    carried = "out = out * sum(map(lambda _: last, '1'))"
    defined = (
        f"{DEFINED}        if number:\n            {carried}\n        last = 1.0 + number\n        out = out * last"
    )
    [loop] = rewritten(SCRIPT.format(**PLAIN | {"defined": defined})).loops
    assert (loop.rewrite, loop.reason) == ("in-place", "last may have no value yet where the slice reads it")
