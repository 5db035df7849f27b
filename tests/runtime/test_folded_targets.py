"""Targets that the program has made flat, [samples * steps], are cut along with inputs [samples, steps]."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batches.sample_dims import folded

SAMPLES, STEPS, WORDS = 6, 5, 11


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0]).view(-1, WORDS)


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, WORDS, 3, padding=1)

    def forward(self, x):
        return self.layer(x).permute(0, 2, 3, 1).reshape(-1, WORDS)


def words(*shape, seed=0):
    return torch.randint(2, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).double()


def by_cross_entropy(out, targets):
    return F.cross_entropy(out, targets)


def by_targets_that_count(out, targets):
    return F.cross_entropy(out, targets.where(targets > 4, -100))


def by_rewards(out, targets, rewards):
    return -(out.log_softmax(1).gather(1, targets[:, None])[:, 0] * rewards).sum()


TOKENS, TARGETS = words(SAMPLES, STEPS), words(SAMPLES * STEPS, seed=1)
BATCHES = [
    (Reader, by_cross_entropy, (TOKENS, TARGETS)),
    (Reader, by_targets_that_count, (TOKENS, TARGETS)),
    (Reader, by_rewards, (TOKENS, TARGETS, numbers(SAMPLES * STEPS))),
    (Painter, by_cross_entropy, (numbers(SAMPLES, 3, 4, 2), words(SAMPLES * 8))),
]


def gradients_of(model, loss, batch, micro_batches):
    """Those of the batch whole, and those that the manager leaves; how many calls it has split."""
    model = model().double()
    memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)

    def forward(x, *targets):
        return loss(model(x), *targets)

    expected = torch.autograd.grad(forward(*batch), list(model.parameters()))
    memory.forward_backward(forward, *batch)
    found = [parameter.grad for parameter in model.parameters()]
    return list(expected), found, sum(known.split_calls for known in memory._forwards)


@pytest.mark.parametrize("micro_batches", [2, 3, 8])
@pytest.mark.parametrize(("model", "loss", "batch"), BATCHES)
def test_flat_targets_are_split_exactly_with_their_samples(model, loss, batch, micro_batches):
    expected, found, split = gradients_of(model, loss, batch, micro_batches)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    assert split == 1


def test_flat_targets_of_samples_that_depend_on_each_other_run_whole():
    def loss(out, targets):
        return F.cross_entropy(out - out.mean(0), targets)

    expected, found, split = gradients_of(Reader, loss, (TOKENS, TARGETS), 2)
    assert split == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_targets_that_are_flat_step_by_step_beside_samples_in_rows_run_whole():
    def loss(out, targets):
        return F.cross_entropy(out.view(SAMPLES, -1, WORDS).transpose(0, 1).reshape(-1, WORDS), targets)

    expected, found, split = gradients_of(Reader, loss, (TOKENS, TARGETS), 2)
    assert split == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(4, 7), (28,)], (4, 7)),
        ([(4, 3, 2, 2), (16,)], (4, 4)),
        ([(28,), (4, 7), (28, 5)], (4, 7)),
        ([(4, 7), (4,)], None),
        ([(4, 7), (8,)], None),
        ([(28,), (28,)], None),
        ([(1, 7), (7,)], None),
    ],
)
def test_a_batch_is_folded_where_a_tensor_has_a_row_for_each_step_of_each_sample(shapes, expected):
    assert folded([torch.zeros(shape) for shape in shapes]) == expected
