"""Fresh managers, and gradients to compare."""

import pytest
import torch

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
