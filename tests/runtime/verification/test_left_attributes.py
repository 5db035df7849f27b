"""An attribute that every run writes before it reads it is no state; one that a run reads first is."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.compat import OutOfMemoryError

X, Y = torch.randn(16, 5, 4).double(), torch.randn(16, 5, 4).double()


class KeepsItsMap(nn.Module):
    """Keeps its attention for whoever wants to look at it, and reads it itself later in the forward."""

    def __init__(self):
        super().__init__()
        self.query, self.attention, self.auxiliary, self.seen = nn.Linear(4, 4), None, 0.0, 0

    def forward(self, x):
        self.attention = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        self.auxiliary, self.seen = self.attention.pow(2).mean(), len(x)
        return self.attention @ self.query(x)


class Follows(KeepsItsMap):
    """Reads what the run before has left."""

    def forward(self, x):
        before = 0.0 if self.attention is None else self.attention.pow(2).mean().detach()
        return super().forward(x) + before


def train(model, calls=3, **overrides):
    """Gradients of each call, and the sizes of the last call's pieces."""
    memory, sizes, gradients = runtime.preset("16gb", **overrides), [], []

    def forward(x, y):
        sizes.append(len(x))
        return F.mse_loss(model(x), y) + 0.1 * model.auxiliary

    for _ in range(calls):
        model.zero_grad()
        memory.forward_backward(forward, X, Y)
        gradients.append(model.query.weight.grad)
    return gradients, sizes, model


@pytest.fixture
def models():
    def make(kind):
        first, second = kind().double(), kind().double()
        second.load_state_dict(first.state_dict())
        return first, second

    return make


def test_a_forward_that_keeps_its_attention_map_is_split(models):
    whole, split = models(KeepsItsMap)
    expected = train(whole, split="never")[0]
    runtime.reset()
    gradients, sizes, _ = train(split, micro_batches=4)
    assert sizes[-4:] == [4, 4, 4, 4]
    for found, gradient in zip(gradients, expected, strict=True):
        assert torch.allclose(found, gradient, rtol=1e-12)


def test_numbers_left_in_attributes_are_those_of_the_whole_batch(models):
    whole, split = models(KeepsItsMap)
    train(whole, split="never")
    runtime.reset()
    train(split, micro_batches=4)
    assert torch.allclose(split.auxiliary, whole.auxiliary, rtol=1e-12)
    assert split.seen == 16


def test_an_attribute_that_is_read_first_keeps_the_batch_whole(models):
    whole, split = models(Follows)
    expected = train(whole, split="never")[0]
    runtime.reset()
    gradients, sizes, _ = train(split, micro_batches=4)
    assert sizes[-1] == 16
    for found, gradient in zip(gradients, expected, strict=True):
        assert torch.equal(found, gradient)


_calls = 0


@pytest.mark.parametrize("kind", ["nonlocal", "global", "in a helper"])
def test_a_variable_that_a_forward_counts_in_is_not_counted_in_by_checks(kind, caplog):
    global _calls
    net, calls, _calls = nn.Linear(4, 4).double(), 0, 0

    def count():
        nonlocal calls
        calls += 1

    def counts_itself(x, y):
        nonlocal calls
        calls += 1
        return F.mse_loss(net(x), y)

    def counts_in_the_module(x, y):
        global _calls
        _calls += 1
        return F.mse_loss(net(x), y)

    def counts_in_a_helper(x, y):
        count()
        return F.mse_loss(net(x), y)

    forwards = {"nonlocal": counts_itself, "global": counts_in_the_module, "in a helper": counts_in_a_helper}
    memory = runtime.preset("16gb", micro_batches=4)
    for _ in range(4):
        memory.forward_backward(forwards[kind], X, Y)
    assert (_calls if kind == "global" else calls) == 4
    assert "keeps state of its own between calls: it changes the variable" in caplog.text


def test_a_hidden_state_in_a_variable_is_put_back_when_a_call_starts_again():
    def train(fails):
        runtime.reset()
        torch.manual_seed(0)
        net, hidden, failures = nn.Linear(4, 4).double(), torch.zeros(4).double(), iter([True] * fails)

        def forward(x):
            nonlocal hidden
            output = net(x) + hidden
            hidden = output.detach().mean((0, 1))
            if next(failures, False):
                raise OutOfMemoryError("CUDA out of memory")
            return output.pow(2).mean()

        runtime.preset("16gb", checkpointing="off", split="never").forward_backward(forward, X)
        return hidden, net.weight.grad

    for found, expected in zip(train(fails=True), train(fails=False), strict=True):
        assert torch.equal(found, expected)


class Logs(nn.Module):
    """A module with its training step, which notes what it saw under names, as Lightning's do."""

    def __init__(self):
        super().__init__()
        self.net, self.log, self.history = nn.Linear(4, 4), {}, {"train": {"loss": 0.0}, "rate": 0.1}

    def training_step(self, x, y):
        error = (self.net(x) - y).pow(2)
        loss = error.mean()
        self.log.update(loss=loss.detach(), largest=error.flatten(1).max(1).values.detach(), samples=len(x))
        self.history["train"]["loss"] = loss.item()
        return loss


def test_numbers_left_in_dictionaries_are_those_of_the_whole_batch(models):
    whole, split = models(Logs)
    memory, log, history = runtime.preset("16gb", micro_batches=3), split.log, split.history["train"]
    for rows in (16, 16, 7):
        whole.training_step(X[:rows], Y[:rows])
        memory.forward_backward(split.training_step, X[:rows], Y[:rows])
        assert torch.allclose(log["loss"], whole.log["loss"], rtol=1e-12)
        assert log["samples"] == rows
        assert history["loss"] == pytest.approx(whole.history["train"]["loss"], rel=1e-12)
        assert len(log["largest"]) < rows
    assert split.log is log
    assert split.history["train"] is history
    assert split.history["rate"] == 0.1


class Counts(nn.Module):
    """Counts its calls in a dictionary of dictionaries, for whoever wants to know."""

    def __init__(self):
        super().__init__()
        self.net, self.state = nn.Linear(4, 4), {"train": {"steps": 0}, "past": [[0.0]]}

    def forward(self, x):
        self.state["train"]["steps"] += 1
        return self.net(x)


def test_state_in_containers_of_containers_keeps_the_batch_whole(models):
    whole, split = models(Counts)
    memory = runtime.preset("16gb", micro_batches=3)

    def forward(x, y):
        return F.mse_loss(split(x), y)

    for _ in range(3):
        whole.zero_grad()
        split.zero_grad()
        F.mse_loss(whole(X), Y).backward()
        memory.forward_backward(forward, X, Y)
        assert split.state == whole.state
        assert torch.equal(split.net.weight.grad, whole.net.weight.grad)


def last_state(kind):
    """Where a recurrent network keeps its last state: a container, and functions that read and write it."""
    kept = {"dictionary": {"h": None}, "new key": {}, "list": [None], "record": [], "inner": {"state": {}}}[kind]
    inner = kept["state"] if kind == "inner" else kept
    if kind == "record":
        return kept, lambda: kept[-1] if kept else None, kept.append
    key = 0 if kind == "list" else "h"
    if kind == "list":
        return kept, lambda: inner[key], lambda value: inner.__setitem__(key, value)
    return kept, lambda: inner.get(key), lambda value: inner.__setitem__(key, value)


def trained_from_state_to_state(kind, run):
    """Gradients and states after some calls; batches of another size begin anew, so parts of a check all do."""
    torch.manual_seed(0)
    net, (kept, read, write) = nn.GRU(4, 3, batch_first=True).double(), last_state(kind)

    def forward(x):
        before = read()
        if before is None or before.shape[1] != len(x):
            before = torch.zeros(1, len(x), 3).double()
        out, after = net(x, before)
        write(after.detach())
        return out.pow(2).mean(), len(kept)

    found = []
    for rows in (12, 12, 9, 12, 12):
        run(forward, X[:rows])
        found += [*(parameter.grad.clone() for parameter in net.parameters()), read().clone()]
    return found


@pytest.mark.parametrize("kind", ["dictionary", "new key", "list", "record", "inner"])
def test_a_state_that_is_read_in_a_container_keeps_the_batch_whole(kind):
    expected = trained_from_state_to_state(kind, lambda forward, x: forward(x)[0].backward())
    memory = runtime.preset("16gb", micro_batches=3)
    found = trained_from_state_to_state(kind, memory.forward_backward)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert "keeps state of its own" in memory.report().forwards[0].whole_because


READ_RECORDS = {
    "mean of the last": lambda loss, record: loss * (sum(record[-3:]) / len(record[-3:])),
    "mean of all": lambda loss, record: loss + sum(record) / len(record) * loss,
    "the first": lambda loss, record: loss / record[0],
    "the one before": lambda loss, record: loss * loss.item() / record[-2] if len(record) > 1 else loss,
}


@pytest.mark.parametrize("kind", [list, deque])
@pytest.mark.parametrize("entry", [torch.Tensor.item, torch.Tensor.detach])
@pytest.mark.parametrize("read", READ_RECORDS)
def test_a_record_of_losses_that_is_read_gives_the_gradients_of_whole_batches(read, entry, kind):
    """It begins empty: of the first run, the mean is what that added itself, and it still is where that is added again.

    The first loss divides all that come later, and keeps none of them whole.
    """

    def trained(run):
        torch.manual_seed(0)
        net, record = nn.Linear(4, 4).double(), kind()

        def forward(x, y):
            loss = F.mse_loss(net(x), y)
            record.append(entry(loss))
            return READ_RECORDS[read](loss, list(record))

        for _ in range(3):
            run(forward)
        return net.weight.grad

    expected = trained(lambda forward: forward(X, Y).backward())
    memory = runtime.preset("16gb", micro_batches=3)
    found = trained(lambda forward: memory.forward_backward(forward, X, Y))
    assert torch.allclose(found, expected, rtol=1e-12)


def test_a_record_holds_nothing_of_a_check_that_fails():
    """Samples in the second dimension, which a check tries too, do not fit the network."""
    net, record = nn.Linear(4, 4).double(), []

    def forward(x, y):
        loss = F.mse_loss(net(x), y)
        record.append(loss.item())
        return loss * sum(record)

    memory = runtime.preset("16gb", micro_batches=3)
    for _ in range(3):
        memory.forward_backward(forward, X[:, 0], Y[:, 0])
    assert len(record) == 3


@pytest.mark.parametrize("kind", [dict, set])
def test_a_container_that_is_only_written_to_leaves_the_batch_split_and_holds_nothing_of_checks(kind):
    net, seen, memory = nn.Linear(4, 4).double(), kind(), runtime.preset("16gb", micro_batches=4)

    def forward(x, y):
        seen.update({len(x): True} if kind is dict else {len(x)})
        return F.mse_loss(net(x), y)

    memory.forward_backward(forward, X, Y)
    assert list(seen) == [4]
    assert memory.report().forwards[0].micro_batches == 4
