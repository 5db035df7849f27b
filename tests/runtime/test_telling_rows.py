"""The few rows of a check, and what is compared on them, tell apart what other rows would not."""

import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime
from oomfix.runtime.batch import Batch
from oomfix.runtime.verify import check


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows(count, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)).double()


def verdict_of(forward, model, batch, most_rows):
    return check(forward, Batch(batch, {}), list(model.modules()), most_rows)


def detections(*counts):
    return [rows(5, seed) for seed in range(len(counts))], [{"boxes": torch.randn(n, 4).double()} for n in counts]


def boxes_apart(model, images, targets):
    pairs = zip(images, targets, strict=True)
    return [F.smooth_l1_loss(model(x)[: len(t["boxes"])], t["boxes"], reduction="none").sum() for x, t in pairs]


def test_a_mean_over_boxes_is_no_mean_over_images_though_two_rows_average_what_a_third_has():
    model = network()

    def over_boxes(images, targets):
        return sum(boxes_apart(model, images, targets)) / sum(len(target["boxes"]) for target in targets)

    def over_images(images, targets):
        return torch.stack(boxes_apart(model, images, targets)).mean()

    batch = detections(1, 2, 3, 4, 1, 2)
    assert verdict_of(over_boxes, model, batch, 3).rule is None
    assert verdict_of(over_images, model, batch, 3).rule is not None


def test_pairs_inside_a_batch_are_taken_apart_by_odd_numbers_of_rows():
    model = network()

    def of_pairs(x):
        out = model(x)
        return (out[::2] - out[1::2]).pow(2).mean()

    for most_rows in range(2, 13):
        assert verdict_of(of_pairs, model, (rows(12),), most_rows).rule is None


def test_a_term_of_a_loose_parameter_that_is_zero_still_shows_in_its_gradient():
    """A sum over samples, and a term once per batch: log variances begin at 0."""
    model, variance = network(), nn.Parameter(torch.zeros(1).double())

    def forward(x):
        return (model(x).pow(2).sum(1) * (-variance).exp()).sum() + variance.sum()

    def without(x):
        return (model(x).pow(2).sum(1) * (-variance).exp()).sum()

    assert verdict_of(forward, model, (rows(12),), 4).rule is None
    assert verdict_of(without, model, (rows(12),), 4).rule is not None


def test_sequences_that_differ_in_length_for_the_first_time_are_checked_at_once():
    """Padding to the longest of a batch is none while all are alike; the third call is not one to check."""
    model, plain = network(), network()

    def mean_over_padding(model):
        return lambda sequences: model(nn.utils.rnn.pad_sequence(sequences, batch_first=True)).pow(2).mean()

    memory = runtime.preset("16gb", micro_batches=3)
    forward = mean_over_padding(model)
    for lengths in ([4] * 12, [4] * 12, [2 + index % 5 for index in range(12)]):
        batch = [rows(length, seed) for seed, length in enumerate(lengths)]
        model.zero_grad()
        plain.zero_grad()
        memory.forward_backward(forward, batch)
        mean_over_padding(plain)(batch).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
