"""Progressive unfreezing: parts train from their epoch on, and cost memory only then."""

import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard


def network():
    backbone = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(16, 2)})


def run(model, x):
    return model["head"](model["backbone"](x))


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


PHASES = {30: ["backbone.4"], 60: ["backbone.4", "backbone.2.weight"], 90: ["backbone"]}


def test_each_part_trains_from_its_epoch_on():
    model = network()
    unfreezing = runtime.ProgressiveUnfreezing(model, PHASES)
    head, last = ["head.weight", "head.bias"], ["backbone.4.weight", "backbone.4.bias"]
    assert unfreezing.at(0) == [] and trainable(model) == head
    assert unfreezing.at(29) == [] and trainable(model) == head
    assert unfreezing.at(30) == [model["backbone"][4].weight, model["backbone"][4].bias]
    assert trainable(model) == last + head
    assert unfreezing.at(60) == [model["backbone"][2].weight]
    assert len(unfreezing.at(90)) == 3 and len(trainable(model)) == 8


def test_a_resumed_run_is_in_its_phase_at_once():
    model = network()
    new = runtime.ProgressiveUnfreezing(model, PHASES).at(75)
    assert len(new) == 3
    assert trainable(model) == ["backbone.2.weight", "backbone.4.weight", "backbone.4.bias", "head.weight", "head.bias"]


def test_memory_grows_by_phases():
    model, x = network(), torch.randn(64, 16)
    unfreezing = runtime.ProgressiveUnfreezing(model, PHASES)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    with SimulatedCard() as card:
        for epoch in (0, 30, 60, 90):
            unfreezing.at(epoch)
            for _ in range(2):
                card.reset_peak()
                run(model, x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(card.peak_bytes)
    assert peaks == sorted(peaks) and len(set(peaks)) == 4
    assert peaks[0] < 0.5 * peaks[-1]


def test_no_optimizer_state_for_what_has_never_trained():
    model = network()
    runtime.ProgressiveUnfreezing(model, PHASES).at(0)
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == set(model["head"].parameters())


def test_what_no_phase_names_stays_as_it_was():
    model = network()
    model["backbone"][0].requires_grad_(False)
    runtime.ProgressiveUnfreezing(model, {1: ["backbone.4"]}).at(0)
    assert trainable(model) == ["backbone.2.weight", "backbone.2.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({1: ["backbone.layer9"]}, "got the name 'backbone.layer9'"),
        ({-1: ["head"]}, "got the epoch -1"),
        ({1: "head"}, "expected a list of names"),
    ],
)
def test_mistakes_are_named(phases, message):
    with pytest.raises(ValueError, match=message):
        runtime.ProgressiveUnfreezing(network(), phases)
