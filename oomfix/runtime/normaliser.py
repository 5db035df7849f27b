"""What a cross entropy divides by: the sum of the weights of the targets that count.

The mean of `cross_entropy` and `nll_loss` is over targets that are not ignored, each by its class's weight. The
mean over a batch is therefore the mean over its micro-batches weighted by that sum, not by samples. Autograd
keeps it (`total_weight` of `nll_loss_forward`), so it is read from the graph and costs no second computation.
"""

import torch
from torch.autograd.graph import Node

_MEAN = 1  # torch's code for reduction="mean"


def mean_nll_weights(loss: torch.Tensor, expected: int) -> list[float]:
    """The divisor of every NLL loss with a mean that `loss` was computed from.

    Args:
        loss: a scalar with its graph.
        expected: how many there should be; the walk, which starts at the loss, ends when it has found them.

    Returns:
        Up to `expected` sums of target weights. Reading them waits for the device, once.
    """
    found: list[torch.Tensor] = []
    layer: list[Node | None] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while layer and len(found) < expected:
        following: list[Node | None] = []
        for node in layer:
            if node is None:
                continue
            if node.name().startswith("NllLoss") and node._saved_reduction == _MEAN:  # type: ignore[attr-defined]
                found.append(node._saved_total_weight)  # type: ignore[attr-defined]
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    following.append(parent)
        layer = following
    if not found:
        return []
    weights: list[float] = torch.stack(found).tolist()
    return weights
