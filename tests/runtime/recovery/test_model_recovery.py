"""Loops left in place: a model call that runs out of memory starts again with a technique more, exactly."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.memory.oom import DoesNotFitError
from oomfix.runtime.recovery import rungs
from oomfix.runtime.techniques import offloading
from oomfix.runtime.techniques.checkpointing import is_checkpointed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Linear(256, 16)

    def forward(self, x):
        return x + self.back(F.dropout(torch.tanh(self.norm(self.wide(x))), 0.2))


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*[Block() for _ in range(4)]), nn.Linear(16, outputs))


def adversaries(memory, limit=None, steps=3):
    """A GAN in a loop that nothing can split, on a card of `limit` bytes: its weights, buffers and peak."""
    generator, critic = network(16), network(1)
    of_generator, of_critic = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    if memory is not None:
        memory.prepare(generator)
        memory.prepare(critic)
        call, backward = memory.forward, memory.backward
    else:
        call, backward = (lambda model, x: model(x)), torch.Tensor.backward
    torch.manual_seed(1)
    with SimulatedCard(limit) as card:
        card.track(generator)
        card.track(critic)
        for _ in range(steps):
            real, noise = torch.randn(2, 128, 16)
            fake = call(generator, noise)
            loss = F.softplus(-call(critic, real)).mean() + F.softplus(call(critic, fake.detach())).mean()
            of_critic.zero_grad()
            backward(loss)
            of_critic.step()
            loss = F.softplus(-call(critic, fake)).mean()
            of_generator.zero_grad()
            backward(loss)
            of_generator.step()
            del fake, loss
    state = [*generator.state_dict().values(), *critic.state_dict().values()]
    return state, card.peak_bytes


def test_a_loop_that_did_not_fit_trains_bitwise_as_it_would_have(caplog):
    """Forwards that run out of memory half way are put back, dropout and running statistics too."""
    plain, whole_bytes = adversaries(None)
    _, least_bytes = adversaries(runtime.preset("16gb", checkpointing="on"))
    runtime.reset()
    limit = (least_bytes + whole_bytes) // 2
    with pytest.raises(OutOfMemoryError):
        adversaries(None, limit)
    memory = runtime.preset("16gb")
    state, peak_bytes = adversaries(memory, limit)
    assert all(map(torch.equal, state, plain))
    assert peak_bytes <= limit < whole_bytes
    names = {technique.name for technique in memory.report().techniques}
    assert any(name.startswith("checkpointing") for name in names)
    told = [
        message for message in caplog.messages if "its loop was left in place; it goes on with checkpointing" in message
    ]
    assert told


class Failing(nn.Module):
    """Draws, counts in a buffer, and runs out of memory as often as it is told."""

    left = 0

    def __init__(self, where="forward"):
        super().__init__()
        self.where = where
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)])
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        out = F.dropout(self.blocks(x))
        if len(x) == 8 and out.requires_grad:
            if self.where == "forward":
                self.fail()
            else:
                out.register_hook(self.fail)
        return out

    @staticmethod
    def fail(gradient=None):
        if Failing.left:
            Failing.left -= 1
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def card(monkeypatch):
    """Lets the CPU count as a card that has a host."""
    monkeypatch.setattr(rungs.Offloading, "take", lambda self, iteration: True)
    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(rungs, "offload_activations", lambda: offloading.offload_activations(0))


@pytest.mark.parametrize(
    ("failures", "on"),
    [(0, []), (1, ["checkpointing 3 blocks"]), (2, ["checkpointing 3 blocks", "activations in host memory"])],
)
def test_each_failure_of_a_call_takes_a_rung_and_leaves_no_trace(card, batch, failures, on):
    model = Failing()
    reference = copy.deepcopy(model)
    torch.manual_seed(2)
    reference(batch).square().mean().backward()
    memory = runtime.preset("16gb")
    memory.prepare(model)
    Failing.left = failures
    torch.manual_seed(2)
    memory.backward(memory.forward(model, batch).square().mean())
    assert [technique.name for technique in memory.report().techniques] == on
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert model.calls == 1 and model.seen == [8]


def test_a_call_for_which_nothing_is_left_fails_as_torch_does(card, batch):
    memory, model = runtime.preset("16gb"), Failing()
    memory.prepare(model)
    Failing.left = 99
    with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as failure:
        memory.forward(model, batch)
    Failing.left = 0
    assert not isinstance(failure.value, DoesNotFitError)
    assert failure.traceback[-1].name == "fail"


def test_a_loop_that_catches_a_failed_backward_goes_on_with_a_technique_more(batch):
    memory, model = runtime.preset("16gb"), Failing("backward")
    memory.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Failing.left, said = 1, []
    for _ in range(2):
        try:
            memory.backward(memory.forward(model, batch).square().mean())
        except DoesNotFitError as failure:
            said.append(str(failure))
            assert not is_checkpointed(model)
            memory.zero_grad(optimizer)
            continue
        memory.step(optimizer)
    (error,) = said
    assert "The next call of Failing takes a technique more" in error
    assert "memory.forward_backward" in error and "checkpointing='on'" in error
    assert is_checkpointed(model)


def test_a_failed_backward_promises_nothing_where_nothing_is_left(batch):
    memory, model = runtime.preset("16gb", checkpointing="off", offloading="off"), Failing("backward")
    Failing.left = 1
    with pytest.raises(DoesNotFitError) as failure:
        memory.backward(memory.forward(model, batch).square().mean())
    assert "technique more" not in str(failure.value)


def test_a_call_that_has_written_an_input_with_a_graph_is_not_started_again(batch):
    """The writing is a part of that graph: a second try would pass it twice."""

    class Writing(Failing):
        def forward(self, x):
            return super().forward(F.relu_(x))

    memory, model = runtime.preset("16gb"), Writing()
    Failing.left = 1
    with pytest.raises(OutOfMemoryError):
        memory.forward(model, batch.requires_grad_() * 2)
    assert Failing.left == 0 and not is_checkpointed(model)


def test_checkpointing_that_changes_gradients_is_not_put_on(batch, caplog):
    class Hidden(nn.Sequential):
        draws = iter(range(1, 999))

        def forward(self, x):
            return super().forward(x) * (1 / next(self.draws))

    memory, model = runtime.preset("16gb"), Failing()
    model.blocks = nn.Sequential(*(Hidden(*block) for block in model.blocks))
    Failing.left = 1
    memory.forward(model, batch)  # the last try, which has no technique more, is made all the same
    assert not is_checkpointed(model)
    assert "Failing is not checkpointed, because that changes its gradients" in caplog.text


def test_evaluation_is_left_to_torch(batch):
    memory, model = runtime.preset("16gb"), Failing()
    with torch.no_grad():
        memory.forward(model, batch)
    assert memory.report().techniques == ()
