"""Optimizers that need less memory: the same training, without copies of all parameters."""

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.cards import find_card
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.profile.simulated_gpu import SimulatedGPU
from tests.torch_versions import needs_fused_on_cpu


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def step_temporaries(model, optimizer):
    """Bytes that a step holds at its peak, above what is live before it."""
    train(model, optimizer, 1)
    with SimulatedCard() as card:
        model(torch.randn(4, 64)).square().mean().backward()
        card.track(model, optimizer)
        card.reset_peak()
        before = card.current_bytes
        optimizer.step()
        return card.peak_bytes - before


def test_a_loop_needs_one_parameter_at_a_time_where_foreach_needs_all():
    one = 4 * 64 * 64
    model = network()
    optimizer = torch.optim.NAdam(model.parameters(), foreach=True)
    assert step_temporaries(model, optimizer) >= 8 * one
    assert runtime.use_lean_step(optimizer) == "for-loop"
    optimizer.zero_grad()
    assert step_temporaries(model, optimizer) <= 3 * one


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop])
def test_the_loop_is_the_same_training(kind):
    reference = network()
    model = copy.deepcopy(reference)
    train(reference, kind(reference.parameters(), foreach=True))
    optimizer = kind(model.parameters(), foreach=True)
    assert runtime.use_lean_step(optimizer) == "for-loop"
    train(model, optimizer)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


@needs_fused_on_cpu
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_fused_is_chosen_where_there_is_one_and_needs_no_temporaries(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=1e-3, foreach=True)
    assert step_temporaries(model, optimizer) >= 4 * 8 * 64 * 64 or kind is torch.optim.SGD
    assert runtime.use_lean_step(optimizer) == "fused"
    assert step_temporaries(model, optimizer) <= 64


def test_a_training_that_becomes_fused_on_its_way_goes_the_same_way():
    reference = network()
    model = copy.deepcopy(reference)
    first, second = (torch.optim.AdamW(net.parameters(), foreach=True) for net in (reference, model))
    train(reference, first)
    train(reference, first)
    train(model, second)
    runtime.use_lean_step(second)
    train(model, second)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert [float(s["step"]) for s in second.state.values()] == [6.0] * 8


def test_on_a_card_the_fused_step_finds_the_counts_of_steps_beside_the_parameters():
    """torch makes the counts on the CPU for the other forms, where the fused kernel cannot read them."""
    with SimulatedGPU(find_card("t4")).running():
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        before = {state["step"].device.type for state in optimizer.state.values()}
        assert runtime.use_lean_step(optimizer) == "fused"
        after = {state["step"].device.type for state in optimizer.state.values()}
    assert (before, after) == ({"cpu"}, {"cuda"})


def test_what_excludes_fused_gets_the_loop():
    weight = nn.Parameter(torch.ones(3))
    assert runtime.use_lean_step(torch.optim.Adam([weight], differentiable=True)) == "for-loop"


def test_optimizers_of_others_are_left_alone():
    class Lion(torch.optim.Optimizer):
        pass

    optimizer = Lion([nn.Parameter(torch.ones(3))], {"lr": 1.0, "foreach": True})
    assert runtime.use_lean_step(optimizer) == "as it was"
    assert optimizer.param_groups[0]["foreach"] is True


def installed(monkeypatch, name):
    class AdamW8bit(torch.optim.AdamW):
        package = name

    for part in (name.split(".")[0], name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules[name].AdamW8bit = AdamW8bit


@pytest.fixture
def nothing_installed(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim", "torchao.prototype.low_bit_optim"):
        # None in sys.modules makes the import fail
        monkeypatch.setitem(sys.modules, name, None)


def test_8bit_comes_from_the_first_package_installed(monkeypatch, nothing_installed):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ImportError, match="neither bitsandbytes nor torchao"):
        runtime.adamw_8bit([weight])
    installed(monkeypatch, "torchao.optim")
    optimizer = runtime.adamw_8bit([weight], lr=0.25, weight_decay=0.5)
    assert optimizer.package == "torchao.optim"
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)
    installed(monkeypatch, "bitsandbytes.optim")
    assert runtime.adamw_8bit([weight]).package == "bitsandbytes.optim"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_step_needs_no_copies_of_all_parameters():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def temporaries():
        model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before

    assert temporaries() >= 8 * 4 * 1024 * 1024
    assert runtime.use_lean_step(optimizer) == "fused"
    assert temporaries() < 2**20
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cuda"}
