"""Hidden states that are made for each batch become those of its parts."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def {init}(self, rows):
        return torch.zeros(1, rows, 8)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.head(out[:, -1]), hidden


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(5):
    x, y = torch.randn(7, 3, 4), torch.randint(0, 2, (7,))
    {ahead}
    optimizer.zero_grad()
    hidden = net.{init}({rows})
    {between}
    out, hidden = net(x, hidden)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.9f}}")
"""


def script(init="init_hidden", ahead="pass", rows="x.size(0)", between="pass"):
    return SCRIPT.format(init=init, ahead=ahead, rows=rows, between=between)


@pytest.mark.parametrize(
    "init", ["init_hidden", "initHidden", "init_state", "get_initial_state", "initialize_hidden_state"]
)
@pytest.mark.parametrize(
    ("ahead", "rows"),
    [("pass", "len(x)"), ("n = x.shape[0]", "n"), ("n, _, _ = x.shape", "n"), ("n, *_ = x.size()", "n")],
)
def test_a_state_for_as_many_rows_as_the_batch_has_is_made_for_each_part(init, ahead, rows):
    text = script(init, ahead, rows)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "memory.forward_backward(forward, x, y)" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))
    assert_close(run(text), run(after.text))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": "batch_size", "ahead": "batch_size = 7"},
        {"between": "hidden = hidden + 0"},
        {"between": "noise = torch.rand(3)"},
    ],
    ids=["a constant", "changed", "random numbers between"],
)
def test_a_state_of_another_kind_stays_outside(change):
    text = script(**change)
    after = rewritten(text)
    assert "memory.forward_backward(forward, x, hidden, y)" in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(
    ("ahead", "rows"), [("pass", "x.size(1)"), ("n = x.shape[1]", "n"), ("steps, n, _ = x.shape", "n")]
)
def test_a_state_for_a_dimension_that_no_batch_is_cut_along_stays_outside(ahead, rows):
    text = script(ahead=ahead, rows=rows).replace("torch.randn(7, 3, 4)", "torch.randn(7, 7, 4)")
    assert "memory.forward_backward(forward, x, hidden, y)" in rewritten(text).text
