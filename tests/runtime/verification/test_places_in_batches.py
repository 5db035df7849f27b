"""Entries that a forward takes by their place in the batch are others in a part of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.verify import check


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def verdict_of(forward, model, batch, most_rows=4):
    return check(forward, Batch(batch, {}), list(model.modules()), most_rows)


def attended(x):
    return (x @ x.T).softmax(-1) @ x


def by_numbers(x, borders):
    return torch.cat([attended(x[a:b]) for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)])


def by_tensors(x, borders):
    return torch.cat([attended(x[borders[i] : borders[i + 1]]) for i in range(len(borders) - 1)])


@pytest.mark.parametrize("within", [by_numbers, by_tensors])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_sequences_that_lie_one_after_the_other_run_whole(within, first):
    """The first part of four rows that are checked is the first sequence, if that has three tokens."""
    model, borders = network(), torch.tensor([0, first, 7, 12])
    x, y = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    assert verdict_of(lambda x, y: F.cross_entropy(model(within(x, borders)), y), model, (x, y)).rule is None


def shifted(x):
    return x[:, 1:] - x[:, :-1]


def steps_first(x):
    return x.transpose(0, 1)[1:].transpose(0, 1)[:, :5]


def halves(x):
    doubled = torch.cat([x, 2 * x])
    return (doubled[: len(x)] + doubled[len(x) :])[:, :5]


@pytest.mark.parametrize("change", [shifted, steps_first, halves])
def test_places_within_samples_still_split(change):
    model = nn.Linear(5, 4).double()
    batch = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    assert verdict_of(lambda x, y: F.cross_entropy(model(change(x)), y), model, batch).rule is not None
