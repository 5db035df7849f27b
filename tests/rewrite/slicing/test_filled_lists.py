"""Lists that a network is given to leave something in: each part of a batch would have its own."""

import pytest

from tests.rewrite.small_loops import apply, assert_trains_the_same

NETWORK = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, extra=None):
        out = self.layer(x)
        if extra is not None:
            extra[:] = [out.detach().sum()]
        return out

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for number, (x, y) in enumerate(loader):
    {made}
    out = model(x, extra=found)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {read}
"""
READ = "print(found[0].item() if found else 0)"


@pytest.mark.parametrize("made", ["found = [0]", "found = []", "found = [0] if number % 2 == 0 else None"])
def test_what_a_network_leaves_in_an_empty_list_is_that_of_the_whole_batch(made):
    _, loops = apply(NETWORK + LOOP.format(made=made, read=READ))
    assert loops == [("in-place", "line 23 may fill found, which is read later")]


def test_what_is_read_between_forward_and_backward_counts_as_later():
    between = LOOP.replace("    {read}\n", "").replace("    loss.back", "    {read}\n    loss.back")
    _, loops = apply(NETWORK + between.format(made="found = [0]", read=READ))
    assert loops == [("in-place", "line 23 may fill found, which is read later")]


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ("found = [0]", "print(loss.item())"),
        ("found = [0]", "found = 1\n    print(found)"),
        ("found = None", "print(found)"),
    ],
    ids=["read by nobody", "bound anew", "no list"],
)
def test_a_list_that_nobody_reads_may_be_filled_by_each_part(made, read):
    assert_trains_the_same(NETWORK + LOOP.format(made=made, read=read))


def test_a_list_that_is_filled_ahead_of_the_network_is_data():
    assert_trains_the_same("""\
        for x, y in loader:
            rows = []
            for row in x:
                rows.append(row)
            loss = F.cross_entropy(model(torch.stack(rows)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(len(rows), loss.item())
        """)
