"""Activations that are scaled by how much of a batch a random mask leaves, as DropBlock scales them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime

RARELY = 0.004
MASKS = {
    "compared": lambda shape: (torch.rand(shape) < RARELY).double(),
    "compared the other way": lambda shape: 1 - (torch.rand(shape) >= RARELY).double(),
    "drawn in place": lambda shape: torch.empty(shape).double().bernoulli_(RARELY),
    "drawn by probabilities": lambda shape: torch.bernoulli(torch.full(shape, RARELY).double()),
    "drawn into what was there": lambda shape: (kept := torch.empty(shape).double(), kept.bernoulli_(RARELY))[0],
}


def trained(run, mask, scale):
    """Gradients after some calls; few rows draw a mask that hides something."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh()).double()
    head = nn.Linear(75, 4).double()

    def forward(x, y):
        hidden = net(x)
        kept = 1 - F.max_pool2d(MASKS[mask]((len(x), 1, 5, 5)), 3, 1, 1)
        return F.cross_entropy(head((hidden * kept * scale(kept)).flatten(1)), y)

    found = []
    for number in range(6):
        x, y = torch.randn(12, 2, 5, 5).double(), torch.randint(0, 4, (12,))
        torch.manual_seed(50 + number)
        run(forward, x, y)
        found.append(net[0].weight.grad.clone())
        net.zero_grad()
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_a_scale_by_what_a_mask_leaves_of_the_batch_is_seen_while_it_leaves_everything(mask):
    def of_batch(kept):
        return kept.numel() / kept.sum()

    expected = trained(lambda forward, x, y: forward(x, y).backward(), mask, of_batch)
    memory = runtime.preset("16gb", micro_batches=4)
    found = trained(memory.forward_backward, mask, of_batch)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert "depend on each other" in memory.report().forwards[0].whole_because


def test_a_scale_by_what_a_mask_leaves_of_the_batch_is_seen_where_two_parts_happen_to_have_as_much():
    """Some of these seeds draw masks that leave 39 entries of three rows and 13 of another one."""
    net, wrong = nn.Linear(6, 4).double(), []

    def forward(x, y):
        kept = torch.rand(len(x), 16) > 0.2
        return F.cross_entropy(net(x) * (kept.sum() / kept.numel()), y)

    for seed in range(40):
        x, y = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
        runtime.reset()
        memory = runtime.preset("16gb", micro_batches=5)
        torch.manual_seed(seed)
        expected = torch.autograd.grad(forward(x, y), net.weight)[0]
        net.zero_grad()
        torch.manual_seed(seed)
        memory.forward_backward(forward, x, y)
        wrong += [] if torch.allclose(net.weight.grad, expected, rtol=1e-9) else [seed]
    assert not wrong


@pytest.mark.parametrize("mask", MASKS)
def test_a_scale_by_what_a_mask_leaves_of_each_sample_still_splits(mask):
    memory = runtime.preset("16gb", micro_batches=4)
    trained(memory.forward_backward, mask, lambda kept: 25 / kept.sum((1, 2, 3), keepdim=True))
    assert memory.report().forwards[0].whole_because is None


def test_what_is_done_where_a_mask_leaves_something_still_splits():
    """That is another branch, which is seen when a micro-batch takes it."""
    net, memory = nn.Linear(4, 3).double(), runtime.preset("16gb", micro_batches=4)

    def forward(x, y):
        losses = F.cross_entropy(net(x), y, reduction="none")
        if (losses > 100).any():
            losses = losses / losses.mean()
        return losses.mean()

    memory.forward_backward(forward, torch.randn(12, 4).double(), torch.randint(0, 3, (12,)))
    assert memory.report().forwards[0].whole_because is None
