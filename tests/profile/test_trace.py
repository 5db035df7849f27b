"""What a trace writes down about real tensors: purpose, module, line, lifetime, and refusals."""

import inspect

import pytest
import torch
from torch import nn

from oomfix.profile import MemoryTrace, text
from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.cards import find_card
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.ledger import Ledger
from oomfix.profile.overheads import TRANSFORMER
from oomfix.profile.report import replay, report
from oomfix.profile.simulated_card import SimulatedCard

MIB = 2**20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64)

    def forward(self, x):
        return self.second(self.first(x).relu())


def step(model, optimizer, rows=512):
    optimizer.zero_grad()
    model(torch.ones(rows, 64)).sum().backward()
    optimizer.step()


def find(trace, **attributes):
    return [s for s in trace.storages if all(getattr(s, name) == value for name, value in attributes.items())]


def test_storages_know_their_module_line_and_phase():
    model = Net()
    with MemoryTrace() as trace:
        outputs = model(torch.ones(512, 64))
        line = inspect.currentframe().f_lineno - 1
    hidden = find(trace, module="Net.first")
    assert [(s.shape, s.phase) for s in hidden] == [((512, 128), "forward")]
    assert hidden[0].line == (__file__, inspect.getsourcelines(Net.forward)[1] + 1)
    assert find(trace, shape=(512, 64), phase="between" if not outputs.requires_grad else "setup")[0].line[1] == line


def test_views_and_operations_in_place_allocate_nothing():
    with MemoryTrace() as trace:
        x = torch.ones(100, 100)
        x.view(-1).t().add_(1)
        x[10:20].mul_(2)
    assert len(trace.storages) == 1


def test_weights_gradients_and_state_are_told_apart():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryTrace() as trace:
        for _ in range(2):
            step(model, optimizer)
        sizes = sorted(p.nbytes for p in model.parameters())
        assert sorted(s.requested_bytes for s in find(trace, category="weights")) == sizes
        assert sorted(s.requested_bytes for s in find(trace, category="gradients", died=None)) == sizes
        moments = [s.requested_bytes for s in find(trace, category="optimizer state") if s.shape]
        assert sorted(moments) == sorted(2 * sizes)


def test_what_a_backward_finds_is_an_activation_and_what_it_does_not_a_temporary():
    model = nn.Sequential(nn.Linear(256, 256), nn.Sigmoid())
    with MemoryTrace() as trace:
        loss = (model(torch.ones(1024, 256)) + 1).sum()
        loss.backward()
    found = report(trace, find_card("t4"), TRANSFORMER)
    at_sum = max((moment.breakdown for moment in found.timeline), key=lambda parts: sum(parts.values()))
    # kept: input, the sigmoid's output, the loss and its gradient; not kept: what was added to the output
    assert at_sum["activations"] == 2 * MIB + 2 * 512 and at_sum["temporaries"] >= MIB


def test_the_breakdown_sums_to_the_peak_and_the_peak_to_a_counter_s():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with SimulatedCard() as counter, MemoryTrace() as trace:
        trace.watch(model)
        counter.track(model)
        for _ in range(2):
            step(model, optimizer, rows=1024)
    found = report(trace, find_card("t4"), TRANSFORMER)
    assert sum(found.breakdown.values()) == found.peak_allocated_bytes
    live, peak = 0, 0
    for event in trace.events:
        live += trace.storages[event].requested_bytes if event >= 0 else -trace.storages[~event].requested_bytes
        peak = max(peak, live)
    assert peak == counter.peak_bytes


def test_a_full_card_refuses_and_holds_nothing_of_the_refused_operation():
    with MemoryTrace(CachingAllocator(capacity_bytes=40 * MIB)) as trace:
        kept = torch.ones(2 * MIB)
        with pytest.raises(
            OutOfMemoryError, match=r"Tried to allocate 40\.00 MiB.*total capacity of 40\.00 MiB"
        ) as error:
            torch.ones(2 * MIB).repeat(5)
        # the exception is still alive, with its frames
        assert trace.allocator.allocated_bytes == kept.nbytes, error
        assert (kept + 1).numel() == 2 * MIB


def test_a_replay_without_a_limit_is_the_run_itself():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTrace() as trace:
        for _ in range(2):
            step(model, optimizer, rows=2**14)
    again = replay(trace, None)
    assert again.peak_reserved_bytes == trace.allocator.peak_reserved_bytes
    assert replay(trace, again.peak_allocated_bytes - MIB) is None


def test_growth_is_that_of_what_stays():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with MemoryTrace() as trace:
        for _ in range(4):
            step(model, optimizer)
            kept.append(torch.ones(MIB))
    assert report(trace, find_card("t4"), TRANSFORMER).growth_bytes_per_step == 4 * MIB


def test_two_steps_do_not_tell_what_grows_from_what_is_made_once():
    found = {"growth_bytes_per_step": MIB, "card": {"capacity_gib": 15.0}, "context_bytes": 0, "peak_reserved_bytes": 0}
    found |= {"budget_bytes": None, "out_of_memory": None}
    once = "  1.0 MiB more stay after step 2 than after step 1: --steps 6 says whether it grows on"
    assert text._growth({**found, "steps": [{}] * 2}) == [once]
    assert text._growth({**found, "steps": [{}] * 3}) == ["  grows 1.0 MiB per step on average: full after 15360 more"]
    refused = {**found, "steps": [{}] * 3, "budget_bytes": 2**30}
    assert text._growth(refused) == ["  grows 1.0 MiB per step on average: full after 1024 more"]
    assert text._growth({**refused, "out_of_memory": "here"}) == ["  grows 1.0 MiB per step on average: already full"]


def test_what_is_made_once_is_no_growth():
    """A copy of the best weights after the first of four steps."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTrace() as trace:
        for number in range(4):
            step(model, optimizer)
            if number == 1:
                kept = torch.ones(MIB)
    assert kept.nbytes and report(trace, find_card("t4"), TRANSFORMER).growth_bytes_per_step == 0


def test_batches_that_grow_are_no_growth():
    """The inputs of the last step are alive where it ends, and larger every time."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTrace() as trace:
        for rows in (8, 16, 32, 64, 128, 256):
            inputs = torch.zeros(rows * 1024)
            step(model, optimizer)
    found = report(trace, find_card("t4"), TRANSFORMER)
    assert found.steps[-1].live_bytes - found.steps[-2].live_bytes == inputs.nbytes // 2
    assert found.growth_bytes_per_step == 0


def test_room_to_spare_in_a_block_is_no_growth():
    """18.25 MiB move, after half of the steps, into a free block of 18.75, which is not split."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mebibytes(number):
        return torch.ones(int(number * MIB), dtype=torch.uint8)

    with MemoryTrace() as trace:
        kept, hole, behind = mebibytes(18.25), mebibytes(18.75), mebibytes(1.25)
        for number in range(6):
            step(model, optimizer)
            if number == 1:
                del hole
            if number == 4:
                kept, old = mebibytes(18.25), kept
                del old
    found = report(trace, find_card("t4"), TRANSFORMER)
    allocated = [held for _, held, _ in trace.steps]
    assert kept.nbytes and behind.nbytes and allocated[5] - allocated[4] == MIB // 2
    assert found.steps[5].live_bytes == found.steps[4].live_bytes and found.growth_bytes_per_step == 0


@pytest.mark.parametrize(("grad", "category"), [(True, "activations"), (False, "temporaries")])
def test_what_an_evaluation_with_gradients_keeps_are_activations(grad, category):
    """No backward comes for them; without gradients they are gone before the forward ends."""
    model = Net()
    with MemoryTrace() as trace, torch.set_grad_enabled(grad):
        output = model(torch.ones(2**12, 64))
        del output
    (hidden,) = find(trace, operation="aten.relu.default")
    ledger = Ledger(trace)
    position = hidden.born + 1
    assert ledger.breakdown(position)[category] >= hidden.nbytes
    assert hidden.died == trace.forward_ends[0] if grad else hidden.died < trace.forward_ends[0]


def test_an_average_of_the_weights_is_no_activation():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTrace() as trace:
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            step(model, optimizer)
            average = [0.9 * old + 0.1 * new.detach() for old, new in zip(average, model.parameters(), strict=True)]
    found = report(trace, find_card("t4"), TRANSFORMER)
    assert found.breakdown["other"] == found.breakdown["weights"]
