"""Fresh managers, and gradients to compare."""

import gc
import sys

import pytest
import torch

from oomfix import runtime
from tests import process_groups


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch):
    monkeypatch.delenv("OOMFIX_PRESET", raising=False)
    runtime.reset()
    torch.manual_seed(0)
    yield
    runtime.reset()
    if "torch._dynamo" in sys.modules:
        # code that many tests have compiled is compiled no more, but for a reset
        torch.compiler.reset()
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
def group_of_one():
    """A process group that this process is alone in."""
    with process_groups.group_of_one():
        yield
