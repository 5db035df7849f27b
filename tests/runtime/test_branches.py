"""A call that takes another branch than those that were checked is checked itself, before it goes on in parts."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLS = 24


def trained(
    parts: int | None, forwards: Callable[[nn.ModuleDict], Iterator[Forward]], split: str = "verified"
) -> tuple[torch.Tensor, int]:
    """The weights of the head after some steps in float64, and how many calls ran in `parts` micro-batches."""
    runtime.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), "head": nn.Linear(8, 4)})
    model = model.double()
    sizes = {} if parts is None else {"micro_batches": parts}
    memory = runtime.preset("16gb", precision="fp32", split=split, **sizes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(CALLS, 12, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (CALLS, 12), generator=generator)
    for batch, label, forward in zip(batches, labels, forwards(model), strict=False):
        memory.forward_backward(forward, batch, label)
        memory.step(optimizer)
    (known,) = memory._forwards
    return model["head"].weight.detach(), known.split_calls


def mixup_of_some_batches(model: nn.ModuleDict) -> Iterator[Forward]:
    """`if coin < 0.5` ahead of the batch decides; the first batches that are checked are not mixed."""
    coins = torch.rand(CALLS, generator=torch.Generator().manual_seed(3))
    coins[:4] = 1
    for coin in coins:

        def forward(samples: torch.Tensor, labels: torch.Tensor, coin: torch.Tensor = coin) -> torch.Tensor:
            if coin > 0.5:
                return F.cross_entropy(model["head"](samples), labels)
            share, order = random.betavariate(1, 1), torch.randperm(len(samples))
            output = model["head"](share * samples + (1 - share) * samples[order])
            return share * F.cross_entropy(output, labels) + (1 - share) * F.cross_entropy(output, labels[order])

        yield forward


def layers_left_out_at_random(model: nn.ModuleDict) -> Iterator[Forward]:
    def forward(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in model["layers"]:
            if random.random() > 0.3:
                samples = samples + layer(samples).tanh()
        return F.cross_entropy(model["head"](samples), labels)

    while True:
        yield forward


def sequences_of_any_length(model: nn.ModuleDict) -> Iterator[Forward]:
    for times in map(torch.empty, range(1, CALLS + 1)):

        def forward(samples: torch.Tensor, labels: torch.Tensor, times: torch.Tensor = times) -> torch.Tensor:
            for _ in times:
                samples = model["layers"][0](samples).tanh()
            return F.cross_entropy(model["head"](samples), labels)

        yield forward


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("forwards", [mixup_of_some_batches, layers_left_out_at_random, sequences_of_any_length])
def test_branches_train_as_in_whole_batches(forwards, parts):
    whole, _ = trained(None, forwards)
    split, split_calls = trained(parts, forwards)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert split_calls >= 4


@pytest.mark.parametrize("forwards", [layers_left_out_at_random, sequences_of_any_length])
def test_branches_of_independent_samples_never_run_whole(forwards):
    _, split_calls = trained(3, forwards)
    assert split_calls == CALLS


def test_a_branch_that_couples_samples_is_told_once_with_its_reason(caplog):
    trained(3, mixup_of_some_batches)
    assert sum("run whole, because samples depend on each other" in line for line in caplog.messages) == 1
    assert not any("branch" in line for line in caplog.messages)


def test_a_branch_that_couples_samples_is_split_where_that_was_asked_for(caplog):
    _, split_calls = trained(3, mixup_of_some_batches, split="always")
    assert split_calls == CALLS
    assert any("split although samples depend on each other" in line for line in caplog.messages)


def test_a_branch_of_a_batch_of_another_size_is_checked_too():
    """Only the last batch is mixed, and its micro-batches have a number of samples that no check has seen."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=2)
    for rows in (12, 12, 12, 12, 6):
        mixed = torch.tensor(rows < 12)

        def forward(samples: torch.Tensor, labels: torch.Tensor, mixed: torch.Tensor = mixed) -> torch.Tensor:
            if not mixed:
                return F.cross_entropy(model(samples), labels)
            output = model((samples + samples.flip(0)) / 2)
            return (F.cross_entropy(output, labels) + F.cross_entropy(output, labels.flip(0))) / 2

        samples, labels = torch.randn(rows, 8).double(), torch.randint(0, 4, (rows,))
        model.zero_grad()
        memory.forward_backward(forward, samples, labels)
    split = model.weight.grad.clone()
    model.zero_grad()
    forward(samples, labels).backward()
    torch.testing.assert_close(split, model.weight.grad, rtol=1e-12, atol=1e-14)
