"""The allocator's settings: merged with the environment's, in time or told to the running allocator."""

import os
import sys

import pytest
import torch

from oomfix import runtime


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    return monkeypatch


@pytest.fixture
def running(monkeypatch):
    """A CUDA that runs already; what it is told."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    return told


def test_before_cuda_starts_the_environment_is_set():
    assert runtime.configure_allocator() == "expandable_segments:True"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert not torch.cuda.is_initialized()


def test_other_settings_of_the_environment_are_kept(environment):
    before = "roundup_power2_divisions:[256:1,512:2], max_split_size_mb:128,pinned_use_background_threads:True"
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", before)
    assert runtime.configure_allocator(max_split_size_mb=256, garbage_collection_threshold=0.8) == (
        "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:256,pinned_use_background_threads:True,"
        "expandable_segments:True,garbage_collection_threshold:0.8"
    )
    assert runtime.configure_allocator(expandable_segments=False).startswith("roundup_power2_divisions:[256:1,512:2]")
    assert "expandable_segments:False" in os.environ["PYTORCH_CUDA_ALLOC_CONF"]


def test_the_newer_name_is_kept_in_step_where_it_is_used(environment):
    environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    text = runtime.configure_allocator()
    assert text == "max_split_size_mb:64,expandable_segments:True"
    assert os.environ["PYTORCH_ALLOC_CONF"] == os.environ["PYTORCH_CUDA_ALLOC_CONF"] == text


def test_a_running_allocator_is_told(running):
    runtime.configure_allocator(max_split_size_mb=128)
    assert running == ["expandable_segments:True,max_split_size_mb:128"]


def test_expandable_segments_are_for_linux(environment):
    environment.setattr(sys, "platform", "win32")
    assert runtime.configure_allocator(max_split_size_mb=128) == "max_split_size_mb:128"


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="max_split_size_mb: got 20"):
        runtime.configure_allocator(max_split_size_mb=20)
    with pytest.raises(ValueError, match=r"garbage_collection_threshold: got 1\.0"):
        runtime.configure_allocator(garbage_collection_threshold=1.0)


def test_the_fraction_waits_until_cuda_starts(monkeypatch):
    waiting, limits = [], []
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call, **_: waiting.append(call))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    runtime.memory_fraction(0.5, 1)
    assert limits == []
    waiting[0]()
    assert limits == [(0.5, 1)]


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_a_share_is_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match="share: got"):
        runtime.memory_fraction(share)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_fraction_refuses_what_is_over_it():
    total = torch.cuda.get_device_properties(0).total_memory
    runtime.memory_fraction(0.25)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(total // 2, dtype=torch.uint8, device="cuda")
        assert torch.empty(total // 8, dtype=torch.uint8, device="cuda").numel() == total // 8
    finally:
        runtime.memory_fraction(1.0)
        torch.cuda.empty_cache()
