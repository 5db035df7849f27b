"""Targets that are marked between network and criterion, `y[y == 255] = -100`, in a tensor of the batch."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten

SEGMENTING = """\
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 5)
        self.known = None

    def forward(self, x):
        return self.line(x) if self.known is None else self.line(x) * (self.known > 1).float()[:, None]


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
device, floor = "cpu", torch.tensor(1)
loader = [(torch.randn(6, 4), torch.randint(0, 5, (6,))) for _ in range(5)]
for x, y in loader:
    {ahead}
    optimizer.zero_grad()
    out = net({given})
    # what nobody labelled
    {marks}
    loss = F.cross_entropy(out, y, ignore_index=-100)
    loss.backward()
    optimizer.step()
    print(loss.item(), (out.argmax(1) == y).float().mean().item(), y.float().sum().item())
"""
PLAIN = {"ahead": "x, y = x.to(device), y.to(device).long()", "given": "x", "marks": "y[y == 0] = -100"}


def of(**changes: str) -> str:
    return SEGMENTING.format(**PLAIN | changes)


MARKS = {
    "a mask": "y[y == 0] = -100",
    "a sum": "y[y > 2] -= 1",
    "in place": "y.clamp_(0, 3)",
    "under a test": "if y.min() == 0:\n        y[y == 0] = -100",
    "row by row": "for i in range(x.size(0)):\n        low = x[i].argmin()\n        if low > 1:\n            y[i] = 0",
}


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_targets_are_marked_ahead_of_the_slice(marks):
    text = of(marks=marks)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.index("# what nobody labelled") < after.text.index("def forward(x, y):\n        out = net(x)")
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3, precision="fp32").text) == 5


@pytest.mark.parametrize("blank", ["", "\n"])
def test_what_moves_ahead_keeps_the_blank_line_above_it(blank):
    text = of().replace("    # what nobody", f"{blank}    # what nobody")
    assert f"y.to(device).long()\n{blank}    # what nobody labelled\n" in rewritten(text).text


NEAR_MISSES = {
    "the network's result decides": {"marks": "y[out.argmax(1) == 0] = -100"},
    "random numbers decide": {"marks": "y[torch.rand(6) < 0.5] = -100"},
    "the network is given the targets": {"ahead": "net.known = y"},
    "something that may know the targets is given them": {"ahead": "known = Known(y)"},
    "the network is given a view of them": {"ahead": "shown = y.view(-1, 1)", "given": "x * shown"},
    "what is passed reads a view of them": {
        "ahead": "shown = y.view(-1, 1)",
        "marks": "out = out * shown\n    y[y == 0] = -100",
    },
    "the targets outlast the iteration": {"ahead": "y = floor.expand(6).clone(); keep = y; y = keep"},
    "the targets are part of what stays": {"ahead": "y = loader[0][1]"},
    "something holds them": {"ahead": "kept = [y]; held = kept"},
    "the loss needs more of the marking": {
        "marks": "for i in range(6):\n        low = x[i, 0]\n        y[i] = 0\n    out = out * low"
    },
    "a name of the slice is bound": {"marks": "for x in y[None]:\n        x[x == 0] = -100\n        y[:1] = 1"},
    "the marking calls what writes to the file's state": {"marks": "y[mark(y)] = -100"},
}
CALLED = """\
class Known:
    def __init__(self, y):
        net.known = y


seen = 0


def mark(y):
    global seen
    seen += 1
    return y == seen


"""


@pytest.mark.parametrize("changes", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_targets_that_depend_on_where_they_are_marked_stay(changes):
    text = of(**changes).replace("net = Net()", f"{CALLED}net = Net()")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.index("out = ") < after.text.index("# what nobody labelled") < after.text.index("F.cross_entropy")
