"""State that a forward keeps where no module holds it: in containers, in loose tensors, behind `.data`, in draws.

A batch is run whole there, checks leave no trace, and a call that starts again finds everything as it was.
"""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.verify import check

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def counter_in_a_list():
    model, calls = network(), [0]

    def forward(x):
        calls[0] += 1
        return model(x).pow(2).mean() * min(1.0, calls[0] / 10)

    return model, forward, lambda: [torch.tensor(calls[0])]


def queue_in_a_list():
    model, queue = network(), [torch.ones(8, 4).double()]

    def forward(x):
        out = model(x)
        loss = (out @ queue[0].T).exp().mean()
        queue[0] = torch.cat([out.detach(), queue[0]])[:8]
        return loss

    return model, forward, lambda: [queue[0]]


def history_in_a_deque():
    model, history = network(), deque([1.0], maxlen=4)

    def forward(x):
        loss = model(x).pow(2).mean() / history[0]
        history.append(float(loss))
        return loss

    return model, forward, lambda: [torch.tensor(list(history))]


def bank_in_a_closure():
    model, bank = network(), torch.zeros(12, 4).double()

    def forward(x):
        out = model(x)
        loss = (out - bank[: len(x)]).pow(2).mean()
        bank[: len(x)] = out.detach()
        return loss

    return model, forward, lambda: [bank]


class Trainer:
    """Keeps a centre and a count in a dictionary of its own."""

    def __init__(self, model):
        self.model, self.state = model, {"centre": torch.zeros(4).double(), "calls": 0}

    def loss(self, x):
        out = self.model(x)
        self.state["calls"] += 1
        loss = (out - self.state["centre"]).pow(2).mean() * self.state["calls"]
        self.state["centre"].mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return loss


def state_in_a_dictionary():
    trainer = Trainer(network())
    return trainer.model, trainer.loss, lambda: [trainer.state["centre"], torch.tensor(trainer.state["calls"])]


def teacher_by_data():
    """The momentum encoder as MoCo's published code writes it."""
    model = network()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def forward(x):
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.data = slow.data * 0.5 + fast.data * 0.5 + 0.01
        return (model(x) - teacher(x)).pow(2).mean()

    return model, forward, lambda: [parameter.detach().clone() for parameter in teacher.parameters()]


KINDS = [
    counter_in_a_list,
    queue_in_a_list,
    history_in_a_deque,
    bank_in_a_closure,
    state_in_a_dictionary,
    teacher_by_data,
]


class Once(torch.autograd.Function):
    """Runs out of memory in its first backward, when the forward has written everything."""

    armed = False

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Once.armed:
            Once.armed = False
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to ...")
        return gradient


def trained(make, step, failing=(), calls=3):
    """Gradients and state after each call, from `step(forward, x)`."""
    model, forward, state = make()
    found = []
    for call in range(1, calls + 1):
        model.zero_grad()
        Once.armed = call in failing
        step(lambda x: Once.apply(forward(x)), X)
        found += [parameter.grad.clone() for parameter in model.parameters()] + [value.clone() for value in state()]
    return found


def plain(forward, x):
    forward(x).backward()


@pytest.mark.parametrize("make", KINDS)
def test_hidden_state_is_that_of_whole_batches_when_a_split_is_asked_for(make):
    memory = runtime.preset("16gb", micro_batches=3)
    for ours, theirs in zip(trained(make, memory.forward_backward), trained(make, plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_hidden_state_is_put_back_when_a_call_starts_again(make, call):
    memory = runtime.preset("16gb", split="never")
    found = trained(make, memory.forward_backward, failing=(call,))
    assert memory.report().retries == 1
    for ours, theirs in zip(found, trained(make, plain), strict=True):
        assert torch.equal(ours, theirs)


def shuffled_by_numpy(x):
    return np.random.permutation(len(x))


def shuffled_by_python(x):
    order = list(range(len(x)))
    random.shuffle(order)
    return order


@pytest.mark.parametrize("order", [shuffled_by_numpy, shuffled_by_python])
def test_a_permutation_of_the_batch_drawn_outside_torch_is_seen_whatever_the_seed(order):
    """A few rows have few orders: whole and parts may be shuffled alike by chance."""
    model = network()

    def mixup(x):
        return model(0.3 * x + 0.7 * x[order(x)]).pow(2).mean()

    for seed in range(30):
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist()
        assert check(mixup, Batch((X,), {}), list(model.modules()), 4).rule is None
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_draw_per_sample_outside_torch_still_splits():
    model = network()

    def forward(x):
        scale = torch.tensor([random.random() for _ in x], dtype=x.dtype)
        return F.mse_loss(model(x * scale[:, None]), torch.zeros(len(x), 4, dtype=x.dtype))

    assert check(forward, Batch((X,), {}), list(model.modules()), 4).rule is not None
