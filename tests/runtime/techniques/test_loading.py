"""Loader arguments: accepted by DataLoader, and no more held than asked for."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from oomfix import runtime
from oomfix.runtime.techniques import loading


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_accepts_them(workers):
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=4, **runtime.loader_kwargs(workers, prefetch_factor=3))
    assert loader.num_workers == workers
    assert loader.prefetch_factor == (3 if workers else None)
    assert loader.persistent_workers == bool(workers)
    assert loader.pin_memory == torch.cuda.is_available()


@pytest.mark.parametrize(("processors", "workers"), [(1, 0), (4, 3), (64, 8)])
def test_by_default_a_processor_is_left_for_the_training(monkeypatch, processors, workers):
    monkeypatch.setattr(loading, "_processors", lambda: processors)
    assert runtime.loader_kwargs()["num_workers"] == workers


def test_memory_is_pinned_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.loader_kwargs(0) == {"num_workers": 0, "pin_memory": True}


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="num_workers: got -1"):
        runtime.loader_kwargs(-1)
    with pytest.raises(ValueError, match="prefetch_factor: got 0"):
        runtime.loader_kwargs(2, prefetch_factor=0)
