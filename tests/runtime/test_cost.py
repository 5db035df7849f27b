"""What a call and a step that are not split cost, counted in Python functions, which is the same on every machine."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from oomfix import runtime

PACKAGE = str(Path(runtime.__file__).parent)


def functions_called(work):
    """How many functions of this package `work` calls, generators counted each time they go on."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def cost(model, settled=17):
    """The functions of one call and step behind `settled` others, which learn what the forward changes."""
    runtime.reset()
    memory = runtime.preset("16gb")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def forward(x, y):
        return nn.functional.cross_entropy(model(x), y)

    def train():
        memory.forward_backward(forward, x, y)
        memory.step(optimizer)

    for _ in range(settled):
        train()
    return functions_called(train)


def layers(count, kind=nn.Identity):
    return nn.Sequential(nn.Linear(4, 4), *(kind() for _ in range(count)), nn.Linear(4, 3))


def test_a_call_and_a_step_take_at_most_105_functions():
    assert cost(layers(0)) <= 105  # a cold function is about a microsecond


@pytest.mark.parametrize("kind", [nn.ReLU, lambda: nn.BatchNorm1d(4), lambda: nn.Linear(4, 4), nn.Dropout])
def test_what_a_call_costs_does_not_grow_with_the_layers_of_a_model(kind):
    assert cost(layers(30, kind)) == cost(layers(1, kind))
