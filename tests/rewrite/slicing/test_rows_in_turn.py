"""Sequences whose rows are taken in turn, with a state handed on, are one sample: never cut."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP

NETWORK = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(4, 3)
        self.states = nn.Linear(3, 3)
        self.out = nn.Linear(3, 2)
    def forward(self, row, state):
        state = torch.tanh(self.rows(row) + 0.01 * self.states(state))
        return self.out(state), state

cell = Cell()
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))] * 3
"""
LOOP = """
for x, y in loader:
    state = torch.zeros(3)
    loss = 0
    {header}
        {out} = cell({row}, state)
        loss += F.cross_entropy({out_name}[None], {target}[None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
ZIPPED = {"header": "for row, target in zip(x, y):", "row": "row", "target": "target"}
COUNTED = {"header": "for i in range(len(x)):", "row": "x[i]", "target": "y[i]"}
COLUMNS = """
for x, y in loader:
    state = torch.zeros(len(x), 3)
    loss = 0
    for i in range(4):
        out, state = cell(x[:, i : i + 1] * x, state)
        loss += F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("taken", [ZIPPED, COUNTED], ids=["zipped", "counted"])
def test_a_state_from_row_to_row_keeps_the_batch_whole(taken):
    text = TOP + NETWORK + LOOP.format(out="out, state", out_name="out", **taken)
    after = rewritten(text, micro_batches=3)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "batch_size=1)" in after.text
    assert any("hands `state` on from each to the next: batches run whole" in note for note in after.loops[0].notes)
    assert not parts_as_whole(text, rewritten(text).text, after.text)


REBOUND = """
for x, y in loader:
    loss = 0
    for row, target in zip(x, y):
        row = row * 2
        out, _ = cell(row, torch.zeros(3))
        loss += F.cross_entropy(out[None], target[None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WITHIN_ROWS = """
for x, y in loader:
    loss = 0
    for row, target in zip(x, y):
        state = torch.zeros(3)
        for value in row:
            _, state = cell(value.expand(4), state)
        loss += F.cross_entropy(state[None], target[None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "loop",
    [LOOP.format(out="out, _", out_name="out", **COUNTED), COLUMNS, REBOUND, WITHIN_ROWS],
    ids=["no state", "other dimension", "the row itself made anew", "a state within each row"],
)
def test_rows_that_hand_nothing_on_may_be_cut(loop):
    after = rewritten(TOP + NETWORK + loop)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "batch_size=1" not in after.text
