"""Scripts in stages, and batches of different sizes: what is measured is what was asked for."""

import itertools
import time

import pytest

from oomfix.profile.refusals import CannotSimulate

MIB = 2**20

TWO_STAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)).cuda()
loader = DataLoader(TensorDataset(torch.zeros(640, 512)), batch_size=64)
seen = []

def train(optimizer, epochs):
    for epoch in range(epochs):
        for (x,) in loader:
            seen.append(len(x))
            model(x.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

wide = torch.zeros(64 * 2**20 // 4, device="cuda")
del wide
model[0].requires_grad_(False)
first = torch.optim.Adam(model[1].parameters())
train(first, 50)
model[0].requires_grad_(True)
second = torch.optim.Adam(model.parameters())
train(second, 50)
"""

TOKENS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

lengths = [7, 3, 12, 5, 900, 8, 100, 4]
data = [torch.zeros(length, dtype=torch.long) for length in lengths]
loader = DataLoader(data, batch_size=2, num_workers=2,
                    collate_fn=lambda rows: {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True)})
model = nn.Embedding(10, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    model(batch.pop("ids").cuda()).sum().backward()
    optimizer.step()
"""


def test_a_stage_is_measured_from_when_its_optimizer_is_built(simulate):
    """Stage 1 trains one of two layers of 1 MiB; before it, 64 MiB were there for a moment."""
    whole, first, second = (simulate(TWO_STAGES, stage=stage) for stage in (0, 1, 2))
    assert whole["peak_allocated_bytes"] >= 64 * MIB > first["peak_allocated_bytes"]
    assert first["breakdown"]["optimizer state"] == pytest.approx(2 * MIB, rel=0.01)
    # both optimizers are alive: two moments of one layer, and two of both
    assert second["breakdown"]["optimizer state"] == pytest.approx(6 * MIB, rel=0.01)
    assert second["stopped"] and len(second["steps"]) == 2
    assert {moment["step"] for moment in second["timeline"]} == {1, 2}
    # the first optimizer's state was there when the course of this stage began
    assert second["timeline"][0]["breakdown"]["optimizer state"] > 1.9 * MIB


def test_the_epochs_before_a_stage_are_cut_short(simulate):
    """Fifty epochs of ten batches lie before stage 2; two steps are seen, then one batch of each epoch."""
    source = TWO_STAGES.replace("second = ", "assert len(seen) <= 52, len(seen)\nsecond = ")
    assert simulate(source, stage=2)["error"] is None


def test_a_stage_that_never_begins_is_refused(simulate):
    with pytest.raises(CannotSimulate, match=r"stage 3 never began: the script builds 2 optimizer"):
        simulate(TWO_STAGES, stage=3)


def test_a_stage_too_far_off_is_refused(simulate):
    endless = "import torch\nw = torch.ones(2, device='cuda', requires_grad=True)\n"
    endless += "o = torch.optim.SGD([w], lr=1)\nwhile True:\n    w.sum().backward()\n    o.step()\n"
    with pytest.raises(CannotSimulate, match="stage 2 did not begin within 400 optimizer steps"):
        simulate(endless, stage=2)


def test_of_batches_of_different_lengths_the_longest_is_profiled(simulate):
    """The third batch, of 2 x 900 tokens with 64 numbers each, is what has to fit, from the first step on."""
    found = simulate(TOKENS, steps=2)
    assert found["error"] is None
    assert [step["peak_allocated_bytes"] > 2 * 900 * 64 * 4 for step in found["steps"]] == [True, True]
    assert any("every one is the largest of the first 4" in sentence for sentence in found["assumptions"])
    assert (found["batch_size"], found["samples"]) == (2, 8)


def test_how_far_is_looked_ahead_does_not_depend_on_the_speed_of_the_machine(simulate, monkeypatch):
    """Each look at the clock is an hour after the one before."""
    for name in ("monotonic", "perf_counter", "process_time", "thread_time", "time"):
        monkeypatch.setattr(time, name, itertools.count(step=3600).__next__)
    assert any("largest of the first 4" in sentence for sentence in simulate(TOKENS)["assumptions"])


@pytest.mark.parametrize(("length", "seen"), [(10, 64), (2**24, 8)])
def test_a_loader_is_looked_ahead_at_as_far_as_that_costs_little(simulate, length, seen):
    """Sixty-four batches, or fewer where they are large: each number of an image is decoded and augmented."""
    lengths = f"[{length}, *[{length} - 1] * 200]"
    source = TOKENS.replace("[7, 3, 12, 5, 900, 8, 100, 4]", lengths).replace("batch_size=2", "batch_size=1")
    source = source.replace("[torch.zeros(length, dtype=torch.long) for length in lengths]", "lengths")
    source = source.replace(
        "nn.utils.rnn.pad_sequence(rows, batch_first=True)",
        'torch.zeros(5, dtype=torch.long), "image": torch.zeros(rows[0], dtype=torch.bool)',
    )
    found = simulate(source)
    assert any(f"largest of the first {seen}" in sentence for sentence in found["assumptions"])


def test_batches_of_one_length_are_taken_as_they_come(simulate):
    found = simulate(TOKENS.replace("[7, 3, 12, 5, 900, 8, 100, 4]", "[6, 6, 6, 6, 6, 6, 6, 6]"))
    assert not any("differ in size" in sentence for sentence in found["assumptions"])


def test_a_smaller_last_batch_is_not_what_is_profiled(simulate):
    found = simulate(TOKENS.replace("[7, 3, 12, 5, 900, 8, 100, 4]", "[300, 300, 300]"))
    assert [step["peak_allocated_bytes"] > 2 * 300 * 64 * 4 for step in found["steps"]] == [True, True]


def test_another_batch_size_reaches_the_loaders_that_have_the_script_s(simulate):
    found = simulate(TOKENS, batch_size=(2, 4))
    assert found["batch_size"] == 4
    assert simulate(TOKENS, batch_size=(3, 4))["batch_size"] == 2


SCATTERED = """
import os
BEFORE
import torch
from oomfix.runtime import configure_allocator
LATER
for size in (30, 31, 32, 33):
    torch.empty(size * 2**20, dtype=torch.uint8, device="cuda")
w = torch.ones(2, device="cuda", requires_grad=True)
w.sum().backward()
torch.optim.SGD([w], lr=1).step()
AT_LAST
"""
EXPANDABLE = "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments: True'"


@pytest.mark.parametrize(
    ("place", "line", "reserved_mib"),
    [
        ("NOWHERE", "", (30 + 32 + 34) + 2),
        ("BEFORE", EXPANDABLE, 40 + 2),
        ("LATER", EXPANDABLE, 40 + 2),
        ("LATER", "configure_allocator(expandable_segments=True)", 40 + 2),
        # torch has read the environment by then
        ("AT_LAST", EXPANDABLE, (30 + 32 + 34) + 2),
    ],
)
def test_expandable_segments_are_what_the_script_makes_them(simulate, place, line, reserved_mib):
    source = SCATTERED.replace(place, line)
    for other in ("BEFORE", "LATER", "AT_LAST"):
        source = source.replace(other, "")
    found = simulate(source)
    assert found["error"] is None
    assert found["peak_reserved_bytes"] == reserved_mib * MIB
