"""`estimate` against sums worked out by hand, to the byte, and against real tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oomfix.profile import MemoryTrace, estimate, largest_batch

WORKSPACE = 8_519_680  # of one cuBLAS handle before Hopper
N = 1024


def square(layers=1, bias=False):
    return lambda: nn.Sequential(*(nn.Linear(N, N, bias=bias) for _ in range(layers)))


def batch():
    return torch.zeros(N, N)


def total(model, inputs):
    return model(inputs).sum()


WEIGHT = N * N * 4
LOSS_AND_ITS_GRADIENT = 2 * 512


def test_sgd_in_fp32_to_the_byte():
    """At the peak the output is gone: its gradient is one number, expanded, and only the input was kept."""
    found = estimate(square(), batch, total, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, foreach=False))
    assert found.breakdown == {
        "weights": WEIGHT,
        "gradients": WEIGHT,
        "inputs": WEIGHT,
        "activations": LOSS_AND_ITS_GRADIENT,
        "workspaces": 2 * WORKSPACE,
    }
    assert found.peak_phase == "backward"
    assert found.peak_allocated_bytes == sum(found.breakdown.values())


def test_adamw_keeps_two_moments_and_its_multi_tensor_form_one_more_copy():
    found = estimate(square(layers=4), batch, total)
    parameters = 4 * WEIGHT
    assert found.peak_phase == "optimizer"
    assert found.breakdown["weights"] == found.breakdown["gradients"] == parameters
    assert found.breakdown["optimizer state"] == 2 * parameters
    assert found.breakdown["temporaries"] == parameters
    assert found.peak_allocated_bytes == sum(found.breakdown.values())


def test_one_tensor_at_a_time_adamw_needs_no_copy_of_all():
    found = estimate(square(layers=4), batch, total, optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert found.breakdown["optimizer state"] == 2 * 4 * WEIGHT
    assert found.breakdown["temporaries"] <= 2 * WEIGHT


def test_micro_batches_of_one_batch_hold_half_the_activations_and_keep_gradients():
    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def of(rows):
        return lambda: torch.zeros(rows, 64)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    whole = estimate(build, of(2**15), total, optimizer=sgd)
    split = estimate(build, of(2**14), total, optimizer=sgd, micro_batches=2)
    kept_split, kept_whole = (e.breakdown["activations"] - LOSS_AND_ITS_GRADIENT for e in (split, whole))
    assert (kept_split, kept_whole) == (7 * 2**14 * 64 * 4, 7 * 2**15 * 64 * 4)
    # the gradients of the first half live through the second; of the whole, at that moment, only the last layer's
    assert split.breakdown["gradients"] == split.breakdown["weights"] == 8 * whole.breakdown["gradients"]


def test_autocast_keeps_half_size_activations_and_full_size_weights():
    found = estimate(square(layers=6), batch, total, precision="bf16", optimizer="sgd")
    assert found.breakdown["weights"] == 6 * WEIGHT
    inputs_in_16_bits = [t for t in found.top_tensors if t.dtype == "bfloat16" and t.category == "activations"]
    assert inputs_in_16_bits and all(t.nbytes // t.count == WEIGHT // 2 for t in inputs_in_16_bits)


def test_fp16_steps_in_spite_of_the_scaler_reading_from_the_card():
    found = estimate(square(), batch, total, precision="fp16")
    assert len(found.steps) == 2
    assert found.breakdown.get("optimizer state") == 2 * WEIGHT


def test_checkpointing_trades_activations_for_temporaries():
    from torch.utils.checkpoint import checkpoint

    class Stack(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
            )
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            return x

    def of():
        return torch.zeros(2**13, 64)

    plain, checkpointed = (estimate(lambda c=c: Stack(c), of, total, precision="bf16") for c in (False, True))
    assert checkpointed.peak_allocated_bytes < 0.6 * plain.peak_allocated_bytes


def test_a_leak_shows_as_growth_of_its_size_per_step():
    kept = []

    def leaking(model, inputs):
        outputs = model(inputs)
        kept.append(outputs.detach().clone())
        return outputs.sum()

    found = estimate(square(), batch, leaking, steps=4)
    assert found.growth_bytes_per_step == WEIGHT
    kept.clear()
    assert estimate(square(), batch, total, steps=4).growth_bytes_per_step == 0


def test_fake_tensors_cost_what_real_ones_do():
    """The same training steps on real CPU tensors: the same peak and live bytes, but for the cuBLAS workspaces."""

    def build():
        return nn.Sequential(nn.Embedding(100, 48), nn.LayerNorm(48), nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 10))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)

    def tokens():
        return torch.zeros(2048, dtype=torch.int64)

    def loss(model, inputs):
        return F.cross_entropy(model(inputs), inputs)

    found = estimate(build, tokens, loss, optimizer=sgd, steps=2)
    model = build()
    optimizer = sgd(model.parameters())
    with MemoryTrace() as trace:
        trace.watch(model)
        for _ in range(2):
            optimizer.zero_grad()
            inputs = tokens()
            value = loss(model, inputs)
            value.backward()
            del inputs, value
            optimizer.step()
    assert found.peak_allocated_bytes - 2 * WORKSPACE == trace.allocator.peak_allocated_bytes
    assert [step.live_bytes - 2 * WORKSPACE for step in found.steps] == [live for _, live, _ in trace.steps]


def test_the_peak_is_what_the_allocator_of_the_card_would_reserve_at_least():
    found = estimate(square(layers=3), batch, total)
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes
    assert found.fits["80gb"].fits and found.fits["card"].fits


def test_a_model_that_cannot_fit_does_not():
    found = estimate(square(layers=64), lambda: torch.zeros(2**19, N), total, gpu="t4")
    assert not found.fits["card"].fits and not found.fits["16gb"].fits


def test_large_models_need_next_to_no_memory_of_the_host():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = estimate(
        lambda: nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(26))), lambda: torch.zeros(8, 16384), total
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert found.breakdown["weights"] > 26 * 2**30
    assert after - before < 300 * 2**10  # KiB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adagrad"}, "optimizer: got 'adagrad'"),
        ({"precision": "int8"}, "precision: got 'int8'"),
        ({"steps": 0}, "steps: got 0"),
        ({"micro_batches": 0}, "micro_batches: got 0"),
        ({"gpu": "rtx3091"}, "did you mean 'rtx3090'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        estimate(square(), batch, total, **arguments)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="one element"):
        estimate(square(), batch, lambda model, inputs: model(inputs))


def test_torch_is_as_before_afterwards():
    before = (torch.cuda.is_available(), torch.Tensor.to, nn.Module._apply, torch.autocast.__init__, torch.Generator)
    estimate(square(), batch, total, precision="bf16")
    with pytest.raises(TypeError):
        estimate(square(), batch, lambda model, inputs: None)
    after = (torch.cuda.is_available(), torch.Tensor.to, nn.Module._apply, torch.autocast.__init__, torch.Generator)
    assert before == after
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.binary_cross_entropy(torch.sigmoid(x @ x), torch.ones(4, 4)).dtype is torch.float32
    F.dropout(x, 0.5).sum().backward()
    assert x.grad is not None


def test_the_largest_batch_of_a_linear_layer_is_what_the_card_leaves_room_for():
    """A row is its input, its output and its squares, 4 KiB each, and a gradient of the output."""

    def of(rows):
        return estimate(
            square(), lambda: torch.zeros(rows, N), lambda m, x: m(x).square().sum(), optimizer="sgd", gpu="t4"
        )

    found = largest_batch(of, start=2**16)
    assert of(found).fits["card"].fits and not of(found + found // 16).fits["card"].fits
    smaller = largest_batch(of, within="8gb", start=2**16)
    assert smaller is not None and 0.35 * found < smaller < 0.55 * found
    with pytest.raises(ValueError, match="within: got '7gb', expected one of card, 8gb"):
        largest_batch(of, within="7gb")
