"""A name that may stand for either of two networks of the file."""

from __future__ import annotations

import pytest

EITHER = """
    import torch

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x, state):
            out = self.head(x + state)
            return out, out

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = torch.nn.LSTM(8, 2)

        def forward(self, x, state):
            return self.cell(x, state)

        def begin(self, state):
            return {given}

    if kind == "plain":
        net = {first}().cuda()
    else:
        net = {second}().cuda()
    optimizer = torch.optim.Adam(net.parameters())
    state = None
    for x, y in loader:
        state = net.begin(state)
        out, state = net(x, state)
        optimizer.zero_grad()
        criterion(out, y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("first", "second"), [("Plain", "Recurrent"), ("Recurrent", "Plain")])
def test_a_method_is_that_of_the_network_which_has_it(report, first, second):
    """Which of the two stands first says nothing."""
    assert report(EITHER.format(first=first, second=second, given="state.detach()")) == [("OOM202", 31)]
    assert ("OOM104", 31) in report(EITHER.format(first=first, second=second, given="state"))
