"""Freed means freed: nothing of the old stage is alive when the next one begins."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def state_of(optimizer):
    return [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_no_tensor_of_a_freed_optimizer_is_alive_though_names_and_a_scheduler_hold_it():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer)
    tensors = state_of(optimizer)
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    weights = nbytes(model.parameters())
    assert len(tensors) == 12
    freed = runtime.free(optimizer)
    assert [ref() for ref in tensors + gradients] == [None] * 16
    # two moments and a gradient for each parameter, and four counts of steps
    assert freed == runtime.Freed(3 * weights + 4 * 4, 0)
    assert scheduler.optimizer is optimizer


def test_a_freed_optimizer_refuses_to_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime.free(optimizer)
    with pytest.raises(RuntimeError, match="was freed"):
        optimizer.step()


def test_what_something_else_holds_is_counted_as_held():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    kept = optimizer.state[model[0].weight]["exp_avg"]
    freed = runtime.free(optimizer)
    assert freed.held_bytes == nbytes([kept])
    assert "still held elsewhere" in str(freed)


def test_a_freed_model_holds_nothing():
    model = network()
    model(torch.randn(2, 16)).sum().backward()
    weights = [weakref.ref(p) for p in model.parameters()]
    size = nbytes(model.parameters())
    assert runtime.free(model) == runtime.Freed(2 * size, 0)
    assert [ref() for ref in weights] == [None] * 4
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_tensors_and_lists_of_them_lose_their_data_and_graph():
    x = torch.randn(100, requires_grad=True)
    losses = [x.exp().sum() for _ in range(3)]
    hidden = x.exp()
    with SimulatedCard() as card:
        inside = [x.exp().sum() for _ in range(3)]
        assert card.current_bytes == 3 * (400 + 4)
        runtime.free(inside)
        assert card.current_bytes == 0
    runtime.free({"losses": losses, "hidden": hidden})
    assert losses == [] and hidden.numel() == 0 and hidden.grad_fn is None


def test_what_cannot_be_emptied_is_refused_before_anything_is_freed():
    model = network()
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(3)
    train(model, optimizer)
    for mistake in (lambda: None, [batch, (batch,)]):
        with pytest.raises(TypeError, match=r"things: got (function|tuple)"):
            runtime.free(optimizer, batch, mistake)
    assert len(optimizer.state) == 4 and batch.numel() == 3
    train(model, optimizer)


def test_nothing_of_a_stage_is_alive_in_the_next(caplog):
    caplog.set_level(logging.INFO, "oomfix")
    model = network()
    with SimulatedCard() as card:
        with runtime.stage("head") as head:
            optimizer = torch.optim.AdamW(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            train(model, optimizer)
            tensors = state_of(optimizer) + [weakref.ref(p.grad) for p in model.parameters()]
        assert card.current_bytes == 0
    assert [ref() for ref in tensors] == [None] * 16
    assert head.freed.freed_bytes == 3 * nbytes(model.parameters()) + 16
    assert "stage head" in caplog.text and "(1 optimizers)" in caplog.text
    assert scheduler.optimizer is optimizer


def test_gradients_go_though_the_optimizer_is_gone_already():
    model = network()
    with runtime.stage("head"):
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        del optimizer
        gc.collect()
    assert all(p.grad is None for p in model.parameters())


def test_optimizers_of_before_and_kept_ones_stay():
    older, kept, own = network(), network(), network()
    before = torch.optim.AdamW(older.parameters())
    train(older, before)
    outlives, inside = torch.optim.SGD(kept.parameters(), lr=0.1), torch.optim.SGD(own.parameters(), lr=0.1)
    with runtime.stage("head", keep=[outlives]):
        for model, optimizer in ((older, before), (kept, outlives), (own, inside)):
            train(model, optimizer)
    assert before.state and older[0].weight.grad is not None
    train(older, before)
    train(kept, outlives)
    with pytest.raises(RuntimeError, match="keep="):
        inside.step()


def test_two_optimizers_of_a_stage_may_share_parameters():
    model = network()
    with runtime.stage("head") as head:
        optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
        for optimizer in optimizers:
            train(model, optimizer)
        tensors = [state for optimizer in optimizers for state in state_of(optimizer)]
    assert [ref() for ref in tensors] == [None] * 24
    assert head.freed.freed_bytes == 5 * nbytes(model.parameters()) + 2 * 16


def test_a_stage_inside_a_stage_frees_its_own():
    model = network()
    with runtime.stage("outer") as outer:
        first = torch.optim.AdamW(model.parameters())
        train(model, first)
        with runtime.stage("inner"):
            second = torch.optim.AdamW(model.parameters())
            train(model, second)
            inner = state_of(second)
        assert [ref() for ref in inner] == [None] * 12
        train(model, first)
    assert outer.freed.freed_bytes == 3 * nbytes(model.parameters()) + 16


def test_an_optimizer_that_goes_on_from_a_checkpoint_is_one_of_the_stage():
    model = network()
    before = torch.optim.AdamW(model.parameters())
    train(model, before)
    with runtime.stage("head"):
        resumed = torch.optim.AdamW(model.parameters())
        resumed.load_state_dict(copy.deepcopy(before.state_dict()))
        train(model, resumed)
        tensors = state_of(resumed)
    assert [ref() for ref in tensors] == [None] * 12
    assert len(before.state) == 4


def test_a_stage_that_fails_is_freed_too():
    model = network()
    with pytest.raises(ZeroDivisionError), runtime.stage("head"):
        train(model, torch.optim.AdamW(model.parameters()))
        raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters())


def test_training_goes_on_bitwise_as_with_a_new_optimizer():
    reference = network()
    model = copy.deepcopy(reference)
    for net in (reference, model):
        torch.manual_seed(0)
        if net is model:
            with runtime.stage("first"):
                train(net, torch.optim.AdamW(net.parameters()))
        else:
            train(net, torch.optim.AdamW(net.parameters()))
            net.zero_grad()
        train(net, torch.optim.AdamW(net.parameters()))
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_manager_holds_nothing_of_a_stage():
    model = network()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    with runtime.stage("head"):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            memory.forward_backward(lambda x: model(x).square().mean(), torch.randn(8, 16))
            memory.step(optimizer, zero_grad=False)
        tensors = state_of(optimizer) + [weakref.ref(p.grad) for p in model.parameters()]
    assert [ref() for ref in tensors] == [None] * 16
