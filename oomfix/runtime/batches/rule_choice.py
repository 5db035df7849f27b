"""The rule by which results of micro-batches are put together, found by comparing results on a few rows.

A rule is never guessed from a name: each value of a result gets the one under which the results of two parts give
that of the whole. Means and sums are told apart because there are two parts, means over samples and over targets
because these hold other shares of both; what several rules explain (a loss of 0) stays open. Numbers are compared up
to the order in which sums are taken, relative to the largest entry of a tensor. Only where the user asked for a split
whatever the check says is a rule read off shapes and types (`likely`).
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from oomfix.runtime import simulation, trees
from oomfix.runtime.batches.batch import is_array
from oomfix.runtime.batches.outputs import (
    Array,
    Concatenate,
    Extend,
    First,
    Inside,
    Mean,
    Rule,
    Same,
    Sum,
    Weight,
    Zero,
)

# Relative error that two orders of the same sum may show; on a GPU matrix products may run in TF32.
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_RELATIVE_TF32 = 1e-3
_ROUNDINGS = 32  # that two orders of the sums in a term may differ by
_LARGEST = sys.float_info.max  # infinity is close to nothing else


def choose(
    whole: Any, parts: Sequence[Any], weights: Sequence[Weight], terms: Sequence[torch.Tensor] = ()
) -> Rule | None:
    """The rule under which `parts` give `whole`, or None if there is none.

    Args:
        whole: result of the forward on some rows.
        parts: its results on the same rows in two runs.
        weights: the shares of the two runs.
        terms: numbers [] that were added up on the way to it. What is left of terms that cancel each other, such as
            the two means of a critic, is as exact as they are, not as itself.
    """
    exact = [term for term in terms if term.dtype in (torch.float32, torch.float64) and simulation.assumption is None]
    rounding = _ROUNDINGS * max((float(term.abs()) * torch.finfo(term.dtype).eps for term in exact), default=0.0)
    return _choose(whole, parts, weights, rounding if rounding < _LARGEST else 0.0)


def _choose(whole: Any, parts: Sequence[Any], weights: Sequence[Weight], rounding: float) -> Rule | None:
    inner, cut = trees.contents(whole), [trees.contents(part) for part in parts]
    if inner is None or any(part is None for part in cut):
        return _choose_value(whole, parts, weights, rounding)
    if isinstance(whole, list) and _is_list_of_samples(whole, parts):
        return _choose_value(whole, parts, weights, rounding)
    keys = tuple(key for key, _ in inner)
    if any(tuple(key for key, _ in part or ()) != keys for part in cut):
        return None
    rules = []
    for index, (_, child) in enumerate(inner):
        rule = _choose(child, [(part or [])[index][1] for part in cut], weights, rounding)
        if rule is None:
            return None
        rules.append(rule)
    return Inside(tuple(rules), keys)


def are_told_apart(weights: Sequence[Weight]) -> bool:
    """Whether means over samples and over targets show to be different ones."""
    first = weights[0]
    return any(weight.targets * first.rows != weight.rows * first.targets for weight in weights)


def likely(value: Any, micro: Any) -> Rule:
    """The rule that the shape and type of a value suggest, for splits that were asked for unverified.

    Args:
        value: result of the forward on some rows.
        micro: its result on fewer rows.
    """
    inner, cut = trees.contents(value), trees.contents(micro)
    if inner is not None and cut is not None and len(inner) == len(cut) and not isinstance(value, list):
        pairs = zip(inner, cut, strict=True)
        return Inside(tuple(likely(a, b) for (_, a), (_, b) in pairs), tuple(key for key, _ in inner))
    if isinstance(value, list):
        return Extend()
    if isinstance(value, torch.Tensor) and isinstance(micro, torch.Tensor) and value.shape != micro.shape:
        return Concatenate(_growing_dim(value, micro) or 0)
    if isinstance(value, torch.Tensor):
        return Mean("rows") if value.is_floating_point() else Sum(counts=True)
    if isinstance(value, float):
        return Mean("rows")
    return Sum(counts=True) if isinstance(value, int) and not isinstance(value, bool) else First()


def _growing_dim(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    if whole.dim() != part.dim():
        return None
    differing = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    return differing[0] if len(differing) == 1 else None


def _is_list_of_samples(whole: list[Any], parts: Sequence[Any]) -> bool:
    lengths = [len(part) for part in parts if isinstance(part, list)]
    return len(lengths) == len(parts) and sum(lengths) == len(whole) and len(whole) not in lengths


def _choose_value(whole: Any, parts: Sequence[Any], weights: Sequence[Weight], rounding: float) -> Rule | None:
    if simulation.assumption is not None:
        return likely(whole, parts[0])
    if isinstance(whole, list):
        joined = [value for part in parts for value in part]
        return Extend() if len(joined) == len(whole) and equal(whole, joined) else None
    if isinstance(whole, torch.Tensor):
        return _choose_tensor(whole, parts, weights, rounding)
    if is_array(whole):
        if not all(is_array(part) for part in parts) or whole.dtype.kind not in "biuf":
            return None
        rule = _choose_tensor(torch.from_numpy(whole), [torch.from_numpy(part) for part in parts], weights, rounding)
        return None if rule is None else Array(rule)
    if isinstance(whole, bool) or not isinstance(whole, int | float):
        return Same() if all(type(part) is type(whole) and (part == whole) is True for part in parts) else None
    if not all(isinstance(part, int | float) for part in parts):
        return None
    return _choose_scalar(whole, list(parts), weights, isinstance(whole, int), rounding)


def _choose_tensor(
    whole: torch.Tensor, parts: Sequence[Any], weights: Sequence[Weight], rounding: float
) -> Rule | None:
    if not all(isinstance(part, torch.Tensor) and part.dim() == whole.dim() for part in parts):
        return None
    if all(part.shape == whole.shape for part in parts):
        return _choose_scalar(whole, list(parts), weights, not whole.is_floating_point(), rounding)
    dim = _growing_dim(whole, parts[0])
    if dim is None or sum(part.shape[dim] for part in parts) != whole.shape[dim]:
        return None
    if any(_growing_dim(whole, part) != dim for part in parts):
        return None
    return Concatenate(dim) if close(whole, torch.cat(list(parts), dim)) else None


def _choose_scalar(
    whole: Any, parts: list[Any], weights: Sequence[Weight], counts: bool, rounding: float
) -> Rule | None:
    """A value that has the same shape for any number of rows: mean, sum, or independent of them."""
    # where targets are in proportion to rows, both means are one; that over rows is refused later where they are not
    first, by_targets = weights[0], are_told_apart(weights)
    total = Sum(counts)
    rules: list[Rule] = [total]
    if not counts:
        # an average of counts is a count of nothing; without cross entropies both means are one
        rules = [*([Mean("targets")] if by_targets else []), Mean("rows"), total]
        if first.bound is not None:
            rules.insert(0, Mean("targets", first.bound))
    fitting = _fitting(rules, whole, parts, weights, rounding)
    if total in fitting and len(fitting) > 1 and rounding:
        # a small number beside large terms, which is not made of them, tells its rule without the allowance for these
        fitting = _fitting(rules, whole, parts, weights, 0.0) or fitting
    if counts and all(equal(whole, part) for part in parts):
        # 0 on all rows: a count that found nothing so far; any other constant is no count
        return total if fitting else Same()
    if total in fitting and len(fitting) > 1:
        return Zero()
    return fitting[0] if fitting else None


def _fitting(
    rules: Sequence[Rule], whole: Any, parts: Sequence[Any], weights: Sequence[Weight], rounding: float
) -> list[Rule]:
    found = []
    for rule in rules:
        collector = rule.collector(0)
        for part, weight in zip(parts, weights, strict=True):
            collector.add(part, weight)
        if close(whole, collector.result(), rounding):
            found.append(rule)
    return found


def close(a: Any, b: Any, rounding: float = 0.0) -> bool:
    """Whether two values are the same number up to the order in which sums were taken.

    Args:
        a: a number, or a tensor.
        b: a number, or a tensor of that shape.
        rounding: by how much two tensors of one number may differ besides.
    """
    if not isinstance(a, torch.Tensor):
        a, b = torch.tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
        return bool(torch.isclose(a, b, rtol=_RELATIVE[torch.float32], atol=1e-12, equal_nan=True))
    if a.is_complex():
        return close(torch.view_as_real(a), torch.view_as_real(torch.as_tensor(b, dtype=a.dtype)))
    if not a.is_floating_point():
        return bool(torch.equal(a, b)) if isinstance(b, torch.Tensor) else bool((a == b).all())
    a, b = a.detach(), b.detach()
    relative = _RELATIVE.get(a.dtype, _RELATIVE[torch.bfloat16])
    if a.device.type == "cuda" and a.dtype == torch.float32:
        relative = _RELATIVE_TF32
    if a.numel() == b.numel() == 1 and a.dim() == b.dim():
        one, other = a.item(), b.item()
        # as below: relative to the second, and to the largest entry, which is the first
        near = one == other or abs(one - other) <= min(relative * (abs(one) + abs(other)) + rounding, _LARGEST)
        return bool(near or (one != one and other != other))
    finite = a[a.isfinite()]
    # entries near zero are as exact as the largest one, not as themselves
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b.to(a.dtype), rtol=relative, atol=relative * scale, equal_nan=True)


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, tensors up to the order in which sums were taken."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and close(a, b)
    if is_array(a):
        return is_array(b) and a.shape == b.shape and bool((a == b).all())
    inner, other = trees.contents(a), trees.contents(b)
    if inner is None or other is None:
        return type(a) is type(b) and (a == b) is True
    if len(inner) != len(other):
        return False
    return all(equal(x, y) for (_, x), (_, y) in zip(inner, other, strict=True))
