"""Windows of a DistributedDataParallel model: when gradients are exchanged follows the window of the manager."""

import textwrap
from collections.abc import Iterator

import pytest

from tests.process_groups import group_of_one
from tests.rewrite.equivalence import assert_same_bits, rewritten, run

TOP = """\
import contextlib
import torch
import torch.nn.functional as F
from torch import nn

k = 4
ddp = True
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))] * {batches}

"""
CONTEXT = """\
for i, (x, y) in enumerate(loader):
    update = (i + 1) % k == 0
    with contextlib.nullcontext() if update else model.no_sync():
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
"""
BRANCHES = """\
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    if ddp and (i + 1) % k != 0:
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
SWITCH = """\
for i, (x, y) in enumerate(loader):
    model.require_backward_grad_sync = (i + 1) % k == 0 or i + 1 == len(loader)
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if not (i + 1) % k:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with group_of_one():
        yield


@pytest.mark.parametrize(
    ("loop", "lines"),
    [
        (CONTEXT, ["update = memory.window_closed", "with contextlib.nullcontext() if update else model.no_sync():"]),
        (BRANCHES, ["if ddp and not memory.window_closed:", "if memory.window_closed:"]),
        (SWITCH, ["model.require_backward_grad_sync = memory.window_closed", "if memory.window_closed:"]),
    ],
    ids=["context", "branches", "switch"],
)
def test_the_exchange_is_asked_of_the_window_that_is_folded(loop, lines):
    text = rewritten(TOP.format(batches=6) + loop).text
    stripped = [line.strip() for line in text.splitlines()]
    assert "for i, (x, y) in enumerate(memory.accumulate(loader, k)):" in stripped
    assert [line for line in stripped if line in lines] == lines
    assert "% k" not in text


@pytest.mark.parametrize("loop", [CONTEXT, BRANCHES, SWITCH], ids=["context", "branches", "switch"])
def test_whole_windows_of_one_process_train_the_same(loop, one_process):
    text = TOP.format(batches=8) + loop
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (BRANCHES.replace("if ddp and (i + 1) % k != 0:", "if ddp and i % 3:"), "exchanged in line 16"),
        (BRANCHES.replace("if ddp and (i + 1) % k != 0:", "if ddp and (i + 1) % 2 != 0:"), "exchanged in line 16"),
        (CONTEXT.replace("contextlib.nullcontext() if update else ", ""), "exchanged in line 15"),
        (BRANCHES.replace("    else:\n        loss.backward()\n", ""), "line 15 may pass over a batch"),
    ],
    ids=["another test", "another number", "always", "one side alone"],
)
def test_a_window_stays_where_gradients_are_exchanged_on_other_terms(loop, why):
    after = rewritten(TOP.format(batches=6) + textwrap.dedent(loop))
    assert "memory.accumulate" not in after.text
    assert any(note.startswith("its accumulation window stays") and why in note for note in after.loops[0].notes)
