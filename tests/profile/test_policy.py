"""The simulated card decides as CUDA does: kernels, number formats, what is on the card and what is not."""

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F

from oomfix.profile.cards import find_card
from oomfix.profile.simulated_gpu import SimulatedGPU

UPSAMPLED = torch.float16 if torch.__version__ < "2.4" else torch.float32


@pytest.fixture
def simulated(request):
    gpu = SimulatedGPU(find_card(getattr(request, "param", "a100")))
    with gpu.running():
        yield gpu


def on(*shape, dtype=torch.float32, **kwargs):
    return torch.zeros(*shape, dtype=dtype, device="cuda", **kwargs)


def operations(gpu):
    return [storage.operation for storage in gpu.trace.storages]


@pytest.mark.parametrize(
    ("gpu", "dtype", "head_size", "masked", "kernel"),
    [
        ("a100", torch.bfloat16, 64, False, "flash"),
        ("a100", torch.float16, 256, False, "flash"),
        ("a100", torch.bfloat16, 264, False, "efficient"),
        ("a100", torch.bfloat16, 64, True, "efficient"),
        ("a100", torch.float32, 64, False, "efficient"),
        ("a100", torch.float32, 63, False, "math"),
        ("t4", torch.float16, 64, False, "efficient"),
        ("t4", torch.bfloat16, 64, False, "math"),
        ("v100", torch.bfloat16, 64, False, "math"),
        ("h100", torch.bfloat16, 128, False, "flash"),
    ],
)
def test_attention_takes_the_kernel_of_the_card(gpu, dtype, head_size, masked, kernel):
    """Only the math kernel allocates a matrix of [tokens, tokens] per head."""
    simulated = SimulatedGPU(find_card(gpu))
    with simulated.running():
        query = on(2, 4, 128, head_size, dtype=dtype, requires_grad=True)
        mask = on(2, 1, 128, 128, dtype=dtype) if masked else None
        F.scaled_dot_product_attention(query, query, query, mask)
    names = " ".join(operations(simulated))
    assert ("flash_attention" in names, "efficient_attention" in names) == (kernel == "flash", kernel == "efficient")
    scores = [
        s
        for s in simulated.trace.storages
        if (s.shape[-2:] == (128, 128) and s.phase != "setup") or s.shape == (8, 128, 128)
    ]
    assert bool(scores) == (kernel == "math")


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x: x @ x, torch.float16),
        (lambda x: F.linear(x, x), torch.float16),
        (lambda x: F.softmax(x @ x, -1), torch.float32),
        (lambda x: F.layer_norm(x @ x, (8,)), torch.float32),
        (lambda x: F.cross_entropy(x @ x, torch.zeros(8, dtype=torch.long, device="cuda")), torch.float32),
        (lambda x: F.mse_loss(x @ x, x @ x), torch.float32),
        (lambda x: (x @ x).sum(), torch.float32),
        (lambda x: (x @ x).pow(2), torch.float32),
        (lambda x: F.gelu(x @ x), torch.float16),
        (lambda x: F.relu(x @ x) + (x @ x), torch.float16),
        (lambda x: F.batch_norm(x @ x, None, None, training=True), torch.float16),
        (lambda x: F.avg_pool3d((x @ x).view(1, 1, 2, 4, 8), 2), torch.float16),
        (lambda x: torch.cat([x @ x, x]), torch.float32),
        (lambda x: F.interpolate((x @ x)[None, None], scale_factor=2), UPSAMPLED),
    ],
)
def test_autocast_follows_cuda_s_lists(simulated, run, dtype):
    x = on(8, 8, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() is torch.float16
        if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
            assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.float16
        assert run(x).dtype is dtype
    assert not torch.is_autocast_enabled()


def test_fp16_log_softmax_makes_no_fp32_copy_of_its_input(simulated):
    logits = on(64, 1000, dtype=torch.float16)
    with torch.autocast("cuda", dtype=torch.float16):
        F.log_softmax(logits, -1)
    made = [s.requested_bytes for s in simulated.trace.storages if s.shape == (64, 1000)]
    assert made == [64 * 1000 * 2, 64 * 1000 * 4]


def test_bce_loss_is_refused_under_autocast_as_on_cuda(simulated):
    x = on(8, requires_grad=True)
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="refused under CUDA autocast"):
        nn.BCELoss()(x.sigmoid(), x)
    nn.BCELoss()(x.sigmoid(), x).backward()


def test_dropout_keeps_one_byte_per_element(simulated):
    x = on(1024, requires_grad=True)
    dropped = F.dropout(x, 0.1)
    sizes = sorted(s.requested_bytes for s in simulated.trace.storages)
    assert sizes == [1024, 4096, 4096] and dropped.requires_grad


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_run_in_one_call_with_a_reserve(simulated, kind, gates):
    model = kind(32, 64, num_layers=2, batch_first=True).cuda()
    out, _ = model(on(4, 50, 32))
    assert out.shape == (4, 50, 64)
    out.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    reserve = [s.requested_bytes for s in simulated.trace.storages if s.dtype is torch.uint8]
    assert reserve == [4 * 50 * 2 * 64 * (gates + 2) * 4]
    assert len(simulated.trace.storages) < 60
    assert simulated.workspaces.margin().fraction >= 0.10


def test_packed_sequences_run(simulated):
    model = nn.LSTM(8, 16, bidirectional=True).cuda()
    inputs = on(7, 3, 8, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([7, 5, 2]))
    out, _ = model(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(out)
    assert padded.shape == (7, 3, 32)
    padded.sum().backward()
    assert model.weight_ih_l0.grad.shape == (64, 8)


def test_tensors_are_where_the_script_puts_them(simulated):
    real = torch.ones(3)
    moved = real.cuda()
    assert (real.device.type, moved.device, moved.is_cuda, moved.get_device()) == (
        "cpu",
        torch.device("cuda", 0),
        True,
        0,
    )
    assert moved.to("cuda") is moved and moved.cuda() is moved
    back = moved.cpu()
    assert (back.device.type, back.tolist()) == ("cpu", [1.0, 1.0, 1.0])
    assert moved.to(real).device.type == "cpu" and real.to(moved).is_cuda
    assert moved.half().dtype is torch.float16 and moved.half().is_cuda
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        moved.numpy()
    assert moved.cpu().numpy().shape == (3,)


def test_only_tensors_of_the_card_count(simulated):
    torch.zeros(1000)
    assert not simulated.trace.storages
    on(1000)
    assert [s.requested_bytes for s in simulated.trace.storages] == [4000]


def test_the_graph_goes_through_the_host(simulated):
    x = on(3, requires_grad=True)
    (x * 2).cpu().sum().backward()
    assert x.grad.shape == (3,) and x.grad.is_cuda


def test_moving_a_model_keeps_tied_weights_tied(simulated):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    model.cuda()
    assert model[1].weight is model[0].weight and len(list(model.parameters())) == 1
    assert model.half()[0].weight.dtype is torch.float16


def test_values_read_from_the_card_are_noted_with_their_line(simulated):
    x = on(4)
    assert x.sum().item() == 1.0
    assert not (x > 0).any()
    assert (x > 0).all()
    assert f"{x.sum():.2f}" == "1.00"
    lines = {line[0] for _, line in simulated.trace.assumed}
    assert lines == {__file__}


def test_boolean_masks_select_at_most_everything(simulated):
    x = on(4, 5)
    assert x[x > 0].shape == (20,)
    assert torch.nonzero(x).shape == (20, 2)
    assert torch.masked_select(x, x > 0).shape == torch.unique(x).shape == (20,)
    x[x > 0] = 1.0


@pytest.mark.parametrize("simulated", ["t4"], indirect=True)
def test_torch_cuda_answers_for_the_card(simulated):
    kept = on(2**20)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name() == "T4" and torch.cuda.get_device_capability() == (7, 5)
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    assert torch.cuda.memory_allocated() == kept.nbytes == torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_reserved() == 20 * 2**20
    free, total = torch.cuda.mem_get_info()
    assert total == int(14.74 * 2**30) and free == total - (600 + 20) * 2**20


def test_a_copy_of_a_model_is_a_copy_on_the_card(simulated):
    import copy

    model = nn.Linear(100, 100).cuda()
    before = torch.cuda.memory_allocated()
    twin = copy.deepcopy(model)
    assert twin.weight.is_cuda and twin.weight is not model.weight
    assert torch.cuda.memory_allocated() == 2 * before


def test_work_on_the_host_needs_no_library_of_the_card(simulated):
    torch.ones(8, 8) @ torch.ones(8, 8)
    assert not simulated.trace.storages
    on(8, 8) @ on(8, 8)
    assert [s.nbytes for s in simulated.trace.storages if s.category == "workspaces"] == [8_519_680]


def test_a_number_read_within_another_dispatch_mode_is_answered_too(simulated):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sum.default:
                read.append(float(result))
            return result

    read = []
    with Reading():
        on(3).sum()
    assert read == [1.0]


def test_a_card_may_be_given_by_its_number(simulated):
    model = nn.Linear(4, 4).to(0)
    assert model.weight.is_cuda and torch.ones(2).to(0).is_cuda and torch.ones(2).to(device=0).is_cuda
    assert torch.tensor([1.0], device=0).is_cuda
    assert model.to(0, torch.float64).weight.dtype is torch.float64
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.ones(2).to(1)


def block_outputs(context):
    """Activations of a stack at the end of its forward, in MiB; 8 blocks save their inputs of 1 MiB each."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))).cuda()
    inputs = on(1024, 256)
    before = torch.cuda.memory_allocated()
    with context:
        loss = model(inputs).sum()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    assert model[0][0].weight.grad is not None and model[0][0].weight.grad.is_cuda
    return round(held / 2**20)


def test_activations_in_host_memory_are_off_the_card(simulated):
    """Of eight saved outputs, the runtime's offloading leaves those that are still on their way."""
    from contextlib import nullcontext

    from oomfix.runtime import offload_activations

    workspace = 8
    assert block_outputs(nullcontext()) == workspace + 8
    assert block_outputs(torch.autograd.graph.save_on_cpu(pin_memory=True)) <= 1
    assert block_outputs(offload_activations(min_bytes=0)) <= 3


def test_what_is_made_on_the_host_of_a_tensor_on_the_card_is_real(simulated):
    x = on(1024, 1024)
    before = torch.cuda.memory_allocated()
    for host in (torch.empty_like(x, device="cpu", pin_memory=True), x.new_zeros(5, device="cpu"), x.to("cpu")):
        assert host.device.type == "cpu" and not host.is_cuda
    host.copy_(x)
    assert torch.cuda.memory_allocated() == before
    assert torch.empty(3, pin_memory=True).device.type == "cpu"


def test_conversions_that_autograd_makes_stay_on_the_card(simulated):
    """The gradient of a cast is a cast back, which torch makes below Python with the device that it knows."""
    weight = on(1024, 1024, requires_grad=True)
    (weight.to(torch.bfloat16) * 2).float().sum().backward()
    simulated.trace.claim((weight.grad,), "gradients")
    assert weight.grad.is_cuda
    assert [s.nbytes for s in simulated.trace.storages if s.category == "gradients"] == [4 * 2**20]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "fused") for kind in ("Adam", "AdamW", "SGD")),
        *((kind, "foreach") for kind in ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax")),
    ],
)
def test_the_step_of_an_optimizer_makes_no_tensor_on_the_host(simulated, monkeypatch, kind, form):
    """torch runs what it has no shapes for on zeros of the same size, as large as all parameters."""
    weight = nn.Parameter(on(8, 8))
    weight.grad = on(8, 8)
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **{form: True})
    with monkeypatch.context() as patch:
        patch.setattr(fake_tensor, "run_fallback_kernel", lambda *args: pytest.fail(f"{args[1]} ran on the host"))
        for _ in range(2):
            optimizer.step()
