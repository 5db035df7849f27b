"""Masks that a forward computes by comparing: hard samples, confident predictions, tokens that are no padding.

A loss may be a mean over what such a mask leaves. As long as it leaves as much of each sample, which it does of the
triplets of an untrained network, that looks like a mean over samples. So a check runs once more with a gap in the masks
of its first row, as it does for masks among the arguments (`rows.gaps_for_masks`). Masks that are drawn may leave as
much of two parts by chance, so they get one too. A mask that leaves nothing of any row hides what becomes of the rows
that it leaves elsewhere, a figure of a log for example; it leaves some of the first row when the check runs once more.
"""

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from oomfix.runtime import compat, simulation
from oomfix.runtime.batches.sample_dims import Dim, as_it_was, by_row

_MOST_FRAMES = 10
"""Between a comparison and what sees it: the modes of torch that a check runs in."""


@dataclass(frozen=True)
class MaskOfRows:
    """What one comparison gave.

    Attributes:
        per_row: entries for each sample.
        alike: it leaves something of each sample, and of all as much.
        empty: it leaves nothing.
    """

    per_row: int
    alike: bool
    empty: bool


class ComputedMasks:
    """The masks of one run, in the order in which they are computed.

    Attributes:
        seen: one entry for each comparison; None where it gave no mask with entries for each sample.

    Args:
        rows: samples in the run.
        gaps: numbers of the comparisons whose masks get a gap in the first row, or where they are empty, its opposite.
        steps_first: samples stand behind time steps.
    """

    def __init__(self, rows: int, gaps: Collection[int], steps_first: bool = False) -> None:
        self.seen: list[MaskOfRows | None] = []
        self._rows = rows
        self._gaps = gaps
        self._steps_first = steps_first

    def drawn(self, mask: Any) -> Any:
        """As `computed`, for ones and zeros of any type, which get the gap themselves: others may know them too."""
        with_gap = self.computed(mask, mask.dtype if isinstance(mask, torch.Tensor) else None)
        return mask if with_gap is mask else mask.copy_(with_gap)

    def computed(self, mask: Any, dtype: torch.dtype | None = torch.bool) -> Any:
        """Note what a comparison gave; returns it, or a copy with a gap: half of what it leaves of the first row.

        Where that is nothing, half of the first row is left.
        """
        self.seen.append(None)
        found = self._of_rows(mask, dtype)
        if found is None or _is_of_a_constraint():
            return mask
        (in_rows, dim), entries = found, found[0].reshape(self._rows, -1)
        counts = entries.sum(1)
        alike = bool((counts[0] > 0) & (counts == counts[0]).all())
        self.seen[-1] = MaskOfRows(entries.shape[1], alike, empty=not bool(counts.any()))
        if len(self.seen) - 1 not in self._gaps:
            return mask
        with_gap = entries.clone()
        leaves = bool(counts[0])
        places = (entries[0] == leaves).nonzero().view(-1)
        with_gap[0, places[: max(len(places) // 2, 1)]] = not leaves
        return as_it_was(with_gap.view(in_rows.shape), dim).view(mask.shape)

    def _of_rows(self, mask: object, dtype: torch.dtype | None) -> tuple[torch.Tensor, Dim] | None:
        if simulation.assumption is not None or not isinstance(mask, torch.Tensor) or mask.dtype != dtype:
            return None
        if mask.layout != torch.strided or mask.is_nested or compat.beneath_transforms(mask) is None:
            return None
        return by_row(mask, self._rows, self._steps_first)


def alike(whole: list[MaskOfRows | None], part: list[MaskOfRows | None], drew: bool) -> frozenset[int]:
    """The comparisons that gave a mask of samples in both runs, in the first one that leaves as much of each.

    Where random numbers were drawn, all that leave something.
    """
    return frozenset(n for n, mask in _of_both(whole, part) if mask.alike or (drew and not mask.empty))


def empty(whole: list[MaskOfRows | None], part: list[MaskOfRows | None]) -> frozenset[int]:
    """The comparisons that gave a mask of samples in both runs, in the first one that leaves nothing."""
    return frozenset(n for n, mask in _of_both(whole, part) if mask.empty)


def _of_both(whole: list[MaskOfRows | None], part: list[MaskOfRows | None]) -> Iterator[tuple[int, MaskOfRows]]:
    """The masks of a run on all rows that a run on a part of them computes too.

    None where the runs made other numbers of comparisons: in a loop over samples each is by itself.
    """
    if len(whole) == len(part):
        for number, (mask, other) in enumerate(zip(whole, part, strict=True)):
            if mask is not None and other is not None and mask.per_row == other.per_row:
                yield number, mask


def _is_of_a_constraint() -> bool:
    """Whether a comparison is one by which a distribution checks its arguments: with a gap, it would refuse them."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_globals.get("__name__") == "torch.distributions.constraints":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
