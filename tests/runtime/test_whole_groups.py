"""Forwards that take as many rows as make whole groups, and leave the others: which ones depends on all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("rows", [12, 24, 36])
def test_rows_that_their_place_gives_to_a_member_of_an_ensemble_run_whole(rows, members):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(members, 4, 2).double())
    inputs, targets = torch.rand(50, 4).double(), torch.rand(50, 2).double()

    def forward(indices):
        x, y = inputs[indices], targets[indices]
        if left := len(x) % members:
            x, y = x[:-left], y[:-left]
        x, y = (one.reshape(members, len(one) // members, one.shape[1]) for one in (x, y))
        return (torch.bmm(x, weights) - y).pow(2).mean()

    assert_gradients_of_the_whole(forward, weights, [(torch.randint(50, (rows,)),) for _ in range(4)], parts=3)


@pytest.mark.parametrize("group", [2, 3, 5])
@pytest.mark.parametrize(("rows", "parts"), [(32, 2), (48, 3), (84, 3)])
def test_rows_that_make_no_group_are_those_of_the_whole(rows, parts, group):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(4, 2).double())

    def forward(x, y):
        grouped = len(x) - len(x) % group
        return F.mse_loss(x[:grouped] @ weights, y[:grouped], reduction="sum")

    batches = [(torch.randn(rows, 4).double(), torch.randn(rows, 2).double()) for _ in range(4)]
    assert_gradients_of_the_whole(forward, weights, batches, parts)


@pytest.mark.parametrize("rows", [7, 12])
def test_groups_of_three_are_seen_where_a_single_row_is_none(rows):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(4, 4).double())

    def forward(x, y):
        grouped = len(x) // 3 * 3
        return F.cross_entropy(x[:grouped] @ weights, y[:grouped])

    batches = [(torch.randn(rows, 4).double(), torch.randint(0, 4, (rows,))) for _ in range(4)]
    assert_gradients_of_the_whole(forward, weights, batches, parts=3)


@pytest.mark.parametrize(("rows", "parts"), [(15, 3), (20, 3), (21, 3), (24, 5), (28, 4)])
def test_rows_that_make_no_group_of_three_are_those_of_the_whole_in_small_micro_batches(rows, parts):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(4, 3).double())

    def forward(x, y):
        grouped = len(x) // 3 * 3
        scores = (x[:grouped] @ weights).view(-1, 3, 3)
        return (scores - scores.mean(1, keepdim=True)).pow(2).mean() + F.cross_entropy(
            scores.flatten(0, 1), y[:grouped]
        )

    batches = [(torch.randn(rows, 4).double(), torch.randint(0, 3, (rows,))) for _ in range(4)]
    assert_gradients_of_the_whole(forward, weights, batches, parts)


def assert_gradients_of_the_whole(forward, weights, batches, parts):
    memory = runtime.preset("16gb", precision="fp32", micro_batches=parts)
    for batch in batches:
        (expected,) = torch.autograd.grad(forward(*batch), [weights])
        memory.forward_backward(forward, *batch)
        torch.testing.assert_close(weights.grad, expected, rtol=1e-12, atol=1e-14)
        weights.grad = None
