"""Which rows of a batch a check looks at: few, and unlike each other."""

from collections.abc import Iterator
from typing import Any

import torch

from oomfix.runtime.batch import Batch


def choose_rows(batch: Batch, count: int) -> list[int]:
    """`count` rows spread over `batch`, unlike each other where flags, labels and masks tell them apart.

    A batch may be sorted, or its first rows complete while later ones are masked. The two unequal parts that a
    check cuts the rows into hold different numbers of what is masked. Rows of a batch smaller than `count` are
    named again, so that two unequal parts can be made of any batch.
    """
    size = batch.size
    spread = [index * (size - 1) // max(count - 1, 1) for index in range(count)] if count < size else list(range(size))
    telling = [counts for tensor in batch.tensors() if len(counts := _entries(tensor, size, count))]
    if count < size:
        unlike = list(dict.fromkeys(row for counts in telling for row in (int(counts.argmin()), int(counts.argmax()))))
        spread = list(dict.fromkeys([*unlike[: count - 2], *spread]))[:count]
    for counts in telling:
        entries = counts[spread].tolist()
        if len(set(entries)) > 1:
            fullest_first = [row for _, row in sorted(zip(entries, spread, strict=True), key=lambda pair: -pair[0])]
            # one of the fullest rows with the emptiest ones, the other full ones in the second part
            second = count - (count // 2 + 1)
            spread = [fullest_first[0], *fullest_first[1 + second :], *fullest_first[1 : 1 + second]]
            break
    return [spread[index % len(spread)] for index in range(count)]


def with_other_masks(batch: Batch, rows: list[int]) -> Batch | None:
    """`batch` with half of row `rows[0]` of each full (or empty) mask cleared (or filled); None if it has no such mask.

    A mean over what a mask leaves cannot be told from a mean over everything as long as the mask is full.
    """
    found = []

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _tells(leaf, batch.size, len(rows)):
            return leaf
        seen = leaf.detach()[rows]
        # an index of 1 may be made 0; an index of 0 made 1 may be out of range
        full, empty = bool((seen == 1).all()), seen.dtype == torch.bool and not bool(seen.any())
        if not (full or empty):
            return leaf
        found.append(leaf)
        changed = leaf.detach().clone()
        row = changed[rows[0]].reshape(-1)
        row[: max(row.numel() // 2, 1)] = 0 if full else 1
        changed[rows[0]] = row.view(changed[rows[0]].shape)
        return changed

    mapped = batch.mapped(other)
    return mapped if found else None


def _entries(tensor: torch.Tensor, size: int, rows: int) -> torch.Tensor:
    """For each row, how many entries are neither 0 nor a label that means "none"; empty for plain inputs.

    Args:
        rows: looked at together, so that no more memory is needed than for a few rows.
    """
    if not _tells(tensor, size, rows):
        return torch.empty(0)
    # class 0 is a label like any other where negative ones stand for those to ignore
    least = 0 if not tensor.is_floating_point() and tensor.dtype != torch.bool and bool(tensor.amin() < 0) else 1
    counts = [(chunk >= least).reshape(len(chunk), -1).sum(1) for chunk in _chunks(tensor, rows)]
    return torch.cat(counts)


def _tells(tensor: torch.Tensor, size: int, rows: int) -> bool:
    """Whether `tensor` holds flags, labels or a mask, with one row per sample."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.dim() == 0 or tensor.shape[0] != size:
        return False
    if not tensor.numel() or tensor.is_complex():
        return False
    return not tensor.is_floating_point() or _is_mask(tensor, rows)


def _is_mask(tensor: torch.Tensor, rows: int) -> bool:
    low, high = tensor.detach().aminmax()
    if low < 0 or high > 1:
        return False
    return all(bool(((chunk == 0) | (chunk == 1)).all()) for chunk in _chunks(tensor, rows))


def _chunks(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    return iter(torch.split(tensor.detach(), rows))
