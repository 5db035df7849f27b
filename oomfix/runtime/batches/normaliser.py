"""What a cross entropy divides by: the sum of the weights of the targets that count.

The mean of `cross_entropy` and `nll_loss` is over targets that are not ignored, each by its class's weight. The
mean over a batch is therefore the mean over its micro-batches weighted by that sum, not by samples. Autograd
keeps it (`total_weight` of `nll_loss_forward`), so it is read from the graph and costs no second computation.
"""

from typing import Any

import torch
from torch.autograd.graph import Node

_MEAN = 1  # torch's code for reduction="mean"
# not those of a gradient that is differentiated again (NllLossBackwardBackward0), which keep no divisor
_NLL_NODES = ("NllLossBackward0", "NllLoss2DBackward0")


def mean_nll_weights(loss: torch.Tensor, expected: int) -> list[float]:
    """The divisor of every NLL loss with a mean that `loss` was computed from.

    Args:
        loss: a scalar with its graph.
        expected: how many there should be; the walk, which starts at the loss, ends when it has found them.

    Returns:
        Up to `expected` sums of target weights. Reading them waits for the device, once.
    """
    found = [node._saved_total_weight for node in _mean_nlls(loss, expected)]  # type: ignore[attr-defined]
    weights: list[float] = torch.stack(found).tolist() if found else []
    return weights


def share_targets(loss: torch.Tensor, expected: int) -> bool:
    """Whether all NLL losses with a mean that `loss` was computed from divide by the same; arguments as above.

    That is so where targets, class weights and the ignored label are the same. Equal divisors alone would show nothing
    of a later batch, in which more targets may be ignored.
    """
    losses: list[Any] = [*_mean_nlls(loss, expected)]
    return all(
        _same(node._saved_target, losses[0]._saved_target)
        and _same(node._saved_weight, losses[0]._saved_weight)
        and node._saved_ignore_index == losses[0]._saved_ignore_index
        for node in losses[1:]
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))


def _mean_nlls(loss: torch.Tensor, expected: int) -> list[Node]:
    found: list[Node] = []
    layer: list[Node | None] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while layer and len(found) < expected:
        following: list[Node | None] = []
        for node in layer:
            if node is None:
                continue
            if node.name() in _NLL_NODES and node._saved_reduction == _MEAN:  # type: ignore[attr-defined]
                found.append(node)
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    following.append(parent)
        layer = following
    return found
