"""Random numbers of a batch that is split: drawn once, as the whole batch draws them, and given out to its parts.

A check sees how the size of each draw follows the rows (`DrawnShapes`, `sizes_by_rows`). In the micro-batches of a
call (`WholeDraws`), what has rows is drawn for the whole batch by the first of them, in its order, and each gets its
own rows; what has none (the noise of weights, whether a layer is left out) is drawn once and given to each. So a
split batch draws, to the bit, what the whole batch draws, and leaves the generators where that leaves them, as long as
nothing else draws: dropout, and what `drawing_calls` leaves to torch, goes on drawing micro-batch by micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from oomfix.runtime.state.drawing_calls import Drawing, DrawingCalls, Shape
from oomfix.runtime.state.random_state import RandomState

_BATCHES = 2  # what is drawn for a whole batch may take as much memory as so many batches
_FEW_BYTES = 2**20  # or these, where that is less


@dataclass(frozen=True)
class DrawnSize:
    """How the size of a draw follows the rows of a batch.

    Attributes:
        name: of the function that draws.
        shape: on the rows of the check.
        dim: the dimension that has rows; None: it is drawn once for a batch.
        per_row: entries that each row has in it.
    """

    name: str
    shape: Shape
    dim: int | None
    per_row: int

    @property
    def group(self) -> tuple[str, int]:
        """What a draw is found by: its function, and how many dimensions it has."""
        return self.name, len(self.shape)

    def at(self, shape: Shape, rows: int, of: int) -> Shape | None:
        """The shape that `of` rows have where `rows` rows have `shape`; None if these have another."""
        if self.dim is None:
            return shape
        if shape[self.dim] != self.per_row * rows:
            return None
        return (*shape[: self.dim], self.per_row * of, *shape[self.dim + 1 :])


class DrawnShapes(DrawingCalls):
    """Context that notes what is drawn.

    Attributes:
        drawn_shapes: the function and the shape of each draw, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn_shapes: list[tuple[str, Shape]] = []

    def drawn(self, drawing: Drawing) -> Any:
        """What the call returns, as if it had not been noted."""
        self.drawn_shapes.append((drawing.name, drawing.shape))
        return drawing.as_asked()


def sizes_by_rows(runs: Sequence[Sequence[tuple[str, Shape]]], rows: Sequence[int]) -> tuple[DrawnSize, ...]:
    """How the size of each draw follows the rows, told by runs on different numbers of them.

    Args:
        runs: the function and the shape of each draw of a run.
        rows: how many rows each run had.

    Returns:
        One entry for each draw, or none where the runs did not draw alike. Draws of one function with as many
        dimensions are left out together where the size of one follows something else.
    """
    if len({tuple((name, len(shape)) for name, shape in run) for run in runs}) != 1:
        return ()
    found, unforeseen = [], set()
    for draws in zip(*runs, strict=True):
        size = _size_by_rows(draws[0][0], [shape for _, shape in draws], rows)
        if size is None:
            unforeseen.add((draws[0][0], len(draws[0][1])))
        else:
            found.append(size)
    return tuple(size for size in found if size.group not in unforeseen)


def _size_by_rows(name: str, shapes: list[Shape], rows: Sequence[int]) -> DrawnSize | None:
    first = shapes[0]
    differing = [dim for dim in range(len(first)) if len({shape[dim] for shape in shapes}) > 1]
    if not differing:
        return DrawnSize(name, first, None, 0)
    dim = differing[0]
    size = DrawnSize(name, first, dim, first[dim] // rows[0])
    fits = all(size.at(first, rows[0], of) == shape for shape, of in zip(shapes, rows, strict=True))
    return size if fits else None


def most_bytes(batch: Sequence[torch.Tensor]) -> int:
    """What may be drawn for a whole batch of these tensors."""
    return max(_BATCHES * sum(tensor.nbytes for tensor in batch), _FEW_BYTES)


class WholeDraws(DrawingCalls):
    """What the micro-batches of one call draw.

    Args:
        sizes: how the size of each draw follows the rows; None: each micro-batch draws for itself.
        samples: of the whole batch.
        most_bytes: what is drawn for the whole batch may take; each micro-batch draws for itself what goes beyond.
        outside: where the generators of Python and NumPy, those of the program's own too, are to be when a micro-batch
            begins: where the whole batch found them. None: each micro-batch finds them where the one before left
            them.
    """

    def __init__(
        self, sizes: Sequence[DrawnSize] | None, samples: int, most_bytes: int, outside: RandomState | None = None
    ) -> None:
        super().__init__()
        self._outside = outside
        # what Python and NumPy draw may lead to a branch that draws what the check has not seen
        self._watches = bool(sizes) or (sizes is not None and outside is not None)
        self._sizes = sizes = sizes or ()
        self._alike: dict[tuple[str, int], dict[DrawnSize, None]] = defaultdict(dict)  # each once, in order
        for size in sizes:
            self._alike[size.group][size] = None
        self._place = 0  # in `sizes`, as long as draws come in that order
        self._samples = samples
        self._bytes_left = most_bytes
        self._kept: dict[Hashable, list[torch.Tensor]] = defaultdict(list)
        self._begin, self._rows = 0, 0
        self._drawn_so_far: Counter[Hashable] = Counter()

    @contextmanager
    def part(self, start: int, stop: int) -> Iterator[None]:
        """Context around the forward of samples `start` to `stop`, to be entered in the order of the samples."""
        self._begin, self._rows = start, stop - start
        self._place = 0
        self._drawn_so_far.clear()
        if self._outside is not None and start:
            self._outside.restore_besides_torch()
        with self if self._watches else nullcontext():
            yield

    def drawn(self, drawing: Drawing) -> Any:
        """What the call returns: rows of a draw for the whole batch, or all of one that is made once."""
        size = self._size_of(drawing)
        whole = None if size is None else size.at(drawing.shape, self._rows, self._samples)
        if size is None or whole is None or (whole != drawing.shape and not drawing.resizes):
            return drawing.as_asked()
        # conditions may let micro-batches draw other things: numbered among those of its kind, a draw finds its own
        kind = (drawing.name, drawing.settings, size.dim, whole)
        number = self._drawn_so_far[kind]
        self._drawn_so_far[kind] += 1
        kept = self._kept[kind]
        if number == len(kept):
            nbytes = prod(whole) * drawing.dtype.itemsize
            if nbytes > self._bytes_left:
                return drawing.as_asked()
            self._bytes_left -= nbytes
            kept.append(drawing.at(whole))
        if size.dim is None:
            return drawing.given(kept[number])
        per_row = size.per_row
        return drawing.given(kept[number].narrow(size.dim, self._begin * per_row, self._rows * per_row))

    def _size_of(self, drawing: Drawing) -> DrawnSize | None:
        """How the size of a draw follows the rows; None where that is not known."""
        size = DrawnSize(drawing.name, drawing.shape, 0, 1)
        seen = self._alike.get(size.group)
        if seen is None:
            # in a branch that the check did not take: what is as long as the rows may be drawn for the whole batch,
            # whatever it is for
            return size if drawing.shape[:1] == (self._rows,) else None
        by_rows = [one for one in seen if one.dim is not None and one.at(drawing.shape, self._rows, self._samples)]
        once = [one for one in seen if one.dim is None and (one.shape == drawing.shape or not by_rows)]
        expected = self._sizes[self._place] if self._place < len(self._sizes) else None
        if expected in by_rows or expected in once:
            self._place += 1
            return expected
        # where it may be either, and its place does not tell, it is drawn apart: noise of samples is never drawn once
        self._place = len(self._sizes)
        return next(iter(by_rows or once), None)
