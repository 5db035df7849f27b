"""A state that a module keeps from one forward to the next takes its graph along: the loop is not cut."""

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)
        self.hidden = (torch.zeros(1, 4, 5), torch.zeros(1, 4, 5))

    def forward(self, x):
        out, self.hidden = self.lstm(x, self.hidden)
        return self.head(out[:, -1])


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.rand(12, 6, 3), torch.randint(0, 2, (12,))), batch_size=4)
model = Reader()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    print(f"{loss.item():.9f} {model.lstm.weight_hh_l0.grad.norm().item():.9f}")
"""


def test_a_loop_through_a_state_that_the_module_keeps_stays_in_place_with_its_graph():
    after = rewritten(SCRIPT)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "memory.backward(loss, retain_graph=True)" in after.text
    assert_same_bits(run(SCRIPT), run(after.text, preset="off"))
