"""Cross entropies that divide by targets of their own: of masked words and of next sentences, of labels that some lack.

No weight of a part is right for all of them. Each is therefore divided by its targets in the whole batch, not by those
in the part, and then all are means over samples. How many targets the whole has is counted in the batch before the
parts run: a check finds the place that they stand at, see `Batch.placed`. The parts count theirs too, and have to come
to the same.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from oomfix.runtime import compat
from oomfix.runtime.batches.batch import Place
from oomfix.runtime.batches.outputs import Unforeseen
from oomfix.runtime.batches.rows import NUMBERS
from oomfix.runtime.memory.oom import is_out_of_memory
from oomfix.runtime.techniques.cross_entropy import chunked_cross_entropy, linear_cross_entropy

_LOSSES = (F.cross_entropy, F.nll_loss, chunked_cross_entropy, linear_cross_entropy)
_SIGNATURES = {loss: inspect.signature(loss) for loss in _LOSSES}
_MOST_COLUMNS = 64  # of a tensor with one label per task

_Placed = Mapping[Place, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Labels:
    """Where the targets of a cross entropy stand in a batch.

    Attributes:
        place: of their tensors, as in `Batch.placed`: what stands ahead of them may be longer in another batch.
        column: the only one that counts, None: all.
        skipped: first entries of each row that are never predicted, as by a language model.
        first: the label of the first class.
        left_out: a label that the program leaves out itself, as it does all below the first class.
        mask: place of tensors that are 0 where the program leaves labels out.
    """

    place: Place
    column: int | None = None
    skipped: int = 0
    first: int = 0
    left_out: int | None = None
    mask: Place | None = None

    def counted(self, batch: _Placed, ignored: int) -> torch.Tensor:
        """The classes [n] of the labels that count in the tensors of a batch, where `ignored` does not."""
        found = []
        for number, tensor in enumerate(batch[self.place]):
            classes = self._part_of(tensor).long() - self.first
            counts = (classes >= 0) & (classes != ignored)
            if self.left_out is not None:
                counts &= classes != self.left_out - self.first
            if self.mask is not None:
                counts &= self._part_of(batch[self.mask][number]) != 0
            found.append(classes[counts])
        return torch.cat(found)

    @property
    def effort(self) -> int:
        """How much a program does to make these its targets."""
        # a few labels may be the same without some class by chance
        return (self.mask is not None) + 2 * (self.first != 0) + 3 * (self.left_out is not None)

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach().reshape(len(tensor), -1) if self.column is not None else tensor.detach()
        rows = rows if self.column is None else rows[:, self.column]
        return rows[..., self.skipped :] if self.skipped else rows


@dataclass(frozen=True)
class CrossEntropy:
    """A cross entropy with a mean over class numbers, called with these arguments."""

    func: Any
    given: dict[str, Any]

    @staticmethod
    def may_be(func: Any) -> bool:
        """Whether a call of that function may be one."""
        return func in _SIGNATURES

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> "CrossEntropy | None":
        if func not in _SIGNATURES:
            return None
        # what is looked at here is nothing that the program does, as a watch around this would take it
        with torch._C.DisableTorchFunction():
            return cls._with_a_mean(func, args, kwargs)

    @classmethod
    def _with_a_mean(cls, func: Any, args: Any, kwargs: Any) -> "CrossEntropy | None":
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        target = given["target"]
        is_mean = (given["reduction"], given.get("size_average"), given.get("reduce")) == ("mean", None, None)
        if not is_mean or target.is_floating_point() or compat.beneath_transforms(target) is None:
            return None
        # what is run again in backward runs without the contexts around the forward
        return None if compat.is_inside_checkpoint() else cls(func, given)

    @property
    def counted(self) -> torch.Tensor:
        """Its targets [n] that count."""
        with torch._C.DisableTorchFunction():
            target: torch.Tensor = self.given["target"].detach()
            return target[target != self.given["ignore_index"]]

    def amount(self, labels: torch.Tensor) -> float:
        """What it divides by where these labels count."""
        weight = self.given["weight"]
        with torch._C.DisableTorchFunction():
            return float(labels.numel() if weight is None else weight.detach().double()[labels.to(weight.device)].sum())

    def total(self) -> torch.Tensor:
        """Its sum."""
        return self.func(**{**self.given, "reduction": "sum"})  # type: ignore[no-any-return]

    def divided_by(self, amount: float) -> torch.Tensor:
        """Its sum, divided by that amount; not a number where that is nothing, as its mean is."""
        return self.total() * (1 / amount if amount else math.nan)


class Noted(TorchFunctionMode):
    """Context around a forward that notes its cross entropies.

    Args:
        batch: the tensors that it is given, as in `Batch.placed`.

    Attributes:
        amounts: what each divides by.
    """

    def __init__(self, batch: _Placed) -> None:
        super().__init__()
        self.batch = batch
        self._calls: list[tuple[torch.Tensor, int]] = []
        self.amounts: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = CrossEntropy.of(func, args, kwargs or {})
        if call is not None:
            self._calls.append((call.counted, call.given["ignore_index"]))
            self.amounts.append(call.amount(call.counted))
        return func(*args, **(kwargs or {}))

    def places(self) -> tuple[Labels, ...]:
        """Where the targets of each stand in the batch; none where some stand nowhere."""
        found = [_find(number, *call, self.batch) for number, call in enumerate(self._calls)]
        places = tuple(labels for labels in found if labels is not None)
        return places if len(places) == len(found) else ()


def _find(number: int, counted: torch.Tensor, ignored: int, batch: _Placed) -> Labels | None:
    """Where the targets of the cross entropy with that number stand."""
    # of several tasks, each with a column, the labels of a few rows may be the same
    candidates = sorted(_candidates(batch), key=lambda labels: (labels.column not in (None, number), labels.effort))
    in_order = (labels for labels in candidates if torch.equal(labels.counted(batch, ignored).to(counted), counted))
    # some programs turn rows and columns, which changes the order
    in_any = (labels for labels in candidates if _are_the_same(labels.counted(batch, ignored).to(counted), counted))
    return next(in_order, None) or next(in_any, None)


def _are_the_same(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether these are the same in some order."""
    return len(values) == len(others) and torch.equal(values.sort().values, others.sort().values)


def _candidates(batch: _Placed) -> Iterator[Labels]:
    """Where targets may stand, the plainest first."""
    placed = {place: tensors for place, tensors in batch.items() if _may_hold_labels(tensors)}
    shapes = {place: [tensor.shape for tensor in tensors] for place, tensors in placed.items()}
    for place, tensors in placed.items():
        values = torch.cat([tensor.detach().flatten() for tensor in tensors])
        # what means "none" is less than all classes, or more
        left_out = sorted({int(values.min()), int(values.max())})
        masks = [other for other in placed if other != place and shapes[other] == shapes[place]]
        is_flat, width = tensors[0].dim() < 2, min(tensor[0].numel() for tensor in tensors)
        columns = range(width if not is_flat and width <= _MOST_COLUMNS else 0)
        parts = [Labels(place), *(() if is_flat else [Labels(place, skipped=1)])]
        for labels in (*parts, *(Labels(place, column) for column in columns)):
            yield from (replace(labels, mask=mask) for mask in masks)
            for label in (None, *left_out):
                yield from (replace(labels, left_out=label, first=first) for first in (0, 1))


def _may_hold_labels(tensors: Sequence[torch.Tensor]) -> bool:
    if any(not tensor.dim() or tensor.layout != torch.strided or tensor.is_nested for tensor in tensors):
        return False
    if any(tensor.dtype not in NUMBERS for tensor in tensors) or not any(tensor.numel() for tensor in tensors):
        return False
    return all(_is_whole(tensor) for tensor in tensors)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers; of those with a point, few."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return tensor[0].numel() <= _MOST_COLUMNS and bool((tensor.isfinite() & (tensor == tensor.round())).all())


class OwnMeans:
    """The cross entropies in the parts of one batch.

    Args:
        places: where the targets of each stand; none: they stay as they are.
        batch: the tensors of all rows, as in `Batch.placed`.
        rows: how many these are.
        amounts: what each divides by where that is known, and the batch does not show it: masks have got gaps.
    """

    def __init__(
        self, places: Sequence[Labels | None], batch: _Placed, rows: int, amounts: Sequence[float] = ()
    ) -> None:
        self._places = places
        self._batch = batch
        self._rows = rows
        self._whole = list(amounts)
        self._parts: list[list[float]] = []

    def part(self, rows: int) -> AbstractContextManager[Any]:
        """The context around the forward of so many rows."""
        if not self._places:
            return nullcontext()
        self._parts.append([])
        return _Part(self, rows / self._rows)

    def expect_all(self) -> None:
        """Refuse parts that did not have, all together, as many targets as the batch holds.

        Raises:
            Unforeseen: they had others.
        """
        if any(len(part) != len(self._places) for part in self._parts):
            raise Unforeseen("a part of it has other cross entropies than a few rows had")
        if not self.all_counted():
            raise Unforeseen("its cross entropies have other targets than the batch shows")

    def all_counted(self) -> bool:
        """Whether the parts together had as many targets as the batch holds."""
        if any(len(part) != len(self._places) for part in self._parts):
            return False
        together = [sum(amounts) for amounts in zip(*self._parts, strict=True)]
        return all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(together, self._whole, strict=True))

    def divided(self, call: CrossEntropy, share: float) -> torch.Tensor:
        """The next cross entropy of a part with that share of the rows, as a mean over them."""
        part = self._parts[-1]
        number = len(part)
        part.append(call.amount(call.counted))
        if number == len(self._whole) and number < len(self._places):
            self._whole.append(self._in_whole(number, call))
        return call.divided_by(self._whole[number] * share if number < len(self._whole) else math.nan)

    def _in_whole(self, number: int, call: CrossEntropy) -> float:
        """What that cross entropy divides by in the whole batch; not a number where its place there is none any more.

        Shorter sequences lack a column, and a mask may have another shape.
        """
        place = self._places[number]
        assert place is not None
        try:
            with torch._C.DisableTorchFunction():
                labels = place.counted(self._batch, call.given["ignore_index"])
            return call.amount(labels)
        except (LookupError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return math.nan


class _Part(TorchFunctionMode):
    def __init__(self, means: OwnMeans, share: float) -> None:
        super().__init__()
        self._means = means
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = CrossEntropy.of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if call is None else self._means.divided(call, self._share)
