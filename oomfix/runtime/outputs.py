"""Putting the results of micro-batches together as if the batch had been whole.

Each value of a forward's result has a rule (`rule_choice` finds it): concatenated, summed, averaged or the same
everywhere. A rule makes a collector for each call, which takes the value of one micro-batch after the other, cut from
its graph, and gives that of the batch. Rows are written into one tensor made for all, since joining them at the end
would hold everything twice. Sums and means are taken on the device, without waiting for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomfix.runtime import trees


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


def contains(rule: Rule, wanted: Rule) -> bool:
    """Whether `rule` is `wanted`, or has it for one of its values."""
    return rule == wanted or (isinstance(rule, Inside) and any(contains(inner, wanted) for inner in rule.rules))


def detached(value: Any) -> Any:
    """`value` with every tensor in it cut from its graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value, trees.contents
    )


def loss_in(result: Any) -> torch.Tensor | None:
    """The loss in what a forward returned: the value itself, the first of a tuple or list, or "loss"."""
    if isinstance(result, tuple | list) and result:
        return loss_in(result[0])
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", None)
    return result if isinstance(result, torch.Tensor) else None
