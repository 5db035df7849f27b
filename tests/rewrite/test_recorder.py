"""What the recorder notes of a training, and that it changes nothing about it."""

import math

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.equivalence.comparison import Recording, Step, compare, relative_distance
from oomfix.equivalence.recorder import Recorder


@pytest.fixture(autouse=True)
def fresh_manager():
    runtime.reset()
    torch.manual_seed(0)
    yield
    runtime.reset()


def network(*layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 40), *layers, nn.Linear(40, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps: int = 3, *layers: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model, optimizer = network(*layers)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).pow(2).mean().backward()
        optimizer.step()
    return model


def recorded(steps: int = 3, *layers: nn.Module, seed: int = 0) -> Recording:
    with Recorder() as recorder:
        train(steps, *layers, seed=seed)
    return recorder.recording


def test_it_changes_nothing_and_leaves_nothing_behind():
    backward, scale, run = torch.Tensor.backward, torch.amp.GradScaler.scale, runtime.MemoryManager.forward_backward
    plain = train()
    with Recorder():
        watched = train()
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert (torch.Tensor.backward, torch.amp.GradScaler.scale) == (backward, scale)
    assert runtime.MemoryManager.forward_backward is run
    with Recorder() as outer:
        pass
    train()
    assert outer.steps == []


def test_one_bit_of_one_weight_is_told():
    with Recorder() as recorder:
        model, optimizer = network()
        for _ in range(2):
            optimizer.step()
        with torch.no_grad():
            model[-1].bias[1] = torch.nextafter(model[-1].bias[1], torch.tensor(9.0))
        optimizer.step()
    first, second, third = recorder.steps
    assert first.digest == second.digest != third.digest
    assert 0 < relative_distance(second.sketch, third.sketch) < 1e-7


@pytest.mark.parametrize("changed", ["all", "one column", "one entry"])
def test_distances_of_sketches_are_those_of_the_weights(changed):
    weight = nn.Parameter(torch.randn(200, 300, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    difference = torch.zeros(200, 300, dtype=torch.float64)
    places = {"all": (slice(None), slice(None)), "one column": (slice(None), 5), "one entry": (17, 3)}[changed]
    difference[places] = 1e-6 * torch.randn_like(difference)[places]
    with Recorder() as recorder:
        optimizer.step()
        with torch.no_grad():
            weight += difference
        optimizer.step()
    before, after = recorder.steps
    expected = (difference.norm() / weight.norm()).item()
    assert relative_distance(before.sketch, after.sketch) == pytest.approx(expected, rel=0.15)


def test_losses_are_noted_whole_unscaled_and_once():
    model, optimizer = network()
    x = torch.randn(8, 6)
    whole = model(x).pow(2).mean().item()
    memory = runtime.preset("16gb", micro_batches=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Recorder() as recorder:
        memory.forward_backward(lambda x: model(x).pow(2).mean(), x)
        scaler.scale(model(x).pow(2).mean()).backward()
        memory.backward(model(x).pow(2).mean())
        torch.autograd.backward([model(x).pow(2).mean(), model(x).pow(2).mean()])
        optimizer.step()
    (step,) = recorder.steps
    assert step.losses == pytest.approx([whole] * 5, rel=1e-6)
    assert step.loss == pytest.approx(5 * whole, rel=1e-6)
    assert recorder.calls_in_parts == 1


def test_losses_of_a_window_are_noted_as_their_shares_of_it():
    model, optimizer = network()
    x = torch.randn(8, 6)
    whole = model(x).pow(2).mean().item()
    memory = runtime.preset("16gb")
    with Recorder() as recorder:
        for batch in memory.accumulate([x, x], 2):
            memory.forward_backward(lambda x: model(x).pow(2).mean(), batch)
        memory.step(optimizer)
    assert recorder.steps[0].losses == pytest.approx([whole / 2] * 2, rel=1e-6)


def test_what_splitting_cannot_keep_is_told():
    assert recorded().seen == set()
    assert recorded(1, nn.BatchNorm1d(40)).seen == {"batch statistics"}
    assert recorded(1, nn.BatchNorm1d(40).eval()).seen == set()
    model, _ = network(nn.Dropout(0.5))
    with Recorder() as recorder:
        runtime.preset("off").forward_backward(lambda x: model(x).mean(), torch.randn(8, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    assert recorder.seen == {"random draws", "mixed precision"}


def test_a_step_comes_back_from_json():
    step = recorded().steps[1]
    assert Step.from_json(step.to_json()) == step


def test_equal_runs_are_the_same_and_others_are_told_by_their_first_difference():
    three, other = recorded(), recorded(seed=1)
    assert compare([three], [recorded()]) == (3, 0.0, None)
    assert compare([three], [recorded(2)]).difference == "3 steps before and 2 after"
    assert compare([three], []).difference == "other processes train: 1 before and 0 after"
    found = compare([three], [other])
    assert found.difference is not None and found.difference.endswith("after step 1") and found.worst > 1
    nudged = [step._replace(digest="x", sketch=tuple(1.000001 * v for v in step.sketch)) for step in three.steps]
    assert compare([three], [Recording(tuple(nudged))], 1e-5).difference is None
    assert compare([three], [Recording(tuple(nudged))], 1e-7).difference == "weights differ by 1.0e-06 after step 1"
    assert compare([three], [Recording(tuple(nudged))]).difference == "weights differ by 1.0e-06 after step 1"
    nan = [step._replace(digest="x", sketch=(math.nan,) * len(step.sketch)) for step in three.steps]
    assert compare([three], [Recording(tuple(nan))], 1e-5).difference == "weights differ by nan after step 1"
