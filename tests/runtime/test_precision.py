"""Mixed precision around model calls and nothing else; fp16 gradients scaled, unscaled, clipped in order."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomfix import runtime
from oomfix.runtime.compat import active_autocast_dtype
from oomfix.runtime.precision import ModelCalls, dtype_for
from tests.torch_versions import needs_torch

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


class Recording(nn.Module):
    """Notes the dtype it computes in."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(6, 4), []

    def forward(self, x):
        out = self.inner(x)
        self.seen.append(out.dtype)
        return {"out": out, "pair": (out * 2, [out + 1])}


def test_model_calls_run_in_half_and_return_single():
    model, inside = Recording(), []

    def forward(x, y):
        out = model(x)
        assert out["out"].dtype == out["pair"][0].dtype == out["pair"][1][0].dtype == torch.float32
        np.asarray(out["out"].detach().numpy())
        inside.append(torch.is_autocast_cpu_enabled())
        return F.cross_entropy(out["out"], y)

    memory = runtime.preset("16gb", precision="bf16")
    for _ in range(3):
        memory.forward_backward(forward, X, Y)
    assert model.seen == [torch.bfloat16] * 3
    assert inside == [False] * 3
    assert not torch.is_autocast_cpu_enabled()
    assert model.inner.weight.grad.dtype == torch.float32


def test_parts_of_a_model_that_are_called_by_themselves_are_model_calls_too():
    model = nn.ModuleDict({"encoder": nn.Linear(6, 6), "head": nn.Linear(6, 4)})
    seen = []
    model["encoder"].register_forward_hook(lambda m, i, o: seen.append(o.dtype))

    def forward(x, y):
        return F.cross_entropy(model["head"](model["encoder"](x)), y)

    memory = runtime.preset("16gb", precision="bf16")
    for _ in range(3):
        memory.forward_backward(forward, X, Y)
    assert seen == [torch.bfloat16] * 3


class Tasks(nn.Module):
    """A trunk with a head for each task, which the forward calls itself."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({name: Recording() for name in "abc"})


@pytest.mark.parametrize("order", ["abababab", "aabbaabb", "aaaaabab", "ababacab", "aabacbcb"])
def test_heads_that_take_turns_all_run_in_half(order):
    model = Tasks()
    memory = runtime.preset("16gb", precision="bf16")

    turn = iter(order)

    def forward(x):
        return model.heads[next(turn)](model.trunk(x))["out"].pow(2).mean()

    for _ in order:
        memory.forward_backward(forward, X)
    assert {dtype for head in model.heads.values() for dtype in head.seen} <= {torch.bfloat16}


def test_layers_inside_of_a_model_that_is_called_are_not_watched_once_that_is_known():
    model, hooks = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 3)), []
    memory = runtime.preset("16gb", precision="bf16")

    def forward(x):
        hooks.append([len(module._forward_hooks) for module in model.modules()])
        return model(x).pow(2).mean()

    for _ in range(3):
        memory.forward_backward(forward, X)
    assert hooks[-1] == [1, 0, 0, 0, 0]


def test_a_model_shows_no_sign_of_it_afterwards():
    model = network()
    memory = runtime.preset("16gb", precision="bf16")
    memory.prepare(model)
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    ema = copy.deepcopy(model)
    assert ema(X).dtype == torch.float32
    pickle.loads(pickle.dumps(model))
    nn.init.zeros_(ema[2].weight)
    assert not torch.equal(ema(X), model(X))


@needs_torch("2.6", "fake tensors on a card without its driver")
def test_bce_loss_does_not_raise_under_the_autocast_of_cuda(monkeypatch):
    """On fake CUDA tensors: the CPU's autocast would accept it."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)  # needs a generator of the GPU
    criterion = nn.BCELoss()
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(6, 1, device="cuda"), nn.Sigmoid())
        model.requires_grad_(False)  # autograd would ask the driver for the device
        x, y = torch.empty(8, 6, device="cuda"), torch.empty(8, 1, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                criterion(out, y)
        calls = ModelCalls([model, criterion], "cuda", torch.float16)
        with calls.active():
            out = model(x)
            assert not torch.is_autocast_enabled()
            assert out.dtype == torch.float32
            assert criterion(out, y).dtype == torch.float32


def test_a_forward_that_fails_under_autocast_runs_in_fp32_and_that_is_said_once(caplog):
    class Strict(nn.Linear):
        def forward(self, x):
            if torch.is_autocast_cpu_enabled():
                torch.rand(1)
                raise RuntimeError("no kernel for Half")
            return super().forward(x)

    model, dropout = Strict(6, 4), nn.Dropout(0.5)
    memory = runtime.preset("16gb", precision="bf16")
    torch.manual_seed(5)
    loss = memory.forward_backward(lambda x, y: F.cross_entropy(dropout(model(x)), y), X, Y)
    torch.manual_seed(5)
    assert torch.equal(loss, F.cross_entropy(dropout(model(X)), Y))
    memory.forward_backward(lambda x, y: F.cross_entropy(dropout(model(x)), y), X, Y)
    assert caplog.text.count("no kernel for Half") == 1


def test_an_error_that_is_not_about_precision_stays_what_it_was(caplog):
    memory = runtime.preset("16gb", precision="bf16")
    model = network()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x[:, :5]), y), X, Y)
    assert "fp32" not in caplog.text


def test_after_an_error_that_is_not_about_precision_a_forward_still_runs_in_half():
    model, columns = Recording(), {"read": 5}
    memory = runtime.preset("16gb", precision="bf16")

    def forward(x):
        return model(x[:, : columns["read"]])["out"].pow(2).mean()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memory.forward_backward(forward, X)
    columns["read"] = 6
    memory.forward_backward(forward, X)
    assert set(model.seen) == {torch.bfloat16}


def penalised(model, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)["out"].sum(), [x], create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


@pytest.mark.parametrize(("rows", "split"), [(8, "verified"), (1, "verified"), (8, "never")])
def test_gradient_penalties_never_run_in_fp16(caplog, rows, split):
    model = Recording()
    memory = runtime.preset("16gb", precision="fp16", split=split)
    memory.forward_backward(lambda x: penalised(model, x), X[:rows])
    assert set(model.seen) == {torch.float32}
    assert "differentiates by itself" in caplog.text


def test_a_hook_on_an_activation_is_no_gradient_penalty():
    net, dtypes = nn.Linear(6, 4), []

    def forward(x):
        output = net(x)
        output.register_hook(lambda gradient: gradient * 0.5)  # fails without a graph, as penalties do
        return output.pow(2).mean()

    net.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    runtime.preset("16gb", precision="fp16").forward_backward(forward, torch.randn(8, 6))
    assert dtypes[-1] == torch.float16


def test_a_penalty_that_turns_gradients_on_for_itself_never_runs_in_fp16():
    net, dtypes = nn.Linear(6, 1), []

    def forward(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return net(x).mean() + slope.pow(2).mean()

    net.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    runtime.preset("16gb", precision="fp16").forward_backward(forward, torch.randn(8, 6))
    assert dtypes[-1] == torch.float32


def test_a_gradient_penalty_that_begins_later_leaves_fp16_at_the_next_look():
    model, calls = Recording(), [0]

    def forward(x):
        return penalised(model, x) if calls[0] > 5 else model(x)["out"].pow(2).mean()

    memory = runtime.preset("16gb", precision="fp16")
    for calls[0] in range(1, 9):
        model.seen.clear()
        memory.forward_backward(forward, X)
    assert model.seen[-1] == torch.float32


def test_what_a_device_gets():
    assert dtype_for("auto", "cpu") is None
    assert dtype_for("bf16", "cpu") == torch.bfloat16
    assert dtype_for("fp32", "cuda") is None


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), torch.bfloat16), ((7, 5), torch.float16)])
def test_a_card_without_bf16_gets_fp16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    assert dtype_for("auto", "cuda") == dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp16_training_on_a_gpu_follows_fp32():
    losses = {}
    for precision in ("fp32", "fp16", "bf16"):
        torch.manual_seed(0)
        runtime.reset()
        memory = runtime.preset("auto", precision=precision)
        model = network().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        x, y = X.cuda(), Y.cuda()
        for _ in range(50):
            loss = memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)  # noqa: B023
            memory.step(optimizer)
        losses[precision] = float(loss)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.1)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)


def test_a_call_inside_of_an_autocast_is_checked_in_fp32_and_split(relative_error):
    """Autocast keeps casts of weights as long as it is on; those of a check, or of a part, are no graph of the next."""
    model, seen = network(), []
    reference = copy.deepcopy(model)

    def forward(x, y):
        seen.append((len(x), torch.is_grad_enabled(), active_autocast_dtype("cpu")))
        return F.cross_entropy(model(x).float(), y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        runtime.preset("16gb", micro_batches=4).forward_backward(forward, X, Y)
        loss = F.cross_entropy(reference(X).float(), Y)
    loss.backward()
    assert [rows for rows, _, _ in seen[-4:]] == [2] * 4
    assert {dtype for _, graph, dtype in seen if not graph} == {None}
    assert {dtype for _, _, dtype in seen[-4:]} == {torch.bfloat16}
    assert relative_error(model, reference) < 2e-2  # of bf16


def under_its_own_autocast(model, coupled=False, dtype=torch.bfloat16):
    """As loops are written by hand: the model, or the loss too, in a block of autocast."""

    def forward(x, y):
        with torch.autocast("cpu", dtype=dtype):
            out = model(x.to(next(model.parameters()).dtype))
            if coupled:
                out = out / out.std(0)
            return F.cross_entropy(out, y)

    return forward


def test_a_forward_with_an_autocast_of_its_own_is_checked_in_fp32_and_split(relative_error):
    """Rounding to half precision looks like samples that depend on each other."""
    model = network()
    reference = copy.deepcopy(model)
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(under_its_own_autocast(model), X, Y)
    under_its_own_autocast(reference)(X, Y).backward()
    assert memory.report().forwards[0].micro_batches == 4
    assert 1e-4 < relative_error(model, reference) < 2e-2  # of bf16, which the micro-batches compute in


def test_samples_that_depend_on_each_other_under_an_autocast_of_their_own_stay_together():
    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(under_its_own_autocast(network(), coupled=True), X, Y)
    assert "samples depend on each other" in memory.report().forwards[0].whole_because


class Mixed(nn.Module):
    """Weights of two types, which only autocast brings together."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_a_forward_that_cannot_do_without_its_autocast_is_checked_with_it():
    seen = []
    model = Mixed()

    def forward(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        seen.append(len(x))
        return F.cross_entropy(out.float(), y)

    memory = runtime.preset("16gb", micro_batches=4)
    memory.forward_backward(forward, torch.randn(8, 6), torch.arange(8) % 4)
    # runs on a few rows that went through to their end
    assert min(seen) < 8
    assert "mat1 and mat2" not in str(memory.report())
