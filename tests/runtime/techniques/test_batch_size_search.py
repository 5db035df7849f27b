"""The largest batch that fits: exact, and nothing is different afterwards."""

import copy

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard


def limited(largest, tried):
    def run(size):
        tried.append(size)
        if size > largest:
            raise RuntimeError("CUDA error: out of memory")

    return run


@pytest.mark.parametrize("largest", [1, 7, 8, 9, 1023, 5000])
@pytest.mark.parametrize("start", [1, 300])
def test_it_is_the_largest_that_fits(largest, start):
    tried = []
    assert runtime.find_batch_size(limited(largest, tried), start=start, most=1024) == min(largest, 1024)
    assert len(tried) <= 21
    assert len(set(tried)) == len(tried)


def test_sizes_are_multiples():
    tried = []
    assert runtime.find_batch_size(limited(45, tried), start=8, most=100, multiple_of=8) == 40
    assert all(size % 8 == 0 for size in tried)


def test_nothing_fits():
    with pytest.raises(runtime.DoesNotFitError, match="a batch of 4 runs out of memory"):
        runtime.find_batch_size(limited(3, []), multiple_of=4)


def test_other_errors_are_the_callers():
    def run(size):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        runtime.find_batch_size(run)


def training(model, optimizer, samples=None):
    def run(size):
        model(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def test_on_a_card_the_size_fits_and_one_more_does_not():
    """Nothing of a try that failed is left to make the next one fail."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run = training(model, optimizer)
    with SimulatedCard(budget_bytes=400_000) as card:
        card.track(model)
        size = runtime.find_batch_size(run)
        run(size)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(size + 1)
    assert size > 16


@pytest.mark.parametrize("steps_before", [0, 2])
def test_models_optimizers_and_random_numbers_are_put_back(steps_before):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps_before):
        training(model, optimizer)(4)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    run = training(model, optimizer)

    def fails_above_20(size):
        run(size)
        if size > 20:
            raise RuntimeError("CUDA out of memory")

    assert runtime.find_batch_size(fails_above_20, restore=[model, optimizer]) == 20
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    after = optimizer.state_dict()
    assert after["state"].keys() == before[1]["state"].keys()
    for key, state in after["state"].items():
        assert all(torch.equal(value, before[1]["state"][key][name]) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("arguments", "name"), [({"start": 0}, "start"), ({"most": 3, "multiple_of": 4}, "most")])
def test_numbers_out_of_range_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        runtime.find_batch_size(limited(1, []), **arguments)
