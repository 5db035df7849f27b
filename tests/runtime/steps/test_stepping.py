"""The optimizer's side: order of unscaling and clipping, shared scales, skipped steps, schedulers, windows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.calls.accumulation import Window, windows
from oomfix.runtime.compat import OutOfMemoryError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))


def train_by_hand(model, optimizer, steps=3, clip=None):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["off", "16gb"])
def test_on_the_cpu_a_whole_batch_is_bitwise_the_plain_loop(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    torch.manual_seed(3)
    train_by_hand(reference, torch.optim.AdamW(reference.parameters(), lr=0.1))
    torch.manual_seed(3)
    memory, optimizer = runtime.preset(name), torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
        memory.step(optimizer)
    assert equal(model, reference)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_off_keeps_the_precision_of_the_script(monkeypatch):
    monkeypatch.setenv("OOMFIX_PRESET", "off")
    model = nn.Linear(6, 4)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reference(X)
        expected = F.cross_entropy(out, Y)
    expected.backward()
    memory = runtime.preset("16gb", micro_batches=4, precision="fp16")

    def forward(x, y):
        with memory.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            return F.cross_entropy(out, y), out

    loss, got = memory.forward_backward(forward, X, Y)
    assert got.dtype == torch.bfloat16
    assert torch.equal(loss, expected)
    assert torch.equal(model.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
def test_off_lets_an_error_of_memory_through_as_torch_raised_it(call, monkeypatch):
    monkeypatch.setenv("OOMFIX_PRESET", "off")
    model, sizes = nn.Linear(6, 4), []

    def forward(x, y):
        sizes.append(len(x))
        raise OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory\.$") as raised:
        getattr(runtime.preset("16gb"), call)(forward, model(X), Y)
    assert raised.type is OutOfMemoryError
    assert sizes == [len(X)]


def test_autocast_by_hand_follows_the_preset_but_not_against_the_script():
    memory = runtime.preset("16gb", precision="bf16")
    with memory.autocast("cpu", dtype=torch.float16):
        assert torch.get_autocast_cpu_dtype() == torch.bfloat16 and torch.is_autocast_cpu_enabled()
        with memory.autocast("cpu", enabled=False):
            assert not torch.is_autocast_cpu_enabled()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_a_script_wants_fp32_an_autocast_of_its_own_is_off(precision):
    memory = runtime.preset("16gb", precision=precision)
    with torch.autocast("cpu", dtype=torch.bfloat16), memory.autocast("cpu", enabled=False):
        assert not torch.is_autocast_cpu_enabled()


def test_fp16_gradients_are_unscaled_before_they_are_clipped():
    model = nn.Linear(6, 4)
    memory, optimizer = runtime.preset("16gb", precision="fp16"), torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone(), model.bias.detach().clone()
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    memory.step(optimizer, clip_norm=0.05)
    moved = torch.cat([(a.detach() - b).flatten() for a, b in zip((model.weight, model.bias), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("user_clips", [True, False])
def test_the_norm_of_a_preset_counts_only_where_the_user_does_not_clip(user_clips):
    model = nn.Linear(6, 4)
    memory, optimizer = runtime.preset("16gb", clip_norm=0.01), torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    memory.forward_backward(lambda x, y: 100 * F.cross_entropy(model(x), y), X, Y)
    if user_clips:
        memory.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
    memory.step(optimizer)
    after = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    assert float((after - before).norm()) == pytest.approx(0.7 if user_clips else 0.01, rel=1e-3)


def test_the_norm_of_a_preset_counts_again_in_the_step_after_one_that_the_user_clipped():
    model = nn.Linear(6, 4)
    memory, optimizer = runtime.preset("16gb", clip_norm=0.01), torch.optim.SGD(model.parameters(), lr=1.0)
    for norm in (0.7, 0.01):
        before = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
        memory.forward_backward(lambda x, y: 100 * F.cross_entropy(model(x), y), X, Y)
        if norm == 0.7:
            memory.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        memory.step(optimizer)
        after = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
        assert float((after - before).norm()) == pytest.approx(norm, rel=1e-3)


def test_two_optimizers_of_one_iteration_share_a_scale():
    """An overflow in the first must not change the scale before the second has been unscaled."""
    a, b = nn.Linear(6, 6), nn.Linear(6, 4)
    memory = runtime.preset("16gb", precision="fp16")
    first, second = torch.optim.SGD(a.parameters(), lr=1.0), torch.optim.SGD(b.parameters(), lr=1.0)
    memory.forward_backward(lambda x, y: F.cross_entropy(b(a(x)), y), X, Y)
    scale = memory.scaler.get_scale()
    expected = b.weight.grad / scale
    a.weight.grad[0, 0] = float("inf")
    before = b.weight.detach().clone()
    memory.step(first)
    memory.step(second)
    assert memory.scaler.get_scale() == scale
    assert torch.allclose(before - b.weight, expected, atol=1e-6)
    memory.forward_backward(lambda x, y: F.cross_entropy(b(a(x)), y), X, Y)
    assert memory.scaler.get_scale() == scale / 2


class Overflowing(nn.Linear):
    """A layer whose gradient overflows when asked to."""

    overflow = False

    def forward(self, x):
        out = super().forward(x)
        if self.overflow:
            out.register_hook(lambda gradient: gradient * float("inf"))
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_counted_and_its_scheduler_waits(fused):
    if fused and "cpu" not in torch.utils._foreach_utils._get_fused_kernels_supported_devices():
        pytest.skip("this torch has no fused step on the CPU")
    model = Overflowing(6, 4)
    memory = runtime.preset("16gb", precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for overflow in (False, True, False, False):
        model.overflow = overflow
        before = model.weight.detach().clone()
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
        memory.step(optimizer, scheduler)
        assert torch.equal(before, model.weight) == overflow
        rates.append(optimizer.param_groups[0]["lr"])
    assert memory.skipped_steps == 1
    assert rates == [0.05, 0.05, 0.025, 0.0125]


def test_an_optimizer_without_gradients_is_stepped_in_peace():
    a, b = nn.Linear(6, 4), nn.Linear(6, 4)
    memory = runtime.preset("16gb", precision="fp16")
    memory.forward_backward(lambda x, y: F.cross_entropy(a(x), y), X, Y)
    memory.step(torch.optim.SGD(b.parameters(), lr=0.1), clip_norm=1.0)
    memory.step(torch.optim.SGD(a.parameters(), lr=0.1))


class Lookahead:
    """A wrapper optimizer that is no torch optimizer."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_wrapper_optimizers_are_stepped_through(precision):
    model = Overflowing(6, 4)
    memory, optimizer = runtime.preset("16gb", precision=precision), None
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    for overflow in (False, precision == "fp16", False):
        model.overflow = overflow
        memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
        memory.step(optimizer, clip_norm=1.0)
    assert optimizer.steps == (2 if precision == "fp16" else 3)
    assert memory.skipped_steps == (1 if precision == "fp16" else 0)
    assert torch.isfinite(model.weight).all()


def test_backward_for_loops_that_cannot_be_split():
    model = nn.Linear(6, 4)
    reference = copy.deepcopy(model)
    train_by_hand(reference, torch.optim.SGD(reference.parameters(), lr=0.1), steps=2)
    memory, optimizer = runtime.preset("16gb"), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        memory.backward(F.cross_entropy(model(X), Y))
        memory.step(optimizer)
    assert equal(model, reference)


# -- accumulation windows --------------------------------------------------------------------------------------


def batches(sizes):
    generator = torch.Generator().manual_seed(3)
    made = []
    for size in sizes:
        x, y = torch.randn(size, 6, generator=generator).double(), torch.randint(0, 4, (size,), generator=generator)
        y[size // 2 + 1 :: 3] = -100
        made.append((x, y))
    return made


CRITERIA = {
    "mean": lambda out, y: F.mse_loss(out, F.one_hot(y.clamp(min=0), 4).double()),
    "targets": lambda out, y: F.cross_entropy(out, y),
}


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "endless"])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("sizes", [[6, 6, 6, 6], [6, 6, 6, 6, 6, 3], [6, 6, 6, 6, 5], [1, 1, 1]])
def test_a_window_has_the_gradient_of_all_its_samples(sizes, criterion, split, sized):
    model, loss = nn.Linear(6, 4).double(), CRITERIA[criterion]
    data, k, expected, got = batches(sizes), 4, [], []
    for start in range(0, len(data), k):
        x, y = (torch.cat(parts) for parts in zip(*data[start : start + k], strict=True))
        (gradient,) = torch.autograd.grad(loss(model(x), y), [model.weight])
        expected.append(gradient)

    memory = runtime.preset("16gb", micro_batches=split)
    for x, y in memory.accumulate(data if sized else iter(data), k):
        memory.forward_backward(lambda x, y: loss(model(x), y), x, y)
        if memory.window_closed:
            got.append(model.weight.grad.clone())
            model.zero_grad()
    assert memory.window_closed
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-14)


def test_a_window_averages_sums_as_dividing_by_k_does():
    model, data = nn.Linear(6, 4).double(), batches([6] * 5)

    def loss(x, y):
        return model(x).pow(2).sum()

    memory, got = runtime.preset("16gb", micro_batches=2), []
    for x, y in memory.accumulate(data, 4):
        memory.forward_backward(loss, x, y)
        if memory.window_closed:
            got.append(model.weight.grad.clone())
            model.zero_grad()
    (first,) = torch.autograd.grad(sum(loss(x, y) for x, y in data[:4]) / 4, [model.weight])
    (last,) = torch.autograd.grad(loss(*data[4]), [model.weight])
    assert torch.allclose(got[0], first, rtol=1e-12)
    assert torch.allclose(got[1], last, rtol=1e-12)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "endless"])
def test_backward_in_a_window_weighs_the_tail_by_samples(sized):
    model, loss = nn.Linear(6, 4).double(), CRITERIA["mean"]
    data = batches([6, 6, 6, 6, 6, 3])
    memory, optimizer = runtime.preset("16gb"), torch.optim.SGD(model.parameters(), lr=1.0)
    for x, y in memory.accumulate(data if sized else iter(data), 4):
        memory.backward(loss(model(x), y))
        if memory.window_closed:
            before = model.weight.detach().clone()
            x, y = (torch.cat(parts) for parts in zip(*(data[:4] if len(x) == 6 else data[4:]), strict=True))
            (gradient,) = torch.autograd.grad(loss(model(x), y), [model.weight])
            memory.step(optimizer)
            assert torch.allclose(before - model.weight, gradient, rtol=1e-10, atol=1e-14)


def test_zero_grad_spares_the_middle_of_a_window():
    model = nn.Linear(6, 4)
    memory, optimizer = runtime.preset("16gb"), torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for _ in memory.accumulate([X, X, X], 3):
        memory.zero_grad(optimizer)
        kept.append(model.weight.grad is not None)
        memory.backward(model(X).pow(2).mean())
    assert kept == [False, True, True]


def test_a_loader_that_has_a_length_is_not_read_ahead():
    read = []

    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            for index in range(3):
                read.append(index)
                yield torch.ones(2)

    seen = [list(read) for _ in runtime.preset("16gb").accumulate(Loader(), 2)]
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_windows_close_after_k_batches_and_at_the_end():
    window = Window()
    assert [window.closed for _ in windows([torch.ones(2)] * 5, 2, window)] == [False, True, False, True, True]
    assert window.closed


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_a_wrong_window_is_refused_by_name(k):
    with pytest.raises(ValueError, match=f"k: got {k}"):
        next(iter(runtime.preset("16gb").accumulate([1], k)))


# -- the manager itself ----------------------------------------------------------------------------------------


def test_one_manager_per_process_until_it_is_reset():
    first = runtime.preset("16gb", micro_batches=2)
    assert runtime.preset("16gb", micro_batches=2) is first
    assert runtime.preset("16gb", micro_batches=4) is not first
    runtime.reset()
    assert runtime.preset("16gb", micro_batches=2) is not first


def test_the_environment_chooses_another_preset(monkeypatch):
    monkeypatch.setenv("OOMFIX_PRESET", "8gb")
    assert runtime.preset("24gb", clip_norm=1.0).preset.name == "8gb"


def test_making_a_manager_touches_no_cuda(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("CUDA was started")

    for name in ("_lazy_init", "mem_get_info", "get_device_capability", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = nn.Linear(2, 2)
    assert runtime.preset("auto").prepare(model) is model


def test_prepare_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="model: got int, expected"):
        runtime.preset("16gb").prepare(3)


def test_the_report_names_sizes_reasons_and_skipped_steps():
    model = nn.Linear(6, 4)

    def coupled(x):
        return model(x).std(0).mean()

    memory = runtime.preset("16gb", micro_batches=2)
    memory.forward_backward(coupled, X)
    assert "coupled: whole batches (samples depend on each other" in str(memory.report())
    assert memory.report().skipped_steps == 0
