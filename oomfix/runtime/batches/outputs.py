"""Putting the results of micro-batches together as if the batch had been whole.

Each value of a forward's result has a rule (`rule_choice` finds it): concatenated, summed, averaged or the same
everywhere. A rule makes a collector for each call, which takes the value of one micro-batch after the other, cut from
its graph, and gives that of the batch. Rows are written into one tensor made for all, since joining them at the end
would hold everything twice. Sums and means are taken on the device, without waiting for it. A rule holds for values of
the kind that it was found on; a collector refuses others (`Unforeseen`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomfix.runtime import trees
from oomfix.runtime.batches.batch import is_array
from oomfix.runtime.batches.bounds import Bound


@dataclass(frozen=True)
class Weight:
    """The share of one micro-batch.

    Attributes:
        rows: its samples.
        targets: what counts of them in its loss (targets, what a mask left).
        divided_by: what its loss divided by, where that is bounded.
        bound: how that follows from `targets`.
    """

    rows: float
    targets: float
    divided_by: float = 0.0
    bound: Bound | None = None


class Unforeseen(Exception):
    """A micro-batch gave what the rule was not found on; the message is why the batch runs whole."""

    def __init__(self, reason: str = "it returns other values than on the rows that were checked") -> None:
        super().__init__(reason)


class Collector(Protocol):
    """Takes one value per micro-batch and gives the value of the batch; both may raise `Unforeseen`."""

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
    """A sum over samples, or with `counts` a whole number, which no mean is."""

    counts: bool = False

    def collector(self, rows: int) -> Collector:
        return _Weighted(None, self.counts)


@dataclass(frozen=True)
class Mean:
    """A mean over samples (`by` is "rows") or over what the loss divides by, as a cross entropy does ("targets").

    With `bound`, what it divides by is kept away from 0.
    """

    by: str
    bound: Bound | None = None

    def collector(self, rows: int) -> Collector:
        return _Weighted(self.by, counts=False) if self.bound is None else _Bounded(self.bound)


@dataclass(frozen=True)
class Zero:
    """A number that was 0 on all rows seen, so a sum and a mean of it are told apart by neither: it has to stay 0."""

    def collector(self, rows: int) -> Collector:
        return _Zero()


@dataclass(frozen=True)
class Same:
    """Does not depend on the samples: a name, a temperature, None."""

    def collector(self, rows: int) -> Collector:
        return _First(others_are_equal=True)


@dataclass(frozen=True)
class First:
    """May depend on the samples, and is taken from the first micro-batch."""

    def collector(self, rows: int) -> Collector:
        return _First(others_are_equal=False)


@dataclass(frozen=True)
class Extend:
    """A list with entries per sample."""

    def collector(self, rows: int) -> Collector:
        return _List()


@dataclass(frozen=True)
class Inside:
    """A container, each of whose values has a rule of its own, under its key."""

    rules: tuple[Rule, ...]
    keys: tuple[Any, ...]

    def collector(self, rows: int) -> Collector:
        return _Container([rule.collector(rows) for rule in self.rules], self.keys)


@dataclass(frozen=True)
class Array:
    """A NumPy array, put together as a tensor would be."""

    rule: Rule

    def collector(self, rows: int) -> Collector:
        return _Array(self.rule.collector(rows))


class _Zero:
    def __init__(self) -> None:
        self._values: list[Any] = []

    def add(self, value: Any, weight: Weight) -> None:
        if not isinstance(value, torch.Tensor | int | float):
            raise Unforeseen
        self._values.append(detached(value))

    def result(self) -> Any:
        if any(bool((torch.as_tensor(value) != 0).any()) for value in self._values):
            raise Unforeseen("the rows checked left open how one of its results is put together")
        return self._values[0]


class _First:
    def __init__(self, others_are_equal: bool) -> None:
        self._others_are_equal = others_are_equal
        self._value: Any = None
        self._empty = True

    def add(self, value: Any, weight: Weight) -> None:
        if self._empty:
            self._value, self._empty = detached(value), False
        elif self._others_are_equal and not _are_equal(self._value, value):
            raise Unforeseen

    def result(self) -> Any:
        return self._value


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    return type(value) is type(other) and (value == other) is True


class _Array:
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def add(self, value: Any, weight: Weight) -> None:
        if not is_array(value) or value.dtype.kind not in "biuf":
            raise Unforeseen
        self._collector.add(torch.from_numpy(value), weight)

    def result(self) -> Any:
        return self._collector.result().numpy()


class _List:
    def __init__(self) -> None:
        self._values: list[Any] = []

    def add(self, value: Any, weight: Weight) -> None:
        if not isinstance(value, list):
            raise Unforeseen
        self._values.extend(detached(value))

    def result(self) -> Any:
        return self._values


class _Weighted:
    """A sum, or with `by` a mean; of tensors without waiting for the device, of numbers as numbers."""

    def __init__(self, by: str | None, counts: bool) -> None:
        self._by = by
        self._counts = counts
        self._sum: Any = None
        self._of_nothing: Any = None
        self._weight = 0.0

    def add(self, value: Any, weight: Weight) -> None:
        if not self._is_foreseen(value):
            raise Unforeseen
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

    def _is_foreseen(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            as_before = not isinstance(self._sum, torch.Tensor) or self._sum.shape == value.shape
            return as_before and value.is_floating_point() != self._counts
        return isinstance(value, int if self._counts else float) and not isinstance(value, bool)

    def result(self) -> Any:
        if self._by is None:
            return self._sum
        return self._sum / self._weight if self._weight else self._of_nothing


class _Bounded:
    """A mean whose parts were divided by what counts in them, kept away from 0, as the whole is once."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._sum: Any = 0.0
        self._counted = 0.0

    def add(self, value: Any, weight: Weight) -> None:
        if not (value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)):
            raise Unforeseen
        self._sum = detached(value) * weight.divided_by + self._sum
        self._counted += weight.targets

    def result(self) -> Any:
        return self._sum / self._bound(self._counted)


class _Rows:
    """Rows written into one tensor made for all of them; `cat` at the end would hold everything twice."""

    def __init__(self, dim: int, rows: int) -> None:
        self._dim = dim
        self._rows = rows
        self._whole: torch.Tensor | None = None
        self._filled = 0
        self._loose: list[torch.Tensor] = []

    def add(self, value: Any, weight: Weight) -> None:
        if not isinstance(value, torch.Tensor) or value.dim() <= self._dim:
            raise Unforeseen
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
        alike = self._shape_of_rows(value) == self._shape_of_rows(self._whole)
        return value.shape[self._dim] <= room and alike and value.dtype == self._whole.dtype

    def _shape_of_rows(self, value: torch.Tensor) -> list[int]:
        return [size for dim, size in enumerate(value.shape) if dim != self._dim]

    def result(self) -> torch.Tensor:
        # detached from what it is a part of, a tensor is no view, and a program may call `detach_()` on it
        rows = [] if self._whole is None else [self._whole.narrow(self._dim, 0, self._filled).detach()]
        rows += self._loose
        if any(self._shape_of_rows(value) != self._shape_of_rows(rows[0]) for value in rows):
            raise Unforeseen  # padded to the longest of a micro-batch, for example
        return rows[0] if len(rows) == 1 else torch.cat(rows, self._dim)


class _Container:
    def __init__(self, collectors: list[Collector], keys: tuple[Any, ...]) -> None:
        self._collectors = collectors
        self._keys = keys
        self._like: Any = None

    def add(self, value: Any, weight: Weight) -> None:
        inner = trees.contents(value) or []
        if tuple(key for key, _ in inner) != self._keys:
            raise Unforeseen
        if self._like is None:
            # not None, which a mapping of its own may leave out, and put last when it is there again
            self._like = trees.map_leaves(lambda _: ..., value, trees.contents)
        for collector, (_, child) in zip(self._collectors, inner, strict=True):
            collector.add(child, weight)

    def result(self) -> Any:
        return trees.rebuilt(self._like, [collector.result() for collector in self._collectors])


def means_over_targets(rule: Rule) -> int:
    """How many values of a result are means over what the loss divides by."""
    if isinstance(rule, Inside):
        return sum(map(means_over_targets, rule.rules))
    if isinstance(rule, Array):
        return means_over_targets(rule.rule)
    return int(isinstance(rule, Mean) and rule.by == "targets")


def detached(value: Any) -> Any:
    """`value` with every tensor in it cut from its graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return trees.map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value, trees.contents
    )


def loss_in(result: Any) -> torch.Tensor | None:
    """The loss in what a forward returned: the value itself, the first of a tuple or list, or "loss"."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple | list) and result:
        return loss_in(result[0])
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def the_loss(result: Any) -> torch.Tensor:
    """The loss in what a forward returned.

    Raises:
        ValueError: there is none, or it is not one number.
    """
    loss = loss_in(result)
    if loss is None or loss.numel() != 1:
        shape = type(result).__name__ if loss is None else f"a tensor of shape {tuple(loss.shape)}"
        raise ValueError(
            f"forward: returned {shape}, expected the loss as a tensor with one number, alone, first in a "
            "tuple, or under 'loss'"
        )
    return loss
