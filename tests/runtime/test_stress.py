"""Memory runs out at random moments: the result is that of a run that never met the limit."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import nn

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.simulated_card import SimulatedCard

stress = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
quick = settings(stress, max_examples=100)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Classifier(nn.Module):
    def __init__(self, width, depth, normalise, dropout, classes):
        super().__init__()
        layers, inputs = [], 6
        for _ in range(depth):
            layers.append(nn.Linear(inputs, width))
            if normalise:
                layers.append(nn.BatchNorm1d(width))
            layers += [nn.Tanh(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, classes))

    def forward(self, x):
        return self.layers(x)


@st.composite
def trainings(draw, normalise=None):
    """A model, a loss and a batch, small and random; the loss is one that splits exactly."""
    classes = draw(st.integers(2, 5))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    model = Classifier(
        width=draw(st.integers(2, 24)),
        depth=draw(st.integers(1, 3)),
        normalise=draw(st.booleans()) if normalise is None else normalise,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.4])),
        classes=classes,
    )
    samples = draw(st.integers(4, 33))
    x, y = torch.randn(samples, 6), torch.randint(0, classes, (samples,))
    weight = torch.rand(classes) + 0.1 if draw(st.booleans()) else None
    if draw(st.booleans()):
        # labels without a class in runs, so that some micro-batches have a weight of 0
        y[: draw(st.integers(1, samples - 1))] = -100
    reduction = draw(st.sampled_from(["mean", "sum"]))
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    criterion = nn.CrossEntropyLoss(weight, ignore_index=-100, reduction=reduction, label_smoothing=smoothing)
    note(f"labels {y.tolist()}, {reduction} of {weight}, smoothing {smoothing}")
    return model, criterion, x, y


def manager(**overrides):
    runtime.reset()
    return runtime.preset("16gb", **{"precision": "fp32", "split": "always", "checkpointing": "off", **overrides})


class Run:
    """Two steps on a copy of the model of `training`, on a simulated card; keeps all that they leave behind.

    Runs to be compared bit by bit all have a card: torch takes other kernels where operations are watched.

    Args:
        training: what `trainings` draws.
        parts: micro-batches of each step; None leaves it to one manager.
        budget_bytes: what the card holds.
        refused: the allocation to refuse once the first forward has begun, from 1.
    """

    def __init__(self, training, parts=None, budget_bytes=None, refused=None):
        self.model, self.criterion, self.x, self.y = training
        self.model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.left, self.parts, self.allocations = [], [], 0
        self.refused = refused
        torch.manual_seed(7)
        with SimulatedCard(budget_bytes) as self.card:
            self.card.track(self.model, self.x, self.y)
            memory = manager()
            for number in range(2):
                self.step(memory if parts is None else manager(micro_batches=parts[number]))
        self.left += [*self.model.state_dict().values(), torch.get_rng_state()]

    def step(self, memory):
        # not an attribute: a call that starts again finds the attributes of what its forward refers to as they were
        rows, begun, refused, self.refused = [], [], [self.refused], None

        def forward(x, y):
            if not begun:
                begun.append(self.card.allocations)
                if refused[0] is not None:
                    self.card.fail_at(refused[0])
            rows.append(len(x))
            output = self.model(x)
            return self.criterion(output, y), output

        loss, output = memory.forward_backward(forward, self.x, self.y)
        self.allocations = self.allocations or self.card.allocations - begun[0]
        self.left += [loss, output, *[parameter.grad.clone() for parameter in self.model.parameters()]]
        memory.step(self.optimizer)
        self.parts.append(_parts_of_the_last_try(rows, len(self.x)))


def _parts_of_the_last_try(rows, samples):
    parts = 0
    while samples > 0:
        parts += 1
        samples -= rows[-parts]
    return parts


def assert_bitwise(run, expected):
    assert run.parts == expected.parts
    for number, (a, b) in enumerate(zip(run.left, expected.left, strict=True)):
        assert torch.equal(a, b), f"entry {number}: {a} instead of {b}"


@given(training=trainings(), data=st.data())
@stress
def test_running_out_at_a_random_allocation_leaves_no_trace(training, data):
    interrupted = Run(training, refused=data.draw(st.integers(1, Run(training).allocations)))
    # the last allocations are those of a look at what the call wrote, for lack of which it does not start again
    assert interrupted.parts[0] in (1, 2)
    assert_bitwise(interrupted, Run(training, parts=interrupted.parts))


def test_running_out_at_any_allocation_of_a_call_leaves_no_trace():
    torch.manual_seed(0)
    model = Classifier(width=2, depth=1, normalise=True, dropout=0.4, classes=2)
    training = model, nn.CrossEntropyLoss(weight=torch.rand(2)), torch.randn(4, 6), torch.tensor([1, 0, 1, 0])
    refusals = range(1, Run(training).allocations + 1)
    parts = []
    for refused in refusals:
        interrupted = Run(training, refused=refused)
        parts.append(interrupted.parts[0])
        assert_bitwise(interrupted, Run(training, parts=interrupted.parts))
    assert parts == sorted(parts, reverse=True)
    assert parts.count(2) > len(parts) / 2


@given(training=trainings(), data=st.data())
@stress
def test_running_out_in_a_random_micro_batch_leaves_no_trace(training, data):
    samples = len(training[2])
    assume(samples >= 8)
    parts = data.draw(st.integers(2, samples // 4))
    allocations = Run(training, parts=[parts, parts]).allocations
    interrupted = Run(training, parts=[parts, parts], refused=data.draw(st.integers(1, allocations)))
    assert interrupted.parts[0] >= parts == interrupted.parts[1]
    assert_bitwise(interrupted, Run(training, parts=interrupted.parts))


@given(training=trainings(), data=st.data())
@stress
def test_a_card_too_small_for_the_batch_trains_as_if_started_finer(training, data):
    """Or says that it cannot, if not even the finest micro-batches fit."""
    whole_bytes = Run(training).card.peak_bytes
    budget_bytes = data.draw(st.integers(whole_bytes // 2, whole_bytes - 1))
    finest = len(training[2]) // 2
    finest_bytes = Run(training, parts=[finest, finest]).card.peak_bytes
    try:
        squeezed = Run(training, budget_bytes=budget_bytes)
    except OutOfMemoryError:
        assert budget_bytes < finest_bytes
        return
    # a number that the user asks for leaves two samples in each micro-batch: there is no run to compare with
    assume(max(squeezed.parts) <= finest)
    assert_bitwise(squeezed, Run(training, parts=squeezed.parts))


def relative_difference(a, b):
    return (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-300)).item()


@given(training=trainings(normalise=False), parts=st.integers(2, 40))
@quick
def test_gradients_of_any_split_are_those_of_the_whole_in_float64(training, parts):
    model, criterion, x, y = training
    model, criterion, x = model.double().eval(), criterion.double(), x.double()

    def forward(x, y):
        output = model(x)
        return criterion(output, y), output

    def results(**overrides):
        memory = manager(**overrides)
        model.zero_grad()
        loss, output = memory.forward_backward(forward, x, y)
        return [loss, output, *[parameter.grad.clone() for parameter in model.parameters()]]

    for part, whole in zip(results(micro_batches=parts), results(micro_batches=1), strict=True):
        assert relative_difference(part, whole) < 1e-12


@given(training=trainings(normalise=False), data=st.data())
@quick
def test_gradients_of_earlier_calls_survive_running_out_in_a_later_one(training, data):
    model, criterion, x, y = training
    model, criterion, x = model.double().eval(), criterion.double(), x.double()

    def forward(x, y):
        return criterion(model(x), y)

    forward(x, y).backward()
    expected = [2 * parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    memory = manager()
    memory.forward_backward(forward, x, y)
    with SimulatedCard() as card:
        card.track(model, x, y)
        card.fail_at(data.draw(st.integers(1, 6)))
        memory.forward_backward(forward, x, y)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert relative_difference(parameter.grad, gradient) < 1e-12


class PerTime(nn.Module):
    """A classifier of series, whose activations outweigh its parameters: [samples, times, 6] -> [samples, 64]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 64)

    def forward(self, x):
        return self.layer(x).tanh().mean(1)


@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_batch_64_times_what_the_card_holds_trains_to_the_losses_of_the_whole(steps):
    torch.manual_seed(0)
    model = PerTime()
    batches = [(torch.randn(128, 20, 6), torch.randint(0, 4, (128,))) for _ in range(steps)]

    def losses(card=None, steps=steps, **overrides):
        memory = manager(split="verified", **overrides)
        trained, rows = memory.prepare(copy.deepcopy(model)), []
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)

        def forward(x, y):
            rows.append(len(x))
            return nn.functional.cross_entropy(trained(x), y)

        if card is not None:
            card.track(trained, batches)
        found = []
        for x, y in batches[:steps]:
            found.append(memory.forward_backward(forward, x, y).item())
            memory.step(optimizer)
        return found, _parts_of_the_last_try(rows, 128)

    with SimulatedCard() as card:
        losses(card, steps=3, micro_batches=32)
        too_small_for_4_rows = card.peak_bytes - 1
    with SimulatedCard(too_small_for_4_rows) as card:
        squeezed, parts = losses(card)
    assert parts == 64
    whole, parts = losses()
    assert parts == 1
    assert max(abs(a - b) / abs(b) for a, b in zip(squeezed, whole, strict=True)) < 1e-5
