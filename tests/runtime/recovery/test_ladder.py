"""The ladder: a call that does not fit and may not be split takes the cheapest technique that is left, exactly."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.memory.oom import DoesNotFitError
from oomfix.runtime.recovery import rungs
from oomfix.runtime.techniques import chunked_losses, offloading
from oomfix.runtime.techniques.checkpointing import is_checkpointed

CHUNKS, BLOCKS, HOST = "cross entropy in chunks", "checkpointing 3 blocks", "activations in host memory"


class Net(nn.Module):
    """Blocks with dropout, then logits."""

    def __init__(self, classes=50):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.blocks(x))


def coupled_loss(model, x, y):
    """A loss that may not be split: every sample is normalised by all of them."""
    logits = model(x)
    return F.cross_entropy(logits / logits.std(0), y)


@pytest.fixture
def card(monkeypatch):
    """Lets the CPU count as a card that has a host, and logits of any size as large."""
    monkeypatch.setattr(rungs.Offloading, "take", lambda self, iteration: True)
    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(offloading.HostMemory.__init__, "__defaults__", (0,), raising=False)
    monkeypatch.setattr(rungs, "offload_activations", lambda: offloading.offload_activations(0))
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", 0)


@pytest.fixture
def batch():
    return torch.randn(24, 16).double(), torch.randint(0, 50, (24,))


class Failing:
    """`coupled_loss` that runs out of memory in backward as often as it is told."""

    failures = 0  # of the class: attributes of the forward itself are put back

    def __init__(self, model, failures):
        self.model = model
        Failing.failures = failures

    def __call__(self, x, y):
        loss = coupled_loss(self.model, x, y)
        if len(x) == 24:
            loss.register_hook(self.fail)
        return loss

    def fail(self, gradient):
        if Failing.failures:
            Failing.failures -= 1
            raise OutOfMemoryError("CUDA out of memory")


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("failures", "on"), [(0, []), (1, [CHUNKS]), (2, [CHUNKS, BLOCKS]), (3, [CHUNKS, BLOCKS, HOST])]
)
def test_each_failure_takes_the_next_rung_and_gradients_stay(card, batch, failures, on, relative_error):
    model = Net().double()
    reference = copy.deepcopy(model)
    torch.manual_seed(7)
    coupled_loss(reference, *batch).backward()
    memory = runtime.preset("16gb")
    torch.manual_seed(7)
    memory.forward_backward(Failing(model, failures), *batch)
    assert [technique.name for technique in memory.report().techniques] == on
    assert relative_error(model, reference) < 1e-12


def test_what_is_taken_stays_for_later_calls_and_is_told_once(card, batch, caplog):
    model = Net().double()
    memory, forward = runtime.preset("16gb"), Failing(model, 3)
    for _ in range(3):
        memory.forward_backward(forward, *batch)
    told = [record.message for record in caplog.records if "it goes on with" in record.message]
    assert len(told) == 1
    assert told[0].endswith(f"it goes on with {CHUNKS}, {BLOCKS}, {HOST}.")
    assert memory.report().retries == 3


def test_a_climb_is_bitwise_the_run_that_began_with_the_rungs(card, batch):
    model = Net().double()
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    runtime.preset("16gb").forward_backward(Failing(model, 3), *batch)
    runtime.reset()
    began = runtime.preset("16gb", chunked_loss="on", checkpointing="on", offloading="on")
    began.prepare(twin)
    torch.manual_seed(3)
    began.forward_backward(Failing(twin, 0), *batch)
    assert [technique.name for technique in began.report().techniques] == [CHUNKS, HOST, BLOCKS]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))


def test_a_rung_that_was_of_no_use_is_left(card, batch, monkeypatch):
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", 2**20)  # above these logits
    model = Net().double()
    memory = runtime.preset("16gb")
    memory.forward_backward(Failing(model, 2), *batch)
    assert [technique.name for technique in memory.report().techniques] == [BLOCKS]


def test_a_policy_that_is_off_is_no_rung_and_a_choice(card, batch):
    memory = runtime.preset("16gb", chunked_loss="off", offloading="off")
    with pytest.raises(DoesNotFitError) as caught:
        memory.forward_backward(Failing(Net().double(), 99), *batch)
    assert f"out of memory even with {BLOCKS}" in str(caught.value)
    assert "Choices: chunked_loss='if-needed'; offloading='if-needed'; split='always'" in str(caught.value)


def test_every_forward_climbs_for_itself(card, batch):
    """What one model takes is not taken for another that also runs out of memory."""
    memory = runtime.preset("16gb", chunked_loss="off", offloading="off")
    first, second = Net().double(), Net().double()
    memory.forward_backward(Failing(first, 1), *batch)
    assert is_checkpointed(first) and not is_checkpointed(second)
    memory.forward_backward(Failing(second, 1), *batch)
    assert is_checkpointed(second)


def test_checkpointing_that_changes_gradients_is_no_rung(card, batch, caplog):
    class Hidden(nn.Sequential):
        draws = iter(range(1, 999))

        def forward(self, x):
            return super().forward(x) * (1 / next(self.draws))

    model = Net().double()
    model.blocks = nn.Sequential(*(Hidden(*block) for block in model.blocks))
    memory = runtime.preset("16gb", chunked_loss="off")
    memory.forward_backward(Failing(model, 1), *batch)
    assert [technique.name for technique in memory.report().techniques] == [HOST]
    assert "Net is not checkpointed, because that changes its gradients" in caplog.text


def test_a_single_sample_climbs_and_larger_micro_batches_are_tried_again(card):
    model = Net().double()
    x, y = torch.randn(8, 16).double(), torch.randint(0, 50, (8,))
    sizes, limit = [], 0

    def forward(x, y):
        loss = F.cross_entropy(model(x), y)
        if torch.is_grad_enabled() and is_checkpointed(model) is False and len(x) > limit:
            raise OutOfMemoryError("CUDA out of memory")
        sizes.append(len(x))
        return loss

    memory = runtime.preset("16gb", chunked_loss="off", split="always")
    for _ in range(4):
        sizes.clear()
        memory.forward_backward(forward, x, y)
    assert [technique.name for technique in memory.report().techniques] == ["micro-batches", BLOCKS]
    assert max(sizes) == 8


def test_an_episode_is_one_sample_whose_state_counts_once(card, relative_error):
    """`batch_size=1` keeps a batch whole without a check; what a failed run left in its model is taken back."""

    class Episodes(Net):
        def __init__(self):
            super().__init__()
            self.history, self.weight, self.runs = {"losses": []}, 1.0, []

        def loss(self, x, y):
            self.runs.append(len(x))
            loss = coupled_loss(self, x, y)
            self.history["losses"].append(float(loss.detach()))
            loss = self.weight * loss
            self.weight = 0.1 + sum(self.history["losses"]) / len(self.history["losses"])
            return loss

    def train(model, forward_backward):
        torch.manual_seed(5)
        for _ in range(3):
            forward_backward(torch.randn(24, 16).double(), torch.randint(0, 50, (24,)))
        return model

    model = Episodes().double()
    reference = copy.deepcopy(model)
    train(reference, lambda x, y: reference.loss(x, y).backward())
    memory = runtime.preset("16gb")
    Failing.failures = 2

    def forward(x, y):
        loss = model.loss(x, y)
        loss.register_hook(Failing(model, Failing.failures).fail)
        return loss

    train(model, lambda x, y: memory.forward_backward(forward, x, y, batch_size=1))
    assert [technique.name for technique in memory.report().techniques] == [CHUNKS, BLOCKS]
    assert relative_error(model, reference) < 1e-12
    assert model.runs == [24, 24, 24]
    assert model.history["losses"] == pytest.approx(reference.history["losses"], rel=1e-12)
    assert model.weight == pytest.approx(reference.weight, rel=1e-12)


def test_evaluation_takes_no_rung(card):
    def forward(x):
        raise OutOfMemoryError("CUDA out of memory")

    memory = runtime.preset("16gb")
    with pytest.raises(DoesNotFitError) as caught:
        memory.evaluate(forward, torch.randn(1, 4))
    assert "checkpointing" not in str(caught.value)
    assert memory.report().techniques == ()


# -- what it saves, as the report says -------------------------------------------------------------------------


def test_what_offloading_saves_is_what_it_moved(card, batch):
    model = Net().double()
    with offloading.offload_activations(0) as host:
        coupled_loss(model, *batch)
    memory = runtime.preset("16gb", chunked_loss="off", checkpointing="off", offloading="on")
    memory.forward_backward(Failing(model, 0), *batch)
    (technique,) = memory.report().techniques
    assert technique.saved_bytes == host.moved_bytes > 0


def test_what_checkpointing_saves_is_what_is_kept_less(batch):
    """Activations are counted by a card, with and without; Tanh and the layers after it keep one tensor."""
    x, y = batch
    model = Net().double().eval()

    def held():
        with SimulatedCard() as card:
            loss = coupled_loss(model, x, y)
            return card.current_bytes, loss

    plain_bytes, _ = held()
    memory = runtime.preset("16gb", checkpointing="on")
    memory.prepare(model)
    memory.forward_backward(Failing(model, 0), x, y)
    checkpointed_bytes, _ = held()
    (technique,) = memory.report().techniques
    assert technique.saved_bytes == plain_bytes - checkpointed_bytes > 0


def test_the_report_says_since_when_and_why(card, batch):
    memory = runtime.preset("16gb", chunked_loss="off", checkpointing="off")
    forward = Failing(Net().double(), 0)
    memory.forward_backward(forward, *batch)
    Failing.failures = 1
    memory.forward_backward(forward, *batch)
    line = str(memory.report()).splitlines()[-1]
    assert line.startswith(f"  Failing: {HOST} since training call 2, because the call ran out of memory; saves ")
    assert line.endswith("MiB (moved to the host by one micro-batch)")


def test_one_line_says_what_a_forward_begins_with_and_what_is_left(card, batch, caplog):
    caplog.set_level("INFO", "oomfix")
    memory = runtime.preset("16gb", checkpointing="on", precision="bf16")
    model = memory.prepare(Net().double())
    forward = Failing(model, 0)
    for _ in range(2):
        memory.forward_backward(forward, *batch)
    assert caplog.messages == [
        f"Failing: preset 16gb begins with bf16 autocast, {BLOCKS}; when memory asks for it: micro-batches, "
        f"{CHUNKS}, {HOST}."
    ]


def test_a_model_with_a_switch_of_its_own_is_called_by_its_name():
    class Switched(Net):
        def set_grad_checkpointing(self, enable=True):
            self.grad_checkpointing = enable

    memory = runtime.preset("16gb", checkpointing="on")
    model = memory.prepare(Switched().double())
    memory.forward_backward(lambda x: model(x).pow(2).mean(), torch.randn(4, 16).double())
    assert [technique.name for technique in memory.report().techniques] == ["checkpointing Switched"]
