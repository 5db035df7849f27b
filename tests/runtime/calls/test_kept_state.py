"""What a forward changes besides gradients is put back when its call starts again after running out of memory."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.state.kept_tensors import KeptTensors
from tests.runtime.through import through

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Stateful(nn.Module):
    """Counts its calls, follows its own weights, keeps its last output and draws from generators of its own."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(6)]
        self.blocks = nn.Sequential(*blocks)
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4))
        self.seen, self.names = 0, []
        self.history = {"seen": [], "weights": [0.0, {}]}
        self.generator = torch.Generator().manual_seed(3)
        self.dice = random.Random(5)
        self.numpy = np.random.default_rng(7)

    def forward(self, x):
        self.seen += 1
        self.names.append(self.seen)
        self.history["seen"].append(self.seen)
        self.last = self.student(x).detach()
        self.queue = self.queue + self.last.mean(0)
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        noise = torch.randn(x.shape, generator=self.generator) * self.dice.random() * self.numpy.random()
        return (self.student(self.blocks(x + noise)) - self.teacher(x)).pow(2).mean()

    def state(self):
        draws = [torch.randn(1, generator=self.generator), self.dice.random(), self.numpy.random()]
        rest = [self.seen, self.names, self.last, self.queue]
        return [self.history["seen"], *self.blocks.state_dict().values(), self.teacher.weight, *rest, *draws]


def train(fails_at=None, calls=4):
    """The state after some calls, of which one runs out of memory after its forward, and goes on checkpointed."""
    torch.manual_seed(0)
    runtime.reset()
    model, memory = Stateful(), runtime.preset("16gb", checkpointing="if-needed")
    optimizer, count = torch.optim.SGD(model.parameters(), lr=0.1), [0, True]

    def forward(x):
        loss = model(x)
        if count[0] == fails_at and count[1]:
            count[1] = False
            raise OutOfMemoryError("CUDA out of memory")
        return loss

    for _ in range(calls):
        count[0] += 1
        memory.forward_backward(forward, X)
        memory.step(optimizer)
    return model.state()


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("fails_at", [2, 3, 4])
def test_a_second_try_finds_attributes_parameters_and_generators_as_the_first(fails_at):
    assert_same(train(fails_at, calls=5), train(calls=5))


def test_what_was_not_foreseen_at_the_first_call_is_named(caplog):
    found, expected = train(fails_at=1, calls=1), train(calls=1)
    assert "writes Linear.weight itself" in caplog.text
    assert caplog.text.count("stays, and is written again") == 1
    assert_same(found[-7:], expected[-7:])
    assert not torch.equal(found[-8], expected[-8])  # the weights of the teacher, written twice


def follow(way, teacher, student):
    """Three ways to move a momentum encoder that leave no trace in the versions of its parameters."""
    for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
        if way == "copied":
            p.data.copy_(0.9 * p.data + 0.1 * q.data)
        elif way == "in place":
            p.data.mul_(0.9).add_(q.data, alpha=0.1)
        else:
            p.data = 0.9 * p.data + 0.1 * q.data


def train_follower(way, fails_at=None, calls=5):
    """The weights of a model and of what follows it, and the log of what was lost, if anything was."""
    torch.manual_seed(0)
    runtime.reset()
    student, teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
    memory = runtime.preset("16gb", checkpointing="off", precision="fp32")
    optimizer, call = torch.optim.SGD(student.parameters(), lr=0.1), [0]
    troubles = iter([OutOfMemoryError("CUDA out of memory")])  # an iterator is not put back

    def forward(x):
        follow(way, teacher, student)
        loss = (student(x) - teacher(x)).pow(2).mean()
        if call[0] == fails_at and (trouble := next(troubles, None)) is not None:
            raise trouble
        return loss

    for call[0] in range(1, calls + 1):
        memory.forward_backward(forward, X)
        memory.step(optimizer)
    assert (next(troubles, None) is None) is (fails_at is not None)
    return [*student.parameters(), *teacher.parameters()]


@pytest.mark.parametrize("fails_at", [2, 3, 4, 5])
@pytest.mark.parametrize("way", ["copied", "in place", "moved"])
def test_a_momentum_encoder_that_is_written_through_data_is_put_back(way, fails_at, caplog):
    assert_same(train_follower(way, fails_at), train_follower(way))
    assert "stays, and is written again" not in caplog.text


@pytest.mark.parametrize("way", ["copied", "in place"])
def test_what_the_first_call_wrote_through_data_is_named(way, caplog):
    train_follower(way, fails_at=1, calls=1)
    assert "writes Linear.weight, Linear.bias itself" in caplog.text


def test_a_leaf_first_reached_by_a_call_that_fails_keeps_its_earlier_gradient():
    first, second = nn.Linear(6, 4), nn.Linear(6, 4)
    both = [False]

    class Trouble:
        armed = False

    def fail_once(gradient):
        if Trouble.armed:
            Trouble.armed = False
            raise OutOfMemoryError("CUDA out of memory")
        return gradient

    def forward(x):
        loss = second(x).pow(2).mean() if both[0] else 0.0
        # backward is done with the second layer before it fails on its way to the first
        return through(fail_once)(first(x)).pow(2).mean() + loss

    memory = runtime.preset("16gb", checkpointing="off")
    for _ in range(4):
        memory.forward_backward(forward, X)
    second(X).pow(2).mean().backward()
    parameters = [*first.parameters(), *second.parameters()]
    both[0] = True
    fresh = torch.autograd.grad(forward(X), parameters)
    expected = [parameter.grad + gradient for parameter, gradient in zip(parameters, fresh, strict=True)]
    Trouble.armed = True
    memory.forward_backward(forward, X)  # the fifth call: not one to explore
    assert not Trouble.armed
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5)


def test_noise_that_has_a_graph_from_the_second_call_on_casts_no_doubt_on_the_first(caplog):
    policy, scale = nn.Linear(6, 4), torch.ones(1, requires_grad=True)
    noise = [torch.zeros(len(X), 6)]
    memory = runtime.preset("16gb", micro_batches=2)
    for _ in range(3):
        memory.forward_backward(lambda x: policy(x + noise[0].mean(0)).pow(2).mean(), X)
        noise[0] = scale * torch.ones(len(X), 6)
    assert "'noise', which has a graph of its own" in caplog.text
    assert "earlier call" not in caplog.text


def test_batches_are_counted_once_when_split():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    memory = runtime.preset("16gb", micro_batches=2)
    for count in (1, 2):
        memory.forward_backward(lambda x: model(x).pow(3).mean(), X)
        assert int(model[1].num_batches_tracked) == count


def test_a_batch_given_as_the_list_that_a_loader_makes_is_split():
    model, sizes = nn.Linear(6, 4), []

    def forward(batch):
        inputs, labels = batch
        sizes.append(len(inputs))
        return F.cross_entropy(model(inputs), labels)

    labels = torch.randint(0, 4, (8,))
    runtime.preset("16gb", micro_batches=2).forward_backward(forward, [X, labels])
    assert sizes[-2:] == [4, 4]


@pytest.mark.parametrize("write", ["inputs", "labels", "container"])
def test_a_forward_that_writes_its_batch_finds_it_as_it_was_at_a_second_try(write):
    def train(fails):
        torch.manual_seed(0)
        runtime.reset()
        model, memory, failures = nn.Linear(6, 4), runtime.preset("16gb"), iter([True] * fails)

        def forward(batch):
            labels = batch.pop("labels") if write == "container" else batch["labels"]
            inputs = batch["inputs"]
            if write == "inputs":
                inputs.sub_(0.5)
            elif write == "labels":
                labels += 1
            loss = F.cross_entropy(model(inputs), labels)
            if next(failures, False):
                raise OutOfMemoryError("CUDA out of memory")
            return loss

        batch = {"inputs": X.clone(), "labels": torch.arange(8) % 3}
        loss = memory.forward_backward(forward, batch)
        return loss, batch["inputs"], batch.get("labels"), model.weight.grad

    loss, inputs, labels, gradient = train(fails=True)
    expected = train(fails=False)
    assert torch.equal(inputs, expected[1])
    # pieces of a batch are containers of their own: taking something out of one leaves the caller's as it is
    assert write == "container" or torch.equal(labels, expected[2])
    assert torch.allclose(loss, expected[0], rtol=1e-6)
    assert torch.allclose(gradient, expected[3], rtol=1e-5, atol=1e-7)


def test_a_forward_that_writes_its_batch_may_be_split():
    model, sizes = nn.Linear(6, 4), []

    def forward(x):
        sizes.append(len(x))
        return model(x.mul_(2)).pow(2).mean()

    runtime.preset("16gb", micro_batches=4).forward_backward(forward, X.clone())
    assert sizes[-4:] == [2, 2, 2, 2]


class Carrying:
    """A trainer that is no module and carries a hidden state."""

    def __init__(self):
        self.model, self.hidden = nn.Linear(6, 4), None

    def loss(self, x):
        out = self.model(x) if self.hidden is None else self.model(x) + self.hidden
        self.hidden = out.detach().mean(0)
        return out.pow(2).mean()


def test_state_in_an_object_that_is_no_module_is_noticed_and_left_alone_by_the_check(caplog):
    plain, managed = Carrying(), Carrying()
    managed.model.load_state_dict(plain.model.state_dict())
    memory = runtime.preset("16gb", micro_batches=4)
    for _ in range(3):
        plain.loss(X).backward()
        memory.forward_backward(managed.loss, X)
    assert "it changes Carrying.hidden" in caplog.text
    assert torch.equal(managed.hidden, plain.hidden)
    assert torch.equal(managed.model.weight.grad, plain.model.weight.grad)


VIEWS = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
    "transposed": lambda z: z.t(),
    "one entry of a column": lambda z: z[:1, 1],  # in one piece, with the stride of a row
    "a column of one row": lambda z: z.real[:1, 1:2],
    "a scalar": lambda z: z[1, 2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_kept_of_a_view_is_what_the_view_shows(view):
    """A conjugate or negative view is a bit of the tensor: the numbers below it are others."""
    tensor = VIEWS[view](torch.randn(3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)))
    before, kept = tensor.clone(), KeptTensors([tensor], largest=2**20)
    tensor.mul_(2)
    assert kept.restore()
    assert torch.equal(tensor, before)


class WithTeacher(nn.Module):
    """Copies its encoder into an attribute when it is first run, as a place is kept for it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.teacher = nn.Linear(6, 4), None

    def forward(self, x):
        if not self.teacher:
            self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        return (self.encoder(x) - self.teacher(x.roll(1, 1))).pow(2).mean()


@pytest.mark.parametrize("kept", [None, 0])
def test_a_module_that_a_forward_puts_in_the_place_of_a_value_is_taken_out_again_by_checks(kept):
    """A module leaves the dictionary in which the value was."""
    torch.manual_seed(0)
    model, memory = WithTeacher().double(), runtime.preset("16gb", micro_batches=2, precision="fp32")
    model.teacher = kept
    plain = copy.deepcopy(model)
    for _ in range(3):
        x = X.double()
        expected = torch.autograd.grad(plain(x), [*plain.encoder.parameters()])
        model.zero_grad()
        memory.forward_backward(model, x)
        for parameter, gradient in zip(model.encoder.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.__iadd__])
def test_a_tensor_that_a_forward_begins_to_write_later_is_left_alone_by_the_check(write, caplog):
    """From the fourth call on, which is when what the first check saw is confirmed."""
    model, total, begins = nn.Linear(6, 4), torch.ones(()), torch.tensor(False)

    def forward(x):
        if begins:
            write(total, torch.tensor(2.0))
        return model(x).pow(2).mean()

    memory, expected = runtime.preset("16gb", micro_batches=4), torch.ones(())
    for call in range(1, 6):
        begins.fill_(call >= 4)
        memory.forward_backward(forward, X)
        if call >= 4:
            write(expected, torch.tensor(2.0))
        assert total == expected
    assert "it writes parameters, buffers or other tensors that outlive it" in caplog.text


def test_a_generator_among_the_arguments_is_put_back():
    def train(fails):
        runtime.reset()
        torch.manual_seed(0)
        model, failures, generator = nn.Linear(6, 4), iter([True] * fails), torch.Generator().manual_seed(1)

        def forward(x, generator):
            loss = model(x + torch.randn(6, generator=generator)).pow(2).mean()
            if next(failures, False):
                raise OutOfMemoryError("CUDA out of memory")
            return loss

        runtime.preset("16gb", split="never", checkpointing="off").forward_backward(forward, X, generator)
        return model.weight.grad, generator.get_state()

    for found, expected in zip(train(fails=True), train(fails=False), strict=True):
        assert torch.equal(found, expected)


def test_a_loose_parameter_first_used_between_calls_to_explore_keeps_its_earlier_gradient():
    net, scale, used, fails = nn.Linear(6, 4).double(), nn.Parameter(torch.rand(4).double()), [0], [0]

    class Holder:
        def __init__(self):
            self.scale = scale

    def fail_once(gradient):
        if fails[0]:
            fails[0] = 0
            raise OutOfMemoryError("CUDA out of memory")
        return gradient

    holder, x = Holder(), X.double()

    def forward(x):
        output = through(fail_once)(net(x))
        return (output * holder.scale if used[0] else output).pow(2).mean()

    memory = runtime.preset("16gb", checkpointing="off")
    for _ in range(2):
        memory.forward_backward(forward, x)
    scale.grad, used[0] = torch.ones(4).double(), 1
    expected = torch.autograd.grad(forward(x), scale)[0] + 1
    fails[0] = 1
    memory.forward_backward(forward, x)  # the third call: not one to explore
    assert not fails[0]
    assert torch.allclose(scale.grad, expected, rtol=1e-12)


def test_a_forward_may_read_a_number_out_of_a_table():
    """`scale = table[:1, 0]` is in one piece, with the stride of a row."""
    model, memory = nn.Linear(6, 1), runtime.preset("16gb", micro_batches=2)
    scale = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))[:1, 2]

    def forward(x):
        return (scale * model(x)).square().mean()

    loss = memory.forward_backward(forward, X)
    torch.testing.assert_close(loss, forward(X).detach())
