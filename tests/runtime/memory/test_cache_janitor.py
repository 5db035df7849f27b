"""The janitor: never in the hot path, only for memory that no peak needed, and less often where it was wrong."""

import pytest
import torch

from oomfix import runtime
from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.cards import find_card
from oomfix.profile.patches import Patches
from oomfix.profile.simulated_cuda import simulate_cuda

MIB = 2**20


@pytest.fixture
def allocator():
    """A model of the caching allocator, behind torch.cuda."""
    with Patches() as patches:
        found = CachingAllocator()
        simulate_cuda(patches, find_card("t4"), found)
        yield found


def peak_of(allocator, *sizes):
    """Allocate blocks of so many MiB, free them all."""
    for block in [allocator.allocate(size * MIB) for size in sizes]:
        allocator.free(block)


def left_by_an_earlier_peak(allocator, monkeypatch, peak_now):
    peak_of(allocator, 600, 400)
    # as after reset_peak_memory_stats and an epoch that needed less
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *device: peak_now * MIB)


def test_what_no_peak_needed_is_given_back(allocator, monkeypatch):
    left_by_an_earlier_peak(allocator, monkeypatch, 300)
    assert runtime.CacheJanitor(every=1).after_step() == 1000 * MIB
    assert allocator.reserved_bytes == 0


def test_what_the_peak_needs_is_kept_though_nothing_uses_it_now(allocator):
    peak_of(allocator, 600, 400)
    assert allocator.allocated_bytes == 0
    assert runtime.CacheJanitor(every=1).after_step() == 0
    assert allocator.reserved_bytes == 1000 * MIB


def test_the_share_decides(allocator, monkeypatch):
    left_by_an_earlier_peak(allocator, monkeypatch, 600)
    assert runtime.CacheJanitor(0.41, every=1).after_step() == 0
    assert runtime.CacheJanitor(0.39, every=1).after_step() == 1000 * MIB


def test_steps_between_two_looks_ask_the_allocator_nothing(allocator, monkeypatch):
    looks = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: looks.append(1) or 0)
    janitor = runtime.CacheJanitor(every=100)
    for _ in range(99):
        janitor.after_step()
    assert looks == []
    janitor.after_step()
    assert len(looks) == 1


def test_it_looks_half_as_often_where_the_memory_was_needed_again(allocator, monkeypatch):
    janitor = runtime.CacheJanitor(every=1)
    left_by_an_earlier_peak(allocator, monkeypatch, 300)
    assert janitor.after_step() > 0
    assert janitor.every == 1
    peak_of(allocator, 600, 400)
    assert janitor.after_step() > 0
    assert janitor.every == 2
    assert janitor.after_step() == 0
    # not needed at the next look: what comes later is another story
    assert janitor.after_step() == 0
    assert janitor.every == 2
    peak_of(allocator, 600, 400)
    janitor.after_step()
    assert janitor.after_step() > 0
    assert janitor.every == 2


def test_without_cuda_it_does_nothing():
    assert runtime.CacheJanitor(every=1).after_step() == 0
    assert not torch.cuda.is_initialized()


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="unused_share: got 1"):
        runtime.CacheJanitor(1)
    with pytest.raises(ValueError, match="every: got 0"):
        runtime.CacheJanitor(every=0)
