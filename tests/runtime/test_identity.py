"""A verdict holds for one forward with its flags: where something else decides what the loss is, it is checked anew."""

import argparse
import enum

import pytest
import torch
from torch import nn

from oomfix import runtime

X, Y = torch.randn(32, 4).double(), torch.randn(32, 3).double()


def independent(output, y):
    return ((output - y) ** 2).mean()


def coupled(output, y):
    return ((output - output.mean(0) - y) ** 2).mean()


class Kind(enum.Enum):
    INDEPENDENT = 1
    COUPLED = 2


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.centres = nn.Linear(4, 3), False

    def forward(self, x):
        output = self.layer(x)
        return output - output.mean(0) if self.training or self.centres else output


class Criterion(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, output, y):
        return self.function(output, y)


class Trainer:
    def __init__(self, model, function):
        self.model, self.function, self.warm = model, function, True

    def loss(self, x, y):
        return self.function(self.model(x), y)

    def warming(self, x, y):
        return (independent if self.warm else coupled)(self.model(x), y)


def another_trainer(model):
    trainers = Trainer(model, independent), Trainer(model, coupled)
    return lambda late: (trainers[late].loss, ())


def flag_of_the_trainer(model):
    trainer = Trainer(model, independent)

    def turn(late):
        trainer.warm = not late
        return trainer.warming, ()

    return turn


def flag_of_the_model(model):
    def turn(late):
        model.centres = late
        return (lambda x, y: independent(model(x), y)), ()

    return turn


def mode_of_the_model(model):
    def turn(late):
        model.train(late)
        return (lambda x, y: independent(model(x), y)), ()

    return turn


def namespace(model):
    settings = argparse.Namespace(loss="independent")

    def forward(x, y):
        return (independent if settings.loss == "independent" else coupled)(model(x), y)

    def turn(late):
        settings.loss = "coupled" if late else "independent"
        return forward, ()

    return turn


def member_of_an_enumeration(model):
    def forward(x, y, kind):
        return (independent if kind is Kind.INDEPENDENT else coupled)(model(x), y)

    return lambda late: (forward, (Kind.COUPLED if late else Kind.INDEPENDENT,))


def function_of_a_criterion(model):
    criteria = Criterion(independent), Criterion(coupled)

    def forward(x, y, criterion):
        return criterion(model(x), y)

    return lambda late: (forward, (criteria[late],))


CHANGES = [
    another_trainer, flag_of_the_trainer, flag_of_the_model, mode_of_the_model, namespace, member_of_an_enumeration,
    function_of_a_criterion,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_known_is_not_used_after(change):
    model = Centred().double().eval()
    turn, memory = change(model), runtime.preset("16gb", micro_batches=4)
    for call in range(8):
        forward, more = turn(call >= 4)
        expected = torch.autograd.grad(forward(X, Y, *more), model.layer.weight)[0]
        model.zero_grad()
        memory.forward_backward(forward, X, Y, *more)
        assert torch.allclose(model.layer.weight.grad, expected, rtol=1e-10), f"call {call}"


def test_a_number_that_follows_a_schedule_does_not_make_a_forward_new():
    model, criterion, checks = Centred().double().eval(), Criterion(independent), []

    def forward(x, y):
        if not torch.is_grad_enabled():
            checks.append(call)
        return criterion(model(x), y) * criterion.scale

    memory = runtime.preset("16gb", micro_batches=4)
    for call in range(1, 9):
        criterion.scale = 0.1 * call
        memory.forward_backward(forward, X, Y)
    assert set(checks) == {1, 2, 4, 8}
