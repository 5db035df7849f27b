"""An attribute that a network writes holds what it ran on last: a loop that reads it needs batches that stay whole."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply

NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.seen = None

    def forward(self, x):
        return self.look(self.inner(x))

    def look(self, out):
        {kept}
        return out

    def reset(self):
        self.asked = self.inner.weight * 2


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print({read})
"""


@pytest.mark.parametrize(
    "kept", ["self.seen = out", "self.seen = out.softmax(1)", "self.first, self.seen = x = out, out"]
)
def test_a_loop_that_reads_rows_which_the_network_keeps_stays_in_place(kept):
    text = NET.format(kept=kept) + LOOP.format(read="model.seen.shape")
    line = (TOP + text).count("\n")
    told = f"line {line} reads model.seen, which holds what the network ran on last"
    assert apply(text)[1] == [("in-place", told)]
    assert_same_bits(run(TOP + text), run(rewritten(TOP + text, micro_batches=2).text))


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        ("self.seen = out.mean()", "model.seen.item()"),
        ("self.seen = F.cross_entropy(out, torch.zeros(len(out), 2))", "model.seen.item()"),
        ("self.seen = out.pow(2).mean().detach() + 0.5 * out.sum().detach()", "model.seen.item()"),
        ("aux_loss = out.mean()\n        self.seen = aux_loss", "model.seen.item()"),
        ("self.seen = out", "loss.item()"),
        ("self.seen = out", "model.asked.sum()"),
    ],
)
def test_numbers_and_attributes_that_nobody_reads_leave_it_lifted(kept, read):
    assert apply(NET.format(kept=kept) + "model.reset()\n" + LOOP.format(read=read))[1] == [("micro-batched", None)]


def test_a_loop_that_reads_a_name_which_the_network_binds_stays_in_place():
    text = NET.format(kept="global seen\n        seen = out") + LOOP.format(read="seen.shape")
    told = f"line {(TOP + text).count(chr(10))} reads seen, which holds what the network ran on last"
    assert apply(text)[1] == [("in-place", told)]
