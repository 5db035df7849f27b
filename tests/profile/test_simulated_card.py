"""The simulated card counts what is live to the byte, and refuses what does not fit."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.simulated_card import SimulatedCard

FLOAT = 4


def small_model():
    """Linear(10, 20), ReLU, Linear(20, 3): 283 parameters, 1132 bytes."""
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))


def test_an_allocation_counts_while_it_lives():
    with SimulatedCard() as card:
        first = torch.empty(100)
        assert card.current_bytes == 400
        second = torch.empty(50, dtype=torch.float64)
        assert card.current_bytes == 800
        del first
        assert card.current_bytes == 400
        del second
        assert (card.current_bytes, card.peak_bytes, card.allocations) == (0, 800, 2)


def test_views_share_one_storage_and_keep_all_of_it():
    with SimulatedCard() as card:
        whole = torch.zeros(100)
        row = whole.view(10, 10)[3]
        alias = row.detach()
        assert (card.current_bytes, card.allocations) == (400, 1)
        del whole, row
        assert card.current_bytes == 400
        del alias
        assert card.current_bytes == 0


def test_a_view_of_an_untracked_tensor_costs_nothing():
    batch = torch.zeros(100)
    with SimulatedCard() as card:
        part = batch[:10]
        part.add_(1)
        assert card.current_bytes == 0
        assert (part + 1).sum().item() == 20
        assert card.current_bytes == 0


def test_tensors_filled_outside_the_dispatcher_count():
    model = small_model()
    model.register_buffer("scale", torch.ones(25))
    with SimulatedCard() as card:
        literal = torch.tensor([1.0, 2.0])
        assert card.current_bytes == 8
        del literal
        card.track(model)
        average = copy.deepcopy(model)
        assert card.current_bytes == 2 * (1132 + 100)
        del average
        gc.collect()
        assert card.current_bytes == 1132 + 100


def test_resizing_in_place_is_seen():
    with SimulatedCard() as card:
        tensor = torch.empty(0)
        tensor.resize_(100)
        assert card.current_bytes == 400
        tensor.untyped_storage().resize_(0)
        assert (card.current_bytes, card.peak_bytes) == (0, 400)
        del tensor
        assert card.current_bytes == 0


def test_memory_freed_by_resizing_a_storage_can_be_used_again():
    with SimulatedCard(budget_bytes=400) as card:
        shard = torch.empty(100)
        shard.untyped_storage().resize_(0)
        assert torch.empty(100).numel() == 100
        assert card.allocations == 2


def test_track_counts_what_was_there_before_once():
    model = small_model()
    tied = nn.Linear(10, 20, bias=False)
    tied.weight = model[0].weight
    norm = nn.BatchNorm1d(5)  # weight, bias, mean, variance of 5 floats and an 8-byte counter
    model[0].weight.grad = torch.zeros(20, 10)
    card = SimulatedCard()
    batch = {"batch": torch.zeros(7)}
    card.track(model, tied, [norm, batch], "ignored", None)
    assert card.current_bytes == 1132 + 800 + (4 * 5 * FLOAT + 8) + 28


def test_a_training_step_by_hand():
    model, batch = small_model(), torch.zeros(8, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with SimulatedCard() as card:
        card.track(model)
        weights = 1132
        assert card.current_bytes == weights
        output = model(batch)
        activations = 8 * 20 * FLOAT  # what ReLU returns; what it was given is not saved
        assert card.current_bytes == weights + activations + 8 * 3 * FLOAT
        loss = output.sum()
        loss.backward()
        assert card.current_bytes == 2 * weights + 8 * 3 * FLOAT + FLOAT
        del output, loss
        optimizer.step()
        steps = 4 * FLOAT
        assert card.current_bytes == 4 * weights + steps
        optimizer.zero_grad(set_to_none=True)
        assert card.current_bytes == 3 * weights + steps
    fresh = SimulatedCard()
    fresh.track(model, optimizer)
    assert fresh.current_bytes == 3 * weights + steps


def test_the_peak_of_a_forward_holds_input_and_output_of_an_operation():
    with SimulatedCard() as card:
        value = torch.zeros(1000)
        value = value + 1
        assert (card.current_bytes, card.peak_bytes) == (4000, 8000)
        card.reset_peak()
        assert card.peak_bytes == 4000
        torch.empty(10)
        assert card.peak_bytes == 4040


def test_checkpointing_is_seen_in_forward_and_in_its_recomputation():
    block = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    batch = torch.zeros(32, 16, requires_grad=True)

    def held_and_peak(use):
        with SimulatedCard() as card:
            output = checkpoint(block, batch, use_reentrant=False) if use else block(batch)
            held = card.current_bytes
            output.sum().backward()
        block.zero_grad()
        batch.grad = None
        return held, card.peak_bytes

    output_bytes, hidden_bytes = 32 * 16 * FLOAT, 32 * 64 * FLOAT
    assert held_and_peak(False)[0] == output_bytes + hidden_bytes
    assert held_and_peak(True)[0] == output_bytes
    assert held_and_peak(True)[1] >= output_bytes + 2 * hidden_bytes


def test_over_the_budget_is_refused_and_not_kept():
    with SimulatedCard(budget_bytes=1000) as card:
        kept = torch.empty(200)
        with pytest.raises(OutOfMemoryError):
            torch.empty(51)
        assert (card.current_bytes, card.peak_bytes) == (800, 800)
        assert torch.empty(50).numel() == 50
        assert kept.numel() == 200


def test_the_second_output_of_an_operation_can_be_the_one_too_many():
    with SimulatedCard() as card:
        values = torch.zeros(100)
        card.budget_bytes = 400 + 400 + 799
        with pytest.raises(OutOfMemoryError):
            values.sort()  # values of 400 bytes, indices of 800
        assert (card.current_bytes, card.peak_bytes) == (400, 800)


def test_memory_held_by_the_frames_of_an_exception_is_live():
    def forward():
        activation = torch.zeros(100)
        return activation, torch.zeros(1000)

    with SimulatedCard(budget_bytes=1000) as card:
        try:
            forward()
        except OutOfMemoryError as error:
            assert card.current_bytes == 400
            held = error
        assert card.current_bytes == 400
        del held
        assert card.current_bytes == 0


def test_the_refused_operation_itself_holds_nothing():
    with SimulatedCard(budget_bytes=1000) as card:
        with pytest.raises(OutOfMemoryError) as held:
            torch.zeros(100).repeat(10)
        assert card.current_bytes == 0
        del held


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_once_its_exception_is_dropped(where):
    model, batch = small_model(), torch.zeros(8, 10)
    card = SimulatedCard()
    card.track(model)

    def step(refused):
        if where == "forward":
            card.fail_at(refused)
        loss = model(batch).sum()
        if where == "backward":
            card.fail_at(refused)
        loss.backward()

    with card:
        with pytest.raises(OutOfMemoryError):
            step(refused=3)
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert card.current_bytes == 1132


def test_fail_at_refuses_exactly_that_allocation():
    with SimulatedCard() as card:
        before = torch.empty(1)
        card.fail_at(2)
        torch.empty(1)
        with pytest.raises(OutOfMemoryError):
            torch.empty(1)
        torch.empty(1)
        assert card.allocations == 4
        assert before.numel() == 1


def test_the_error_reads_as_torch_writes_it():
    with SimulatedCard(budget_bytes=4 * 2**20):
        kept = torch.empty(2**19)
        with pytest.raises(OutOfMemoryError) as caught:
            torch.empty(2**20)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has a total capacity of 4.00 MiB of which "
        "2.00 MiB is free. Including non-PyTorch memory, this process has 2.00 MiB memory in use. Of the "
        "allocated memory 2.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
        "but unallocated."
    )
    assert isinstance(caught.value, torch.cuda.OutOfMemoryError)
    assert kept.numel() == 2**19


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="budget_bytes: got -1, expected at least 0 bytes, or None"):
        SimulatedCard(budget_bytes=-1)
    with pytest.raises(ValueError, match="allocation: got 0, expected a whole number of at least 1"):
        SimulatedCard().fail_at(0)
