"""Losses made at random have the gradients of plain torch in three parts, or run whole."""

import pytest
import torch

from oomfix import runtime
from tests.runtime.random_losses import Network, RandomLoss

PARTS, CALLS = 3, 4


def differing(made: RandomLoss, seed: int) -> tuple[list[int], int]:
    """The calls whose loss or gradients are not those of plain torch, and how many ran in parts."""
    runtime.reset()
    torch.manual_seed(seed)
    model, memory = Network().double(), runtime.preset("16gb", precision="fp32", micro_batches=PARTS)
    optimizer, wrong = torch.optim.SGD(model.parameters(), 0.05), []
    for number, batch in enumerate(made.batches(CALLS)):
        whole = made.loss(model, *batch)
        if not whole.isfinite() or not whole.requires_grad:
            continue
        expected = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True, materialize_grads=True)
        found = memory.forward_backward(lambda *batch: made.loss(model, *batch), *batch)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        # relative to the largest of each
        pairs = zip([found, *gradients], [whole, *expected], strict=True)
        scale = max(float(gradient.abs().max()) for gradient in expected) + 1e-3
        if any(float((one - other).abs().max()) > 1e-12 * (scale + float(whole.abs())) for one, other in pairs):
            wrong.append(number)
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return wrong, sum(known.split_calls for known in memory._forwards)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 40), marks=pytest.mark.slow)], ids=["few", "more"])
def test_gradients_in_parts_are_those_of_the_whole_or_nothing_is_split(seeds):
    split = 0
    for seed in seeds:
        made = RandomLoss(seed)
        wrong, calls = differing(made, seed)
        assert not wrong, f"seed {seed}, calls {wrong}:\n{made.source}"
        split += calls
    assert split
