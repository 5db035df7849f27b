"""`memory.forward`: one call of a model under the preset's precision, for loops that cannot be split."""

import logging
import sys

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.precision import dtype_for

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Recording(nn.Module):
    """Notes the dtype it computes in; refuses half precision where `strict`."""

    def __init__(self, strict=False):
        super().__init__()
        self.inner, self.strict, self.seen = nn.Linear(6, 4), strict, []

    def forward(self, x, scale=1):
        out = self.inner(nn.functional.dropout(x)) * scale
        self.seen.append(out.dtype)
        if self.strict and out.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float\nbut found BFloat16")
        return out, {"twice": out * 2}


def test_a_model_runs_in_half_and_returns_single():
    model = Recording()
    memory = runtime.preset("16gb", precision="bf16")
    out, others = memory.forward(model, X, scale=2)
    assert model.seen == [torch.bfloat16]
    assert out.dtype == others["twice"].dtype == torch.float32
    assert not torch.is_autocast_cpu_enabled()
    memory.backward(nn.functional.binary_cross_entropy(out.sigmoid(), torch.ones(8, 4)))
    assert model.inner.weight.grad.dtype == torch.float32


def test_off_is_the_call_itself_to_the_bit(monkeypatch):
    monkeypatch.setenv("OOMFIX_PRESET", "off")
    model = Recording()
    memory = runtime.preset("16gb", precision="bf16")
    torch.manual_seed(0)
    expected = model(X)[0]
    torch.manual_seed(0)
    assert torch.equal(memory.forward(model, X)[0], expected)
    assert model.seen == [torch.float32] * 2


def test_a_model_that_fails_under_autocast_runs_in_fp32_as_if_nothing_had_happened(caplog):
    model = Recording(strict=True)
    torch.manual_seed(0)
    expected = [model(X)[0], model(X)[0]]
    model.seen.clear()
    memory = runtime.preset("16gb", precision="bf16")
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, "oomfix"):
        assert all(torch.equal(memory.forward(model, X)[0], one) for one in expected)
    assert model.seen == [torch.bfloat16, torch.float32, torch.float32]
    assert [record.getMessage() for record in caplog.records] == [
        "Recording: runs in fp32, because under autocast: expected scalar type Float"
    ]


class Policy(nn.Linear):
    def forward(self, x):
        return torch.distributions.Categorical(logits=super().forward(x))


def test_a_model_that_returns_an_object_of_its_own_runs_in_fp32():
    """Log-probabilities in half precision would make ratios of them wrong."""
    memory = runtime.preset("16gb", precision="bf16")
    model = Policy(6, 4)
    assert memory.forward(model, X).logits.dtype == torch.float32
    assert torch.equal(memory.forward(model, X).logits, model(X).logits)


def test_an_error_that_fp32_does_not_mend_is_the_callers():
    memory = runtime.preset("16gb", precision="bf16")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memory.forward(nn.Linear(3, 2), X)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(("policy", "named"), [("if-needed", True), ("on", False)])
def test_out_of_memory_stays_torchs_own_error_and_says_what_helps(policy, named):
    def model(x):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    memory = runtime.preset("16gb", checkpointing=policy)
    with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as failure:
        memory.forward(model, X)
    (note,) = failure.value.__notes__
    assert "memory.forward_backward" in note
    assert ("checkpointing='on'" in note) == named
    with pytest.raises(TypeError) as other:
        memory.forward(lambda: None, X)
    assert not hasattr(other.value, "__notes__")


@pytest.mark.parametrize(("device_type", "expected"), [("cuda", None), ("cpu", None), ("xpu", torch.bfloat16)])
def test_no_fp16_is_bf16_where_the_device_has_it_and_fp32_where_not(device_type, expected):
    assert dtype_for("no-fp16", device_type) == expected
    assert not runtime.preset("16gb", precision="no-fp16").scaler.is_enabled()
