"""What a loss divides by where its program takes the mean: `(loss * mask).sum() / mask.sum()`, `loss[mask].mean()`.

The mean over what a mask leaves of a batch is the mean over its micro-batches, each weighted by how much it leaves of
it: what it divides by. Autograd keeps that in the graph of the loss, so it is read there, as the divisors of cross
entropies are (`normaliser`), and costs no second computation. Which of the divisors count is found out by a check:
those that for all rows are what they are for two parts of them together. A constant, as the number of batches whose
gradients are accumulated, is none of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from oomfix.runtime.normaliser import mean_nll_weights, share_targets
from oomfix.runtime.verdict import Verdict

_MEAN = 1  # torch's code for reduction="mean"
_DIVISIONS = ("DivBackward0", "DivBackward1")
# these give one number for many, and keep how many they were, or the numbers themselves
_MEANS = ("MeanBackward0",)
_MEAN_LOSSES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
# what the terms of a loss are put together with; behind anything else stand tensors with more than one number
_TERMS = ("AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0")


def divisors(loss: torch.Tensor) -> list[torch.Tensor | int]:
    """What each mean in `loss` divides by, as autograd keeps it, in the order of its terms; it may have none.

    Means inside of a model are not looked for. A divisor that depends on parameters is left out: the gradient flows
    through it.

    Args:
        loss: a scalar with its graph.
    """
    found: list[Any] = []
    ahead: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name in _DIVISIONS:
            (numerator, _), *others = node.next_functions
            if not any(other is not None for other, _ in others) and _is_number(node._saved_other):
                found.append(node._saved_other)
            ahead.append(numerator)
        elif name in _MEANS:
            found.append(node._saved_self_sym_numel)
        elif name in _MEAN_LOSSES and node._saved_reduction == _MEAN:
            found.append(node._saved_self.numel())
        elif name in _TERMS:
            ahead += [term for term, _ in reversed(node.next_functions)]
    return found


def _is_number(divisor: Any) -> bool:
    return not isinstance(divisor, torch.Tensor) or divisor.numel() == 1


def numbers(found: Sequence[torch.Tensor | int]) -> list[float]:
    """The numbers in what `divisors` returned. Reading them waits for the device, once."""
    tensors = [divisor.reshape(()).double() for divisor in found if isinstance(divisor, torch.Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(divisor, torch.Tensor) else float(divisor) for divisor in found]


def counting(whole: Sequence[float], parts: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The positions of the divisors that for all rows are the sum of those for the parts.

    None where the parts have other means than the whole.
    """
    if any(len(part) != len(whole) for part in parts):
        return ()
    pairs = enumerate(zip(whole, *parts, strict=True))
    return tuple(position for position, (total, *of_parts) in pairs if math.isclose(total, sum(of_parts), rel_tol=1e-5))


def weights(loss: torch.Tensor, verdict: Verdict) -> list[float]:
    """What the means that count in `loss` divide by, of cross entropies or taken by hand; none where it hides them.

    Args:
        loss: a scalar with its graph.
        verdict: says which they are.
    """
    if not verdict.divisors:
        return mean_nll_weights(loss, max(verdict.nll_losses, 1))
    found = divisors(loss)
    return numbers([found[position] for position in verdict.divisors]) if len(found) > max(verdict.divisors) else []


def are_one(loss: torch.Tensor, verdict: Verdict) -> bool:
    """Whether the means in `loss` divide by the same, in later batches too."""
    return len(verdict.divisors) == 1 if verdict.divisors else share_targets(loss, verdict.nll_losses)
