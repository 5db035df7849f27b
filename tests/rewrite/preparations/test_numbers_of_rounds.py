"""A number that a loop logs off what its rounds fill is read in its round, and logged behind the loop."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(7, 4), torch.randint(0, 3, (7,))) for _ in range(4)]
sums, last = [0.0, 0.0, 0.0, 0.0], {{}}

for x, y in loader:
    optimizer.zero_grad()
    outputs = [net(x) for net in model]
    {losses}
    for i in range(len(outputs)):
        {rounds}
    {total}
    loss.backward()
    optimizer.step()
    {behind}
print([f"{{one:.9f}}" for one in sums], {{name: f"{{one:.9f}}" for name, one in last.items()}})
"""
ONE = "losses.append(F.cross_entropy(outputs[i], y))\n"
BOTH = f"{ONE}losses.append(outputs[i].square().mean())\n"
ADDED = "loss = losses[0]\nfor i in range(1, len(losses)):\n    loss += losses[i]"
STACKED = "loss = torch.stack(losses).sum()"


def script(rounds, losses="losses = []", total=STACKED, behind="pass"):
    parts = {"rounds": rounds.replace("\n", "\n        "), "total": total.replace("\n", "\n    ")}
    return SCRIPT.format(losses=losses, behind=behind, **parts)


@pytest.mark.parametrize(
    ("rounds", "losses", "total"),
    [
        (f"{ONE}sums[i] += losses[-1].item()", "losses = []", STACKED),
        (f"{ONE}sums[i] += losses[-1].item()", "losses = []", ADDED),
        (f"{BOTH}sums[i] += losses[-2].item()\nsums[2 + i] += losses[-1].item() / 2", "losses = []", ADDED),
        (f"{ONE}sums[i] += float(losses[i])", "losses = []", STACKED),
        (
            "losses[i] = F.cross_entropy(outputs[i], y)\nlast.update({f'loss {i}': losses[i].item()})",
            "losses = {}",
            "loss = sum(losses.values())",
        ),
    ],
    ids=["stacked", "added in place", "two of a round", "float", "a dict"],
)
def test_a_number_of_a_round_is_logged_behind_the_loop(rounds, losses, total):
    text = script(rounds, losses, total)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"], after.loops
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)


@pytest.mark.parametrize(
    ("rounds", "behind"),
    [
        (f"{ONE}sums[i] += losses[-1].item() if i else 0.0", "pass"),
        (f"sums[i] += losses[-1].item() if losses else 0.0\n{ONE}", "pass"),
        (f"{ONE}sums[i] += losses[-1].item()", "sums[i] += 1.0"),
    ],
    ids=["perhaps", "of the round before", "a round that is read behind"],
)
def test_near_misses_train_the_same(rounds, behind):
    text = script(rounds, total=ADDED, behind=behind)
    parts_as_whole(text, rewritten(text).text, rewritten(text, micro_batches=3).text)


def test_a_number_that_may_not_be_read_keeps_its_loop_in_place():
    text = script(f"{ONE}sums[i] += losses[-1].item() if i else 0.0")
    line = text[: text.index("sums[i]")].count("\n") + 1
    [loop] = rewritten(text).loops
    assert loop.reason == f"line {line} changes sums, which was made outside of the slice"
