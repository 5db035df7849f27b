"""What a call and a step that are not split cost, counted in Python functions, which is the same on every machine."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.verify import check

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


def test_a_call_and_a_step_take_at_most_88_functions():
    assert cost(layers(0)) <= 88  # a cold function takes two to three microseconds


@pytest.mark.parametrize("kind", [nn.ReLU, lambda: nn.BatchNorm1d(4), lambda: nn.Linear(4, 4), nn.Dropout])
def test_what_a_call_costs_does_not_grow_with_the_layers_of_a_model(kind):
    assert cost(layers(30, kind)) == cost(layers(1, kind))


class Waits(TorchDispatchMode):
    """Notes operations that bring a number to the host, for which a GPU would be waited."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overrides", [{}, {"precision": "bf16"}, {"clip_norm": 1.0}])
def test_a_settled_call_and_step_wait_for_nothing(overrides):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    memory, optimizer = runtime.preset("16gb", **overrides), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    for _ in range(17):
        with Waits() as waits:
            loss = memory.forward_backward(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
            memory.step(optimizer)
    assert waits.seen == []
    with Waits() as waits:
        loss.item()
    assert len(waits.seen) == 1


def rows_run_by_a_check(model, earlier=None):
    """Samples that a check of a batch of 64 gives the model, all runs together; and its verdict."""
    sizes = []
    x, y = torch.randn(64, 4), torch.arange(64) % 3

    def forward(x, y):
        sizes.append(len(x))
        return nn.functional.cross_entropy(model(x), y)

    verdict = check(forward, Batch((x, y), {}), list(model.modules()), 32, earlier=earlier)
    return sum(sizes), verdict


def test_a_check_runs_the_rows_of_a_micro_batch_once_together_and_once_in_parts_and_few_besides():
    rows, verdict = rows_run_by_a_check(layers(1))
    assert rows <= 2 * (32 + 6 + 6 + 4)
    rows, confirmed = rows_run_by_a_check(layers(1), verdict)
    assert rows <= 2 * 4
    assert confirmed.rule is not None


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_a_forward_that_draws_is_not_run_in_vain_before_it_is_checked_again():
    """What was seen of draws is not confirmed by functions alone, which do not show them."""
    rows, verdict = rows_run_by_a_check(layers(1, Noise))
    assert verdict.drew
    again, _ = rows_run_by_a_check(layers(1, Noise), verdict)
    assert again == rows


def test_a_confirming_check_puts_one_context_around_a_forward():
    """Every function of torch passes each of them, which takes as long as a small function does."""
    model, contexts = layers(0), []
    memory, optimizer = runtime.preset("16gb", micro_batches=2), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    model.register_forward_hook(lambda *_: contexts.append(torch._C._len_torch_function_stack()))

    def forward(x, y):
        return nn.functional.cross_entropy(model(x), y)

    for _ in range(2):
        contexts.clear()
        memory.forward_backward(forward, x, y)
        memory.step(optimizer)
    assert contexts == [1, 1, 1, 0, 0]
