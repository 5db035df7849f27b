"""The monitor's numbers are those of the simulated card, to the byte, and go where logs go."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.cards import find_card
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.profile.simulated_gpu import SimulatedGPU

GIB = 2**30


def iteration(model, optimizer, device="cpu"):
    model(torch.ones(64, 32, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_on_a_simulated_card_the_numbers_are_those_it_counts():
    with SimulatedCard() as card:
        monitor = runtime.MemoryMonitor(counter=card)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        weights = 4 * (32 * 64 + 64 + 64 * 8 + 8)
        assert monitor.read().allocated_bytes == card.current_bytes == weights
        iteration(model, optimizer)
        reading = monitor.log(0)
        # weights, two moments, and the counts of steps
        assert reading.allocated_bytes == card.current_bytes == 3 * weights + 4 * 4
        assert reading.peak_bytes > reading.allocated_bytes
        # the peak of an epoch is its own
        assert monitor.read().peak_bytes == card.peak_bytes == reading.allocated_bytes
        iteration(model, optimizer)
        assert monitor.log(1).peak_bytes > reading.allocated_bytes


def test_on_a_simulated_gpu_the_numbers_are_the_allocators():
    gpu = SimulatedGPU(find_card("t4"))
    with gpu.running() as trace:
        monitor = runtime.MemoryMonitor()
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        iteration(nn.Sequential(nn.Linear(32, 512).cuda(), model), optimizer, "cuda")
        allocator = trace.allocator
        reading = monitor.read()
        assert reading.allocated_bytes == allocator.allocated_bytes >= 3 * 4 * 512 * 512
        assert reading.peak_bytes == allocator.peak_allocated_bytes > reading.allocated_bytes
        assert reading.reserved_bytes == allocator.reserved_bytes >= reading.peak_bytes


def test_the_line_of_the_log(caplog):
    caplog.set_level(logging.INFO, "oomfix")
    counter = SimpleNamespace(current_bytes=int(3.5 * GIB), peak_bytes=int(4.2 * GIB), reset_peak=lambda: None)
    runtime.MemoryMonitor(counter=counter).log(7)
    assert caplog.messages == ["7: GPU memory: 3.50 GiB allocated, 4.20 GiB peak"]
    assert str(runtime.MemoryReading(GIB, GIB, 2 * GIB)).endswith("1.00 GiB peak, 2.00 GiB reserved")


def test_tensorboard_gets_the_numbers():
    written = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    counter = SimpleNamespace(current_bytes=GIB, peak_bytes=2 * GIB, reset_peak=lambda: None)
    runtime.MemoryMonitor(writer, counter=counter).log(3)
    assert written == [("memory/allocated", 1.0, 3), ("memory/peak", 2.0, 3)]


def test_a_wandb_run_that_is_under_way_gets_the_numbers(monkeypatch):
    written = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(log=written.append)))
    counter = SimpleNamespace(current_bytes=GIB, peak_bytes=2 * GIB, reset_peak=lambda: None)
    monitor = runtime.MemoryMonitor(counter=counter)
    monitor.log(3)
    assert written == [{"memory/allocated": 1.0, "memory/peak": 2.0}]
    monkeypatch.setattr(sys.modules["wandb"], "run", None)
    monitor.log(4)
    assert len(written) == 1


def test_without_a_card_nothing_is_logged(caplog):
    caplog.set_level(logging.INFO, "oomfix")
    assert runtime.MemoryMonitor().log(1) == runtime.MemoryReading(0, 0)
    assert caplog.messages == [] and not torch.cuda.is_initialized()


def test_a_writer_that_cannot_write_is_refused():
    with pytest.raises(TypeError, match="writer: got list"):
        runtime.MemoryMonitor([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_the_numbers_are_torchs():
    monitor = runtime.MemoryMonitor()
    held = torch.empty(2**20, device="cuda")
    torch.empty(2**22, device="cuda")
    reading = monitor.log()
    assert reading.allocated_bytes == torch.cuda.memory_allocated() >= held.nbytes
    assert reading.peak_bytes >= reading.allocated_bytes + 4 * 2**22
    assert monitor.read().peak_bytes == torch.cuda.memory_allocated()
