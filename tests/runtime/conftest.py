"""Fresh managers, and gradients to compare."""

import gc

import pytest
import torch
import torch.distributed as dist

from oomfix import runtime


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch):
    monkeypatch.delenv("OOMFIX_PRESET", raising=False)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # set first, so that what a test sets is taken back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    runtime.reset()
    torch.manual_seed(0)
    yield
    runtime.reset()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # what a test left there, and the limit that a preset set, are no matter of the next
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def relative_error():
    """The largest difference between the gradients of two models, relative to the largest gradient."""

    def measure(model, reference):
        worst = 0.0
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                worst = max(worst, float((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-30)))
        return worst

    return measure


@pytest.fixture
def group_of_one(tmp_path):
    """A process group that this process is alone in."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    # a model that is collected later ends the group itself, and waits for threads of it that wait for Python
    gc.collect()
    dist.destroy_process_group()
