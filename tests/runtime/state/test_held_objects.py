"""State in objects that a trainer or a model holds is noticed, left alone by checks, and put back after a failure."""

import logging
import types

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.state.held_objects import held_by
from tests.runtime.through import through

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Balancer:
    """Weighs a loss by its mean so far."""

    def __init__(self):
        self.mean = torch.ones(())
        self.calls = 0

    def __call__(self, loss):
        self.calls += 1
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean * (1 + self.calls)


class Part:
    def __init__(self):
        self.balancer = Balancer()


class Held(nn.Module):
    """A model or trainer, and where it holds its balancer."""

    def __init__(self, place):
        super().__init__()
        self.model, self.held = nn.Linear(6, 4), place()

    def find(self):
        held = self.held
        while not isinstance(held, Balancer):
            held = held.balancer if isinstance(held, Part) else held["first"]
        return held

    def loss(self, x):
        return self.find()(self.model(x).pow(2).mean())


PLACES = {
    "an attribute": Balancer,
    "a part": Part,
    "a dictionary": lambda: {"first": Balancer()},
    "parts in a dictionary": lambda: {"first": Part()},
}


def twins(place):
    plain, managed = Held(place), Held(place)
    managed.load_state_dict(plain.state_dict())
    return plain, managed


def assert_left_alike(managed, plain):
    assert managed.find().calls == plain.find().calls
    assert torch.equal(managed.find().mean, plain.find().mean)
    assert torch.equal(managed.model.weight.grad, plain.model.weight.grad)


@pytest.mark.parametrize("place", PLACES)
def test_it_keeps_the_batch_whole_and_is_left_alone_by_checks(place, caplog):
    plain, managed = twins(PLACES[place])
    memory = runtime.preset("16gb", micro_batches=4)
    for _ in range(3):
        plain.loss(X).backward()
        memory.forward_backward(managed.loss, X)
    assert "keeps state of its own" in caplog.text
    assert_left_alike(managed, plain)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_put_back_when_a_call_starts_again(place):
    plain, managed = twins(PLACES[place])
    # in no list, which would be put back as well
    failures = iter([OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")])

    def fail_once(gradient):
        for failure in failures:
            raise failure
        return gradient

    plain.loss(X).backward()
    runtime.preset("16gb").forward_backward(lambda x: through(fail_once)(managed.loss(x)), X)
    assert next(failures, None) is None
    assert_left_alike(managed, plain)


class Counter:
    calls = 0


@pytest.mark.parametrize("make", [Counter, types.SimpleNamespace])
def test_state_in_an_object_that_has_no_attributes_yet_is_left_alone_by_checks(make):
    model, state, memory = nn.Linear(6, 4), make(), runtime.preset("16gb", micro_batches=4)

    def forward(x):
        state.calls = getattr(state, "calls", 0) + 1
        return model(x).pow(2).mean() * state.calls

    for calls in range(1, 4):
        memory.forward_backward(forward, X)
        assert state.calls == calls


def test_results_that_a_held_object_keeps_are_those_of_the_whole_batch():
    """What is written and never read leaves a batch in parts."""

    class Trainer:
        def __init__(self):
            self.model, self.last, self.sizes = nn.Linear(6, 4), types.SimpleNamespace(), []

        def loss(self, x):
            self.last.loss, self.last.count = (loss := self.model(x).pow(2).mean()).item(), len(x)
            sizes.append(len(x))
            return loss

    sizes, trainer, memory = [], Trainer(), runtime.preset("16gb", micro_batches=4)
    whole = trainer.loss(X).item()
    memory.forward_backward(trainer.loss, X)
    assert sizes[-4:] == [2, 2, 2, 2]
    assert trainer.last.loss == pytest.approx(whole, rel=1e-6)
    assert trainer.last.count == len(X)


def test_objects_of_installed_packages_are_left_to_themselves():
    optimizer, stream = torch.optim.SGD(nn.Linear(2, 1).parameters()), logging.StreamHandler()
    owner = types.SimpleNamespace(ours=Counter(), optimizer=optimizer, stream=stream)
    assert held_by([owner]) == [owner.ours]
