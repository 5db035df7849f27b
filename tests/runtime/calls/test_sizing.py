"""As few micro-batches as fit, sizes by halves, and room for the optimizer that is still to come."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.calls.sizing import OptimizerRoom, Sizing, fixed_parts, least_parts, limit_memory
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.memory.oom import DoesNotFitError
from tests.torch_versions import needs_fused_on_cpu


def settle(sizing, size, most_rows, calls):
    """What `calls` calls of `size` samples are tried in, when `most_rows` fit: lists of part counts per call."""
    tried = []
    for _ in range(calls):
        parts, attempts = sizing.parts(size), []
        while True:
            attempts.append(parts)
            if -(-size // parts) <= most_rows:
                break
            parts = sizing.failed(size, parts)
        sizing.fitted(size, parts)
        tried.append(attempts)
    return tried


@pytest.mark.parametrize(("most_rows", "fewest"), [(64, 1), (32, 2), (16, 4), (17, 4), (1, 64)])
def test_it_settles_on_the_fewest_micro_batches_that_fit(most_rows, fewest):
    tried = settle(Sizing(first_parts=4), 64, most_rows, 6)
    assert tried[-1] == [fewest]
    assert tried[-2] == [fewest]


def test_sizes_change_by_halves_however_much_fits():
    """Code that is compiled for each size is compiled for seven sizes of a batch of 64 at most."""
    sizing, chance = Sizing(first_parts=2), random.Random(0)
    tried = {parts for _ in range(500) for attempt in settle(sizing, 64, chance.randint(1, 64), 1) for parts in attempt}
    assert tried <= {1, 2, 4, 8, 16, 32, 64}


def test_the_first_guess_counts_only_where_the_whole_batch_does_not_fit():
    assert settle(Sizing(first_parts=4), 64, 64, 1) == [[1]]
    assert settle(Sizing(first_parts=4), 64, 32, 3) == [[1, 4], [2], [2]]  # 2 are enough, found at the next call


def test_larger_micro_batches_are_tried_again_but_ever_more_seldom():
    sizing = Sizing(first_parts=2)
    tried = settle(sizing, 64, 16, 700)
    failures = [call for call, attempts in enumerate(tried) if len(attempts) > 1]
    assert failures == [0, 1, 65, 321] or len(failures) <= 5
    assert settle(sizing, 64, 64, 2000)[-1] == [1]  # memory that came free is used


def test_what_does_not_fit_at_all_is_given_up():
    sizing = Sizing(first_parts=2)
    assert sizing.failed(3, 1) == 2
    assert sizing.failed(3, 2) == 3
    assert sizing.failed(3, 3) is None


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("asked", [1, 2, 4, 8])
def test_no_micro_batch_of_a_fixed_number_is_a_single_sample(size, asked):
    parts = fixed_parts(size, asked)
    assert parts <= asked
    assert size // parts >= 2 or parts == 1


def test_layers_that_compare_samples_get_two():
    assert least_parts(5, 2, least_rows=2) == 2
    assert least_parts(5, 2, least_rows=1) == 3


@pytest.mark.parametrize(
    ("norm", "fewest"), [(nn.BatchNorm1d(6), 2), (nn.BatchNorm1d(6).eval(), 1), (nn.Identity(), 1)]
)
def test_a_micro_batch_is_a_single_sample_only_where_no_layer_compares_samples(norm, fewest):
    """However little memory there is."""
    model, sizes, limit = nn.Sequential(norm, nn.Linear(6, 4)), [], [fewest]

    def forward(x, y):
        sizes.append(len(x))
        if torch.is_grad_enabled() and len(x) > limit[-1]:
            raise OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(model(x), y)

    runtime.preset("16gb").forward_backward(forward, torch.randn(8, 6), torch.arange(8) % 4)
    assert sizes[-4:] == [fewest] * 4
    with pytest.raises(DoesNotFitError, match=rf"and {fewest} sample\(s\) at a time do not fit"):
        limit.append(0)
        runtime.preset("16gb").forward_backward(forward, torch.randn(8, 6), torch.arange(8) % 4)


def test_a_size_is_not_taken_for_fitting_when_the_optimizer_will_not():
    """The batch fits without Adam's state, but not with it: the first call splits, and the step has its room."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    x, y, sizes = torch.randn(256, 64), torch.randint(0, 4, (256,)), []
    parameter_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with SimulatedCard() as card:
        card.track(model, x, y)
        F.cross_entropy(model(x), y).backward()
    model.zero_grad()

    def forward(x, y):
        if torch.is_grad_enabled():
            sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    memory = runtime.preset("16gb")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with SimulatedCard(budget_bytes=card.peak_bytes + parameter_bytes) as small:
        small.track(model, x, y)
        for _ in range(3):
            memory.forward_backward(forward, x, y)
            memory.step(optimizer)
    assert sizes[0] == 256 and sizes[1] < 256
    assert sizes.count(256) <= 2


def test_the_room_is_two_numbers_per_parameter_and_is_given_back():
    room, parameters = OptimizerRoom(), [nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(24).double())]
    with SimulatedCard() as card:
        room.hold(parameters)
        room.hold(parameters)
        assert card.current_bytes == 2 * (1000 * 4 + 24 * 8)
        room.release()
        assert card.current_bytes == 0


@pytest.mark.parametrize(
    "form", [{"foreach": True}, {"foreach": False}, pytest.param({"fused": True}, marks=needs_fused_on_cpu)], ids=str
)
def test_the_room_is_held_until_the_first_step_only(form, monkeypatch):
    """Fused forms leave no trace in the versions of parameters."""
    model, held, calls = nn.Linear(6, 4), set(), []
    monkeypatch.setattr(OptimizerRoom, "hold", lambda self, parameters: held.add(len(calls)))
    memory, optimizer = runtime.preset("16gb"), torch.optim.AdamW(model.parameters())
    for group in optimizer.param_groups:
        group.update(form)
    for _ in range(3):
        memory.forward_backward(lambda x: model(x).pow(2).mean(), torch.randn(12, 6))
        memory.step(optimizer)
        calls.append(optimizer)
    assert held == {0}


def test_the_room_stays_while_overflows_keep_the_optimizer_from_stepping(monkeypatch):
    model, held, calls = nn.Linear(6, 4), set(), []
    monkeypatch.setattr(OptimizerRoom, "hold", lambda self, parameters: held.add(len(calls)))
    memory, optimizer = runtime.preset("16gb", precision="fp16"), torch.optim.AdamW(model.parameters())
    for call in range(3):
        memory.forward_backward(lambda x: model(x).pow(2).mean(), torch.randn(12, 6))
        if call == 0:
            model.weight.grad.fill_(float("inf"))
        memory.step(optimizer)
        calls.append(optimizer)
    assert held == {0, 1}


def test_an_optimizer_that_needs_less_than_the_room_is_not_refused():
    model = nn.Linear(256, 256)
    x = torch.randn(4, 256)
    parameter_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with SimulatedCard(budget_bytes=int(2.6 * parameter_bytes)) as card:
        card.track(model, x)
        runtime.preset("16gb", checkpointing="off").forward_backward(lambda x: model(x).pow(2).mean(), x)
    assert model.weight.grad is not None


def test_a_fixed_number_is_kept_and_still_recovers():
    model, sizes = nn.Linear(6, 4), []

    def forward(x):
        if x._base is batch:  # a check runs on copies of rows
            sizes.append(len(x))
            if len(x) > 3:
                raise OutOfMemoryError("CUDA out of memory")
        return model(x).pow(2).mean()

    batch = torch.randn(12, 6)
    memory = runtime.preset("16gb", micro_batches=2)
    memory.forward_backward(forward, batch)
    assert sizes == [6, 3, 3, 3, 3]


@pytest.mark.parametrize(("free_gib", "expected_gib"), [(20.0, 13.4), (5.0, 0.95 * 6.0)])
def test_the_budget_is_the_smaller_of_the_presets_and_what_is_free(monkeypatch, free_gib, expected_gib):
    gib, limits = 2**30, []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * gib), 24 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    limit_memory(runtime.preset("16gb").preset, torch.device("cuda", 0))
    assert limits[0] * 24 == pytest.approx(expected_gib, rel=1e-6)
