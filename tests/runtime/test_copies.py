"""Copies and checkpoints in the middle of training: of models, optimizers, and of what holds the manager."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from oomfix import runtime

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.relu(self.inner(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList(Block() for _ in range(3)), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Task(nn.Module):
    """A model that keeps the manager it is trained by."""

    def __init__(self, memory):
        super().__init__()
        self.memory, self.net = memory, nn.Linear(6, 4)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def manager(precision="fp32"):
    return runtime.preset("8gb", precision=precision)


def step(memory, model, optimizer):
    memory.forward_backward(lambda x, y: F.cross_entropy(model(x), y), X, Y)
    memory.step(optimizer)


def plain_step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_an_average_over_a_prepared_model_is_bitwise_that_over_a_plain_one():
    reference = Net()
    model = manager().prepare(copy.deepcopy(reference))
    averages = []
    for net, train in ((reference, plain_step), (model, lambda *args: step(manager(), *args))):
        torch.manual_seed(3)
        optimizer, average = adamw(net), AveragedModel(net)
        for _ in range(4):
            train(net, optimizer)
            average.update_parameters(net)
        averages.append(average.eval())
    assert equal(*averages)
    assert torch.equal(averages[0](X), averages[1](X))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_copy_made_in_training_is_a_model_of_its_own(precision):
    memory, model = manager(precision), Net()
    memory.prepare(model)
    optimizer = adamw(model)
    step(memory, model, optimizer)
    teacher = copy.deepcopy(model)
    before, outputs = copy.deepcopy(teacher.state_dict()), teacher.eval()(X)
    step(memory, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert outputs.dtype == torch.float32 and torch.equal(teacher(X), outputs)
    assert not equal(teacher, model)


def test_a_copy_trains_as_the_model_it_was_copied_from():
    """Rolling back to the best epoch: model and optimizer are copied, and training goes on with the copies."""
    memory, model = manager(), Net()
    memory.prepare(model)
    optimizer = adamw(model)
    step(memory, model, optimizer)
    kept_model, kept_state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    results = []
    for net in (model, kept_model):
        torch.manual_seed(4)
        optimizer = adamw(net)
        optimizer.load_state_dict(copy.deepcopy(kept_state))
        step(memory, net, optimizer)
        results.append(net)
    assert equal(*results)


def test_a_model_saved_whole_comes_back():
    memory, model = manager("fp16"), Net()
    memory.prepare(model)
    optimizer = adamw(model)
    step(memory, model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert equal(loaded["model"], model)
    assert torch.equal(loaded["model"].eval()(X), model.eval()(X))
    assert list(Net().state_dict()) == list(loaded["model"].state_dict())


def test_a_copy_of_what_holds_the_manager_holds_the_same_one():
    memory = manager()
    task = Task(memory)
    step(memory, task.net, adamw(task.net))
    assert copy.deepcopy(task).memory is memory
    assert copy.copy(memory) is memory


def test_what_holds_a_manager_can_be_sent_to_another_process():
    """There it starts with the same policies, and has learned nothing."""
    memory = manager("fp16")
    task = Task(memory)
    step(memory, task.net, adamw(task.net))
    arrived = pickle.loads(pickle.dumps(task))
    assert arrived.memory.preset == memory.preset
    assert arrived.memory.report().steps == 0
    assert equal(arrived.net, task.net)
