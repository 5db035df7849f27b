"""Optimizer steps inside backward: the same training, to the bit, with gradients freed one by one."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.simulated_card import SimulatedCard
from tests.torch_versions import needs_fused_on_cpu

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class Tied(nn.Module):
    """An embedding that is the output layer too, a layer that runs twice and one that never does."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens):
        return self.layer(self.layer(self.embedding(tokens)).relu()) @ self.embedding.weight.T


def train(model, optimizer, in_backward, micro_batches=1, steps=4):
    torch.manual_seed(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        tokens = torch.randint(0, 20, (12, 5))
        for number, rows in enumerate(tokens.chunk(micro_batches), start=1):
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            last = in_backward and number == micro_batches
            with runtime.optimizer_in_backward(optimizer) if last else nullcontext():
                (loss / micro_batches).backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def assert_same(first, second):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_fused_on_cpu] * ("fused" in name)) for name in OPTIMIZERS]
)
def test_training_is_bitwise_that_with_step(name, micro_batches):
    reference = Tied()
    model = copy.deepcopy(reference)
    first, second = OPTIMIZERS[name](reference.parameters()), OPTIMIZERS[name](model.parameters())
    train(reference, first, False, micro_batches)
    train(model, second, True, micro_batches)
    assert_same(model, reference)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_state(first.state_dict(), second.state_dict())


def assert_same_state(first, second):
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for key, state in first["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["state"][key][name]))


def test_groups_keep_their_own_settings():
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(reference)
    x = torch.randn(3, 4)

    def optimizer_of(net):
        groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters(), "weight_decay": 0.3}]
        return torch.optim.SGD(groups, lr=0.1)

    optimizer = optimizer_of(reference)
    reference(x).sum().backward()
    optimizer.step()
    optimizer = optimizer_of(model)
    with runtime.optimizer_in_backward(optimizer):
        model(x).sum().backward()
    assert_same(model, reference)


def test_gradients_never_exist_all_at_once():
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    x = torch.randn(2, 64)
    one = 4 * 64 * 64

    def peak(in_backward):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with SimulatedCard() as card:
            with runtime.optimizer_in_backward(optimizer) if in_backward else nullcontext():
                model(x).sum().backward()
            optimizer.zero_grad()
            return card.peak_bytes

    assert peak(False) >= 8 * one
    assert peak(True) < 3 * one


def test_a_gradient_of_an_earlier_backward_only_is_stepped_at_the_end():
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([used, other], lr=0.5)
    other.sum().backward()
    with runtime.optimizer_in_backward(optimizer):
        used.sum().backward()
    assert used.tolist() == other.tolist() == [0.5, 0.5]
    assert other.grad is None


def test_two_optimizers_step_in_one_backward():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = torch.optim.SGD([first], lr=0.5), torch.optim.SGD([second], lr=0.25)
    with runtime.optimizer_in_backward(*optimizers):
        (first + second).sum().backward()
    assert (first[0].item(), second[0].item()) == (0.5, 0.75)


def test_a_parameter_of_two_optimizers_is_stepped_by_both():
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model, x = copy.deepcopy(reference), torch.randn(3, 4)
    for net in (reference, model):
        first = torch.optim.SGD(net.parameters(), lr=0.1)
        second = torch.optim.AdamW([net.weight], lr=0.01)
        with runtime.optimizer_in_backward(first, second, first) if net is model else nullcontext():
            net(x).square().mean().backward()
        if net is reference:
            first.step()
            second.step()
    assert_same(model, reference)


def test_a_second_backward_in_one_context_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    refused = pytest.raises(RuntimeError, match="one context is for one backward")
    with refused, runtime.optimizer_in_backward(optimizer):
        weight.sum().backward()
        weight.sum().backward()


def test_after_the_context_gradients_accumulate_as_ever():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with pytest.raises(ZeroDivisionError), runtime.optimizer_in_backward(optimizer):
        raise ZeroDivisionError
    weight.sum().backward()
    assert weight.tolist() == [1, 1] and weight.grad.tolist() == [1, 1]
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_an_optimizer_that_counts_steps_per_group_is_refused():
    class Scheduled(torch.optim.SGD):
        """Keeps a count in its group, as schedule-free optimizers do."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    context = runtime.optimizer_in_backward(Scheduled([weight], lr=0.1))
    with pytest.raises(RuntimeError, match="Scheduled changes k"), context:
        weight.sum().backward()


def test_lbfgs_is_refused():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="got LBFGS"), runtime.optimizer_in_backward(torch.optim.LBFGS([weight])):
        pass


def test_several_processes_are_refused(monkeypatch):
    """A hook of DDP exchanges gradients after ours would have stepped with the local one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    weight = nn.Parameter(torch.ones(2))
    context = runtime.optimizer_in_backward(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(RuntimeError, match="several processes train together"), context:
        pass


def test_the_manager_runs_whole_inside_and_never_steps_twice():
    """A retry after out of memory would start from weights that are stepped in part; it is refused."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = copy.deepcopy(reference)
    x = torch.randn(8, 8)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(x).square().mean().backward()
    optimizer.step()
    memory = runtime.preset("16gb", micro_batches=4, precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with runtime.optimizer_in_backward(optimizer):
        memory.forward_backward(lambda x: model(x).square().mean(), x)
    assert_same(model, reference)


@pytest.mark.parametrize(
    ("policies", "k", "why"),
    [
        ({"precision": "fp16"}, 1, "multiplied by the loss scale"),
        ({"clip_norm": 1.0}, 1, "clipped by the norm of all"),
        ({}, 2, "weighed when their accumulation window closes"),
    ],
)
@pytest.mark.parametrize("call", ["forward_backward", "backward"])
def test_what_a_manager_does_to_gradients_before_a_step_is_refused_inside(policies, k, why, call):
    model = nn.Linear(8, 1)
    before = copy.deepcopy(model)
    memory = runtime.preset("16gb", **{"precision": "fp32", **policies})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in memory.accumulate([torch.randn(4, 8)] * 2, k):
        with pytest.raises(RuntimeError, match=why), runtime.optimizer_in_backward(optimizer):
            if call == "backward":
                memory.backward(model(x).square().mean())
            else:
                memory.forward_backward(lambda x: model(x).square().mean(), x)
    assert_same(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scaler_of_ones_own_is_refused_before_anything_is_stepped():
    """Its gradients are multiplied by the scale, and would be stepped with."""
    model = nn.Linear(8, 1)
    before, x = copy.deepcopy(model), torch.randn(4, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"), runtime.optimizer_in_backward(optimizer):
        scaler.scale(model(x).square().mean()).backward()
    assert_same(model, before)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before.weight)


def test_a_scaler_that_is_switched_off_is_no_matter():
    """As loops have it that choose their precision by a flag."""
    model = nn.Linear(8, 1)
    before = copy.deepcopy(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    with runtime.optimizer_in_backward(optimizer):
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    assert not torch.equal(model.weight, before.weight)


def test_what_was_refused_inside_goes_on_outside():
    model = nn.Linear(8, 1)
    memory = runtime.preset("16gb", precision="fp32", clip_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with runtime.optimizer_in_backward(optimizer):
        pass
    memory.forward_backward(lambda x: model(x).square().mean(), torch.randn(4, 8))
    memory.step(optimizer)


class FailsOnce(torch.autograd.Function):
    """Identity whose first backward runs out of memory."""

    failures = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        FailsOnce.failures += 1
        if FailsOnce.failures == 1:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient


def test_out_of_memory_after_a_step_never_leads_to_a_second_step(monkeypatch):
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    monkeypatch.setattr(FailsOnce, "failures", 0)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(id(optimizer.param_groups[0]["params"][0])))
    memory = runtime.preset("16gb", precision="fp32")
    with pytest.raises(RuntimeError), runtime.optimizer_in_backward(optimizer):
        memory.forward_backward(lambda x: last(FailsOnce.apply(first(x))).square().mean(), torch.randn(8, 8))
    assert sorted(steps) == sorted(map(id, last.parameters()))
