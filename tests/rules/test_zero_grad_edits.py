"""The edit of OOM203: `set_to_none=True` for what is torch's, and for nothing that may not know the argument."""

from __future__ import annotations

import pytest

from oomfix.rules.zero_grad import ZeroGrad
from oomfix.script import Script
from oomfix.source import Source

RESET = "def train(model, loader, optimizer):\n    for x, y in loader:\n        optimizer.zero_grad()\n"


@pytest.mark.parametrize(
    ("above", "edited"),
    [
        ("import torch\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n", True),
        ("import torch.optim as optim\noptimizer = optim.Adam(model.parameters())\n", True),
        ("from torch.optim import Adam\noptimizer = Adam(model.parameters())\n", True),
        ("from transformer.schedule import ScheduledOptim\noptimizer = ScheduledOptim(inner, 4000)\n", False),
        ("import schedules as optim\noptimizer = optim.Noam(inner)\n", False),
        ("", False),
        (
            "import torch\nfrom wrappers import Scheduled\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
            "if warmup:\n    optimizer = Scheduled(optimizer)\n",
            False,
        ),
    ],
    ids=["torch.optim", "optim", "a class", "a class around one", "another optim", "not in sight", "maybe around one"],
)
def test_an_optimizer_is_told_to_free_gradients_where_it_is_one_of_torch(above, edited):
    """A class around an optimizer often has a `zero_grad(self)`: the argument would end the script."""
    [finding] = ZeroGrad().check(Script.read(Source.from_bytes("train.py", (above + RESET).encode())))
    assert bool(finding.edits) is edited


def test_a_network_is_told_to_free_gradients():
    code = RESET.replace("optimizer.zero_grad", "model.zero_grad")
    [finding] = ZeroGrad().check(Script.read(Source.from_bytes("train.py", code.encode())))
    assert finding.edits
