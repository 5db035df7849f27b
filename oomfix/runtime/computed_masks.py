"""Masks that a forward computes by comparing: hard samples, confident predictions, tokens that are no padding.

A loss may be a mean over what such a mask leaves. As long as it leaves as much of each sample, which it does of the
triplets of an untrained network, that looks like a mean over samples. So a check runs once more with a gap in the masks
of its first row, as it does for masks among the arguments (`rows.gaps_for_masks`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

import torch

from oomfix.runtime import compat, simulation


@dataclass(frozen=True)
class MaskOfRows:
    """What one comparison gave.

    Attributes:
        per_row: entries for each sample.
        alike: it leaves something of each sample, and of all as much.
    """

    per_row: int
    alike: bool


class ComputedMasks:
    """The masks of one run, in the order in which they are computed.

    Attributes:
        seen: one entry for each comparison; None where it gave no mask with entries for each sample.

    Args:
        rows: samples in the run.
        gaps: numbers of the comparisons whose masks get a gap in the first row.
    """

    def __init__(self, rows: int, gaps: Collection[int]) -> None:
        self.seen: list[MaskOfRows | None] = []
        self._rows = rows
        self._gaps = gaps

    def computed(self, mask: object) -> object:
        """Note what a comparison gave; returns it, or a copy with a gap: half of what it leaves of the first row."""
        self.seen.append(None)
        if not self._may_be_of_rows(mask):
            return mask
        by_row = mask.reshape(self._rows, -1)
        counts = by_row.sum(1)
        alike = bool((counts[0] > 0) & (counts == counts[0]).all())
        self.seen[-1] = MaskOfRows(by_row.shape[1], alike)
        if len(self.seen) - 1 not in self._gaps:
            return mask
        with_gap = by_row.clone()
        left = by_row[0].nonzero().view(-1)
        with_gap[0, left[: max(len(left) // 2, 1)]] = False
        return with_gap.view(mask.shape)

    def _may_be_of_rows(self, mask: object) -> TypeGuard[torch.Tensor]:
        if simulation.assumption is not None or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            return False
        if mask.layout != torch.strided or mask.is_nested or not mask.dim() or not mask.numel():
            return False
        if compat.beneath_transforms(mask) is None:
            return False
        return mask.shape[0] % self._rows == 0


def alike(whole: list[MaskOfRows | None], part: list[MaskOfRows | None]) -> frozenset[int]:
    """The comparisons that gave a mask of samples in both runs, in the first one that leaves as much of each.

    None where the runs made other numbers of comparisons: in a loop over samples each is by itself.
    """
    if len(whole) != len(part):
        return frozenset()
    pairs = enumerate(zip(whole, part, strict=True))
    return frozenset(n for n, (a, b) in pairs if a is not None and b is not None and a.alike and a.per_row == b.per_row)
