"""Putting the results of micro-batches together as if the batch had been whole.

Each value of a forward's result gets a rule: concatenated, summed, averaged or the same everywhere. A rule is
never guessed from a name; it is the one under which the results of two parts give the result of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomfix.runtime import trees
from oomfix.runtime.batch import is_array

# Relative error that two orders of the same sum may show; on a GPU matrix products may run in TF32.
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_RELATIVE_TF32 = 1e-3


@dataclass(frozen=True)
class Weight:
    """The share of one micro-batch: its samples, and what its cross entropies divided by."""

    rows: float
    targets: float


class Collector(Protocol):
    """Takes one value per micro-batch and gives the value of the batch."""

    def add(self, value: Any, weight: Weight) -> None: ...

    def result(self) -> Any: ...


class Rule(Protocol):
    """How one value, or one container of values, is put together."""

    def collector(self, rows: int) -> Collector: ...


@dataclass(frozen=True)
class Concatenate:
    """Rows of micro-batches stand one after the other in dimension `dim`."""

    dim: int

    def collector(self, rows: int) -> Collector:
        return _Rows(self.dim, rows)


@dataclass(frozen=True)
class Sum:
    """A count or a sum over samples."""

    def collector(self, rows: int) -> Collector:
        return _Weighted(None)


@dataclass(frozen=True)
class Mean:
    """A mean over samples (`by` is "rows") or over the targets of a cross entropy ("targets")."""

    by: str

    def collector(self, rows: int) -> Collector:
        return _Weighted(self.by)


@dataclass(frozen=True)
class Zero:
    """A number that was 0 on all rows seen, so a sum and a mean of it are told apart by neither: it has to stay 0."""

    def collector(self, rows: int) -> Collector:
        return _Zero()


@dataclass(frozen=True)
class Same:
    """Does not depend on the samples: a name, a temperature, None."""

    def collector(self, rows: int) -> Collector:
        return _First()


@dataclass(frozen=True)
class Extend:
    """A list with entries per sample."""

    def collector(self, rows: int) -> Collector:
        return _List()


@dataclass(frozen=True)
class Inside:
    """A container, each of whose values has a rule of its own."""

    rules: tuple[Rule, ...]

    def collector(self, rows: int) -> Collector:
        return _Container([rule.collector(rows) for rule in self.rules])


@dataclass(frozen=True)
class Array:
    """A NumPy array, put together as a tensor would be."""

    rule: Rule

    def collector(self, rows: int) -> Collector:
        return _Array(self.rule.collector(rows))


class NotZero(Exception):
    """A value that was 0 so far is not: how it is put together is not known."""


class _Zero:
    def __init__(self) -> None:
        self._values: list[Any] = []

    def add(self, value: Any, weight: Weight) -> None:
        self._values.append(detached(value))

    def result(self) -> Any:
        if any(bool((torch.as_tensor(value) != 0).any()) for value in self._values):
            raise NotZero
        return self._values[0]


class _First:
    def __init__(self) -> None:
        self._value: Any = None
        self._empty = True

    def add(self, value: Any, weight: Weight) -> None:
        if self._empty:
            self._value, self._empty = detached(value), False

    def result(self) -> Any:
        return self._value


class _Array:
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def add(self, value: Any, weight: Weight) -> None:
        self._collector.add(torch.from_numpy(value), weight)

    def result(self) -> Any:
        return self._collector.result().numpy()


class _List:
    def __init__(self) -> None:
        self._values: list[Any] = []

    def add(self, value: Any, weight: Weight) -> None:
        self._values.extend(detached(value))

    def result(self) -> Any:
        return self._values


class _Weighted:
    """A sum, or with `by` a mean; of tensors without waiting for the device, of numbers as numbers."""

    def __init__(self, by: str | None) -> None:
        self._by = by
        self._sum: Any = None
        self._of_nothing: Any = None
        self._weight = 0.0

    def add(self, value: Any, weight: Weight) -> None:
        value = detached(value)
        if self._by is not None:
            share = getattr(weight, self._by)
            if share == 0.0:
                self._of_nothing = value
                return  # the mean of nothing is NaN, and NaN times 0 is NaN
            self._weight += share
            value = value * share
        # a new tensor, not an in-place sum: the value may be one that the forward still owns
        self._sum = value if self._sum is None else self._sum + value

    def result(self) -> Any:
        if self._by is None:
            return self._sum
        return self._sum / self._weight if self._weight else self._of_nothing


class _Rows:
    """Rows written into one tensor made for all of them; `cat` at the end would hold everything twice."""

    def __init__(self, dim: int, rows: int) -> None:
        self._dim = dim
        self._rows = rows
        self._whole: torch.Tensor | None = None
        self._filled = 0
        self._loose: list[torch.Tensor] = []

    def add(self, value: torch.Tensor, weight: Weight) -> None:
        value = value.detach()
        length = value.shape[self._dim]
        if self._whole is None and not self._loose and self._rows * length % int(weight.rows) == 0:
            shape = list(value.shape)
            shape[self._dim] = self._rows * length // int(weight.rows)
            self._whole = value.new_empty(shape)
        if self._whole is None or not self._fits(value):
            self._loose.append(value)
            return
        self._whole.narrow(self._dim, self._filled, length).copy_(value)
        self._filled += length

    def _fits(self, value: torch.Tensor) -> bool:
        if self._whole is None or self._loose:
            return False
        room = self._whole.shape[self._dim] - self._filled
        others = [list(tensor.shape) for tensor in (self._whole, value)]
        for shape in others:
            shape[self._dim] = 0
        return value.shape[self._dim] <= room and others[0] == others[1] and value.dtype == self._whole.dtype

    def result(self) -> torch.Tensor:
        if self._whole is None:
            return torch.cat(self._loose, self._dim)
        written = self._whole.narrow(self._dim, 0, self._filled)
        if self._loose:
            return torch.cat([written, *self._loose], self._dim)
        return written


class _Container:
    def __init__(self, collectors: list[Collector]) -> None:
        self._collectors = collectors
        self._like: Any = None

    def add(self, value: Any, weight: Weight) -> None:
        inner = trees.contents(value) or []
        if self._like is None:
            self._like = trees.map_leaves(lambda _: None, value, trees.contents)
        for collector, (_, child) in zip(self._collectors, inner, strict=True):
            collector.add(child, weight)

    def result(self) -> Any:
        return trees.rebuilt(self._like, [collector.result() for collector in self._collectors])


def choose(whole: Any, parts: Sequence[Any], weights: Sequence[Weight]) -> Rule | None:
    """The rule under which `parts` give `whole`, or None if there is none.

    Args:
        whole: result of the forward on some rows.
        parts: its results on the same rows in two runs.
        weights: the shares of the two runs.
    """
    inner, cut = trees.contents(whole), [trees.contents(part) for part in parts]
    if inner is None or any(part is None for part in cut):
        return _choose_value(whole, parts, weights)
    if isinstance(whole, list) and _is_list_of_samples(whole, parts):
        return _choose_value(whole, parts, weights)
    if any(len(part or ()) != len(inner) for part in cut):
        return None
    rules = []
    for index, (_, child) in enumerate(inner):
        rule = choose(child, [(part or [])[index][1] for part in cut], weights)
        if rule is None:
            return None
        rules.append(rule)
    return Inside(tuple(rules))


def contains(rule: Rule, wanted: Rule) -> bool:
    """Whether `rule` is `wanted`, or has it for one of its values."""
    return rule == wanted or (isinstance(rule, Inside) and any(contains(inner, wanted) for inner in rule.rules))


def likely(value: Any, micro: Any) -> Rule:
    """The rule that the shape and type of a value suggest, for splits that were asked for unverified.

    Args:
        value: result of the forward on some rows.
        micro: its result on fewer rows.
    """
    inner, cut = trees.contents(value), trees.contents(micro)
    if inner is not None and cut is not None and len(inner) == len(cut) and not isinstance(value, list):
        pairs = zip(inner, cut, strict=True)
        return Inside(tuple(likely(a, b) for (_, a), (_, b) in pairs))
    if isinstance(value, list):
        return Extend()
    if isinstance(value, torch.Tensor) and isinstance(micro, torch.Tensor) and value.shape != micro.shape:
        return Concatenate(_growing_dim(value, micro) or 0)
    if isinstance(value, torch.Tensor):
        return Mean("rows") if value.is_floating_point() else Sum()
    if isinstance(value, float):
        return Mean("rows")
    return Sum() if isinstance(value, int) and not isinstance(value, bool) else Same()


def detached(value: Any) -> Any:
    """`value` with every tensor in it cut from its graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value, trees.contents
    )


def _growing_dim(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    if whole.dim() != part.dim():
        return None
    differing = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    return differing[0] if len(differing) == 1 else None


def _is_list_of_samples(whole: list[Any], parts: Sequence[Any]) -> bool:
    lengths = [len(part) for part in parts if isinstance(part, list)]
    return len(lengths) == len(parts) and sum(lengths) == len(whole) and len(whole) not in lengths


def _choose_value(whole: Any, parts: Sequence[Any], weights: Sequence[Weight]) -> Rule | None:
    if isinstance(whole, list):
        joined = [value for part in parts for value in part]
        return Extend() if len(joined) == len(whole) and equal(whole, joined) else None
    if isinstance(whole, torch.Tensor):
        return _choose_tensor(whole, parts, weights)
    if is_array(whole):
        if not all(is_array(part) for part in parts) or whole.dtype.kind not in "biuf":
            return None
        rule = _choose_tensor(torch.from_numpy(whole), [torch.from_numpy(part) for part in parts], weights)
        return None if rule is None else Array(rule)
    if isinstance(whole, bool) or not isinstance(whole, int | float):
        return Same() if all(type(part) is type(whole) and (part == whole) is True for part in parts) else None
    if not all(isinstance(part, int | float) for part in parts):
        return None
    return _choose_scalar(whole, list(parts), weights, isinstance(whole, int))


def _choose_tensor(whole: torch.Tensor, parts: Sequence[Any], weights: Sequence[Weight]) -> Rule | None:
    if not all(isinstance(part, torch.Tensor) and part.dim() == whole.dim() for part in parts):
        return None
    if all(part.shape == whole.shape for part in parts):
        return _choose_scalar(whole, list(parts), weights, not whole.is_floating_point())
    dim = _growing_dim(whole, parts[0])
    if dim is None or sum(part.shape[dim] for part in parts) != whole.shape[dim]:
        return None
    if any(_growing_dim(whole, part) != dim for part in parts):
        return None
    return Concatenate(dim) if close(whole, torch.cat(list(parts), dim)) else None


def _choose_scalar(whole: Any, parts: list[Any], weights: Sequence[Weight], counts: bool) -> Rule | None:
    """A value that has the same shape for any number of rows: mean, sum, or independent of them."""
    fitting: list[Rule] = []
    # where targets are in proportion to rows, both means are one; that over rows is refused later where they are not
    first = weights[0]
    by_targets = any(weight.targets * first.rows != weight.rows * first.targets for weight in weights)
    for rule in (Mean("targets"), Mean("rows"), Sum()):
        # an average of counts is a count of nothing; without cross entropies both means are one
        if (isinstance(rule, Mean) and counts) or (rule == Mean("targets") and not by_targets):
            continue
        collector = rule.collector(0)
        for part, weight in zip(parts, weights, strict=True):
            collector.add(part, weight)
        if close(whole, collector.result()):
            fitting.append(rule)
    if counts and all(equal(whole, part) for part in parts):
        # 0 on all rows: a count that found nothing so far; any other constant is no count
        return Sum() if fitting else Same()
    if Sum() in fitting and len(fitting) > 1:
        return Zero()
    return fitting[0] if fitting else None


def close(a: Any, b: Any) -> bool:
    """Whether two values are the same number up to the order in which sums were taken."""
    if not isinstance(a, torch.Tensor):
        a, b = torch.tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
        return bool(torch.isclose(a, b, rtol=_RELATIVE[torch.float32], atol=1e-12, equal_nan=True))
    if not a.is_floating_point():
        return bool(torch.equal(a, b)) if isinstance(b, torch.Tensor) else bool((a == b).all())
    a, b = a.detach(), b.detach()
    relative = _RELATIVE.get(a.dtype, _RELATIVE[torch.bfloat16])
    if a.device.type == "cuda" and a.dtype == torch.float32:
        relative = _RELATIVE_TF32
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


def loss_in(result: Any) -> torch.Tensor | None:
    """The loss in what a forward returned: the value itself, the first of a tuple or list, or "loss"."""
    if isinstance(result, tuple | list) and result:
        return loss_in(result[0])
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", None)
    return result if isinstance(result, torch.Tensor) else None
