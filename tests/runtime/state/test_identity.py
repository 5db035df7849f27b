"""A verdict holds for one forward with its flags: where something else decides what the loss is, it is checked anew."""

import argparse
import copy
import enum
import functools

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.runtime.state.identity import identity

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


def namespace_of_the_trainer(model):
    class Reading(Trainer):
        def loss(self, x, y):
            return (coupled if self.settings.coupled else independent)(self.model(x), y)

    trainer = Reading(model, independent)
    trainer.settings = argparse.Namespace(coupled=False)

    def turn(late):
        trainer.settings.coupled = late
        return trainer.loss, ()

    return turn


def number_of_an_epoch(model):
    epoch = 0

    def forward(x, y):
        return (coupled if epoch else independent)(model(x), y)

    def turn(late):
        nonlocal epoch
        epoch = int(late)
        return forward, ()

    return turn


def weight_in_the_trainer(model):
    class Weighted(Trainer):
        weight = 0.0

        def loss(self, x, y):
            return self.both(self.model(x), y)

        def both(self, output, y):
            return independent(output, y) + self.weight * coupled(output, y)

    trainer = Weighted(model, independent)

    def turn(late):
        trainer.weight = 0.5 * late
        return trainer.loss, ()

    return turn


def number_beside_a_counter(model):
    state = argparse.Namespace(step=0, stage=1)

    def forward(x, y, step, stage):
        return (coupled if stage > 1 else independent)(model(x), y) * (1 + 0 * step)

    def turn(late):
        state.step += 1
        return forward, (state.step, 1 + late)

    return turn


def mode_of_a_layer(model):
    inner = nn.Sequential(model)

    def turn(late):
        inner[0].train(late)
        return (lambda x, y: independent(inner(x), y)), ()

    return turn


def flag_inside_of_the_model(model):
    inner = nn.Sequential(nn.Identity(), model)

    def turn(late):
        model.centres = late
        return (lambda x, y: independent(inner(x), y)), ()

    return turn


def hook_of_a_layer(model):
    inner, handles = nn.Sequential(model), []

    def turn(late):
        if late and not handles:
            handles.append(inner[0].register_forward_hook(lambda module, args, output: output - output.mean(0)))
        return (lambda x, y: independent(inner(x), y)), ()

    return turn


CHANGES = [
    another_trainer, flag_of_the_trainer, flag_of_the_model, mode_of_the_model, namespace, member_of_an_enumeration,
    function_of_a_criterion, namespace_of_the_trainer, number_of_an_epoch, weight_in_the_trainer,
    number_beside_a_counter, mode_of_a_layer, hook_of_a_layer,
    flag_inside_of_the_model,
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


def test_a_number_that_moves_now_and_then_has_the_forward_checked_in_one_call_of_sixteen_at_most():
    model, checks = Centred().double().eval(), set()
    state = argparse.Namespace(windows=0)

    def forward(x, y, windows):
        if not torch.is_grad_enabled():
            checks.add(call)
        return independent(model(x), y) * (1 + windows)

    memory = runtime.preset("16gb", micro_batches=4)
    for call in range(1, 65):
        state.windows += call % 4 == 0
        memory.forward_backward(forward, X, Y, state.windows)
    assert len(checks - {1, 2, 4, 8, 16, 32, 64}) <= 5


def test_a_flag_inside_of_a_model_that_flips_has_the_forward_checked_in_one_call_of_sixteen_at_most():
    model, checks = nn.Sequential(Centred()).double().eval(), set()

    def forward(x, y):
        if not torch.is_grad_enabled():
            checks.add(call)
        return independent(model(x), y)

    memory = runtime.preset("16gb", micro_batches=4)
    for call in range(1, 65):
        model[0].tag = "even" if call % 2 else "odd"
        memory.forward_backward(forward, X, Y)
    assert len(checks - {1, 2, 4, 8, 16, 32, 64}) <= 5


def test_a_scaler_that_has_made_its_scale_is_the_same_scaler():
    """A forward that asks it whether it is enabled stays what it was, and is not checked from the beginning."""
    scaler = torch.amp.GradScaler("cpu", enabled=True)

    def forward(x):
        return scaler.is_enabled() * x

    before = identity(forward, (X,), {})
    scaler.scale(torch.ones(()))
    assert scaler.is_enabled()
    assert identity(forward, (X,), {}) == before


def with_or_without_labels(model, x, y=None, weights=None):
    """Three losses, of which only the last is a mean over what the program divides by."""
    output = model(x)
    if y is None:
        return output.pow(2).mean()
    each = (output - y).pow(2).mean(1)
    return each.mean() if weights is None else (each * weights).sum() / weights.sum()


def of_any_batch(model, batch):
    if isinstance(batch, dict):
        return with_or_without_labels(model, **batch)
    return with_or_without_labels(model, *batch)


WEIGHTS = torch.arange(32).double() % 5
SIGNATURES = {
    "arguments": (with_or_without_labels, [((X,), {}), ((X, Y), {}), ((X, Y, WEIGHTS), {})]),
    "names": (with_or_without_labels, [((X,), {}), ((X,), {"y": Y}), ((X,), {"y": Y, "weights": WEIGHTS})]),
    "containers": (of_any_batch, [(((X, Y),), {}), (({"x": X, "y": Y, "weights": WEIGHTS},), {})]),
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_what_is_given_tells_one_forward_from_another(kind, caplog, relative_error):
    function, calls = SIGNATURES[kind]
    memory, model, reference = runtime.preset("16gb", micro_batches=3), *networks()
    forward = functools.partial(function, model)
    for _ in range(4):
        for args, named in calls:
            memory.forward_backward(forward, *args, **named)
            function(reference, *args, **named).backward()
            assert relative_error(model, reference) < 1e-12
    assert len(memory.report().forwards) == len(calls)
    assert all(report.micro_batches == 3 for report in memory.report().forwards)
    assert not caplog.text


def networks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, copy.deepcopy(model)
