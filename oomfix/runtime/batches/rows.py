"""Which rows of a batch a check looks at: few, and unlike each other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from oomfix.runtime import simulation
from oomfix.runtime.batches.batch import Batch, Place

# torch cannot compare numbers of 16 to 64 bits without a sign, or of 8 bits with a point
NUMBERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                     torch.bfloat16, torch.float32, torch.float64})  # fmt: skip
Gaps = Mapping[Place, float]  # what to write into tensors, by their place in a batch

_SMALL_ROW = 16  # entries of a row that is a label, a weight or a length rather than an input
_SMALL_CHUNK = 4096  # entries that may be looked at together, however few rows a check has memory for


def choose_rows(batch: Batch, count: int) -> list[int]:
    """`count` rows spread over `batch`, unlike each other where flags, labels and masks tell them apart.

    A batch may be sorted, or its first rows complete while later ones are masked. The two parts that a check cuts the
    rows into hold different numbers of what is masked. Rows of a batch smaller than `count` are named again, so that
    two parts, of which one is larger or holds other rows, can be made of any batch.
    """
    return _spread(batch.size, count, _telling_numbers(batch, count))


def choose_others(batch: Batch, rows: list[int]) -> Iterator[list[int]]:
    """As many other rows as `rows`, until each flag, label and mask that tells rows of `batch` apart has done so.

    Of many tensors of which few rows have something, `rows` may all have nothing.
    """
    seen, left = rows, _telling_numbers(batch, len(rows))
    while left := [numbers for numbers in left if all(numbers[row] == numbers[seen[0]] for row in seen)]:
        seen = _spread(batch.size, len(rows), left)
        yield seen


def _telling_numbers(batch: Batch, count: int) -> list[list[Any]]:
    """The numbers of rows that are not all the same."""
    return [numbers for numbers in _numbers_of_rows(batch, count) if any(n != numbers[0] for n in numbers)]


def _spread(size: int, count: int, telling: list[list[Any]]) -> list[int]:
    """`count` of `size` rows, unlike each other where these numbers tell them apart."""
    spread = [index * (size - 1) // max(count - 1, 1) for index in range(count)] if count < size else list(range(size))
    if count < size:
        unlike = list(dict.fromkeys(row for numbers in telling for row in _extremes(numbers)))
        spread = list(dict.fromkeys([*unlike[: max(count - 2, 3)], *spread]))[:count]
    cut = first_part(count)
    orders = [order for numbers in telling for order in _orders(spread, numbers, count - cut)] or [spread]
    named = [rows for order in orders for rows in _named_again(order, count)]
    return max(named, key=lambda rows: sum(_differ(numbers, rows[:cut], rows[cut:]) for numbers in telling))


def _named_again(order: list[int], count: int) -> Iterator[list[int]]:
    """`count` rows of `order`, or where these are fewer, all of them and some again; in two ways.

    Backwards from the last but one, they do not meet themselves where samples are paired by place.
    """
    missing = max(count - len(order), 0)
    yield [*order, *(order[-index % len(order)] for index in range(2, missing + 2))]
    if missing:
        yield [order[index % len(order)] for index in range(count)]


def _numbers_of_rows(batch: Batch, count: int) -> Iterator[list[Any]]:
    """For each tensor and list of samples that may tell rows apart, a number for each row."""
    # few rows show what one tensor tells apart: labels to ignore rather than tokens
    tensors = batch.samples_first() if simulation.assumption is None else []
    marked = [(tensor, _has_labels_to_ignore(tensor)) for tensor in tensors]
    for tensor, has_ignored in sorted(marked, key=lambda pair: pair[1], reverse=True):
        yield _entries(tensor, batch.size, count, has_ignored)
    for tensor, _ in marked:
        yield _sums(tensor, batch.size)
    yield from batch.numbers_per_sample()


def _extremes(numbers: list[Any]) -> list[int]:
    """The rows with the smallest and the largest number, and where some have nothing, a second one that has something.

    Without it, one of two parts might hold nothing that counts, and show nothing.
    """
    least, most = numbers.index(min(numbers)), numbers.index(max(numbers))
    others = [row for row, number in enumerate(numbers) if number and row != most]
    return [least, most] if numbers[least] or not others else [least, most, max(others, key=numbers.__getitem__)]


def telling(most: int) -> int:
    """How many rows of a batch a check runs, about `most`: two parts of them show what is paired by place.

    An even number leaves no row over where samples are paired (flipped, neighbours, halves of the batch), and one in
    each of the two parts, which are odd. An odd number leaves one over, which is paired with itself, in the whole and
    in one part as well: where all other pairs are far apart, as a triplet loss wants them, that looks like independent
    samples.
    """
    return most - most % 4 if most >= 8 else 6 if most > 4 else 4


def without_single_rows(size: int) -> list[int]:
    """How many rows of a batch of `size` a check runs where no part may be a single row, or else, for lack of memory.

    Six make two threes; of fewer than four rows, which are named again, those might be the same.
    """
    return [6, 5] if size >= 4 else [5]


def has_single_row(count: int) -> bool:
    """Whether a part of a check of `count` rows is a single row."""
    return count - first_part(count) == 1


def first_part(count: int) -> int:
    """How many of `count` rows are in the first of two parts: more than in the other, or as many where those are odd.

    Parts of an even number are odd, see `telling`. The first one makes no whole groups of three where there are rows
    enough: what a forward leaves over of the rows would be the same ones in the second part as in the whole.
    """
    half = count // 2
    first = half if count % 2 == 0 and half % 2 else half + 1
    return first + 2 if first % 3 == 0 and count > 8 else first


def in_two_parts(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The rows of two parts, of which the first may have one more, so that a check cuts them into these parts.

    Of parts as long as each other the first gets a row again: parts of one length weigh the same, which hides what a
    loss is a mean of.
    """
    again = first[-1:] if len(first) == len(second) else []
    return [*first, *again, *second]


def _orders(rows: list[int], numbers: list[Any], second: int) -> Iterator[list[int]]:
    """Orders of `rows` that put other numbers of what is counted into two parts, the second of `second` rows."""
    fullest_first = sorted(rows, key=lambda row: -numbers[row])
    # one of the fullest rows goes with the emptiest ones, for a loss of no targets is no number
    yield [fullest_first[0], *fullest_first[1 + second :], *fullest_first[1 : 1 + second]]
    # that may make the parts alike: 3 and 1 against 2
    yield fullest_first[::-1]


def _differ(numbers: list[Any], first: list[int], second: list[int]) -> bool:
    """Whether the rows of two parts hold different numbers on average."""
    at = numbers.__getitem__
    return bool(sum(map(at, first)) / len(first) != sum(map(at, second)) / len(second))


def gaps_for_masks(batch: Batch, rows: list[int]) -> Gaps:
    """What to write into one of `rows` of each mask of `batch` that does not tell them apart.

    A mean over what a mask leaves cannot be told from a mean over samples as long as it leaves as much of each: where
    it is full, where all samples are of one length, with one class each, with the same weight.
    """
    gaps = {place: _gap(tensor, rows) for place, tensor in _of_rows(batch) if _has_rows(tensor, batch.size)}
    return {place: gap for place, gap in gaps.items() if gap is not None}


def _of_rows(batch: Batch) -> Iterator[tuple[Place, torch.Tensor]]:
    """The tensors of `batch` that have a row for each sample, and their places; none of what belongs to one sample."""
    for place, tensors in batch.placed(batch.args, batch.kwargs).items():
        if len(tensors) == 1 and len(tensors[0]) == batch.size:
            yield place, tensors[0]


def of_one_class(batch: Batch, rows: Sequence[int]) -> Gaps:
    """What to write into the first part of `rows` so that it is of a class with a row of the second.

    By each tensor of one whole number per sample: a class, a group, a place. None of those where the rows side by side
    in different parts are of one class as they are, nor where all of the second are negative: labels to ignore.
    """
    gaps, cut = {}, first_part(len(rows))
    for place, tensor in _of_rows(batch):
        if _has_rows(tensor, batch.size) and not tensor.is_floating_point() and tensor.numel() == batch.size:
            numbers = tensor.detach().reshape(batch.size)[list(rows)].tolist()
            classes = [number for number in numbers[cut:] if number >= 0]
            if classes and numbers[cut - 1] != numbers[cut]:
                gaps[place] = classes[0]
    return gaps


def _gap(mask: torch.Tensor, rows: list[int]) -> float | None:
    seen = mask.detach()[rows]
    if not _is_mask(mask, len(rows)):
        # the same weight, length or index everywhere; half a weight, and one less of the others, is one too
        first = seen[(0,) * seen.dim()]
        alike = seen[0].numel() <= _SMALL_ROW and bool((seen == first).all()) and bool(first > 0)
        return None if not alike else first.item() / 2 if seen.is_floating_point() else first.item() - 1
    is_one = seen == 1
    counts = is_one.reshape(len(rows), -1).sum(1)
    # an index of 1 may be made 0; an index of 0 made 1 may be out of range
    if bool((counts[0] > 0) & (counts == counts[0]).all() & (is_one | (seen == 0)).all()):
        return 0
    return 1 if seen.dtype == torch.bool and not bool(seen.any()) else None


def leaving_nothing(batch: Batch) -> Iterator[Gaps]:
    """What to write into rows of each tensor of `batch` so that nothing of them counts; in two ways.

    Flags, labels, lengths, masks and weights are 0 of what does not count. Or masks are 1, where they mark what is left
    out.
    """
    tensors, size = list(_of_rows(batch)), batch.size
    yield {place: 0 for place, tensor in tensors if _may_count(tensor, size)}
    # an index of 1 may be out of range where none is
    yield {place: 1 for place, mask in tensors if _has_rows(mask, size) and _is_mask(mask, size) and bool(mask.any())}


def _may_count(tensor: torch.Tensor, size: int) -> bool:
    if not _has_rows(tensor, size):
        return False
    return (
        not tensor.is_floating_point() or _is_mask(tensor, size) or (tensor.dim() <= 2 and not bool(tensor.amin() < 0))
    )


def make_gaps(copies: Mapping[Place, Sequence[torch.Tensor]], gaps: Gaps, whole_rows: int = 0) -> None:
    """Write the gaps into the first `whole_rows` of each copy of some rows, or into half of the first row."""
    for place, gap in gaps.items():
        (copy,) = copies[place]
        if whole_rows:
            copy[:whole_rows] = gap
        else:
            row = copy[0]
            entries = (row != gap).nonzero()
            row[tuple(entries[: max(len(entries) // 2, 1)].T)] = gap


def _entries(tensor: torch.Tensor, size: int, rows: int, has_ignored: bool) -> list[Any]:
    """For each row, how many entries are neither 0 nor a label that means "none"; none for plain inputs.

    Args:
        rows: looked at together, so that no more memory is needed than for a few rows.
        has_ignored: some labels mean "none".
    """
    if not _tells(tensor, size, rows):
        return []
    # class 0 is a label like any other where negative ones stand for those to ignore
    least = 0 if has_ignored else 1
    return [
        number for chunk in _chunks(tensor, rows) for number in (chunk >= least).reshape(len(chunk), -1).sum(1).tolist()
    ]


def _has_labels_to_ignore(tensor: torch.Tensor) -> bool:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in NUMBERS or not tensor.numel():
        return False
    return not tensor.is_floating_point() and tensor.dtype != torch.bool and bool(tensor.amin() < 0)


def _sums(tensor: torch.Tensor, size: int) -> list[Any]:
    """The sum of each row of a small tensor, NaNs apart: lengths, weights and targets may be what losses divide by."""
    if not _has_rows(tensor, size) or tensor.numel() > size * _SMALL_ROW:
        return []
    rows = tensor.detach().reshape(size, -1)
    sums: list[Any] = (
        rows.nansum(1) - size * rows.isnan().sum(1) if rows.is_floating_point() else rows.sum(1)
    ).tolist()
    return sums


def _tells(tensor: torch.Tensor, size: int, rows: int) -> bool:
    """Whether `tensor` holds flags, labels or a mask, with one row per sample."""
    return _has_rows(tensor, size) and (not tensor.is_floating_point() or _is_mask(tensor, rows))


def _has_rows(tensor: torch.Tensor, size: int) -> bool:
    """Whether `tensor` holds real numbers, with one row per sample."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in NUMBERS:
        return False
    return tensor.dim() > 0 and tensor.shape[0] == size and tensor.numel() > 0


def _is_mask(tensor: torch.Tensor, rows: int) -> bool:
    low, high = tensor.detach().aminmax()
    if low < 0 or high > 1:
        return False
    return all(bool(((chunk == 0) | (chunk == 1)).all()) for chunk in _chunks(tensor, rows))


def _chunks(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    per_row = max(tensor.numel() // len(tensor), 1)
    return iter(torch.split(tensor.detach(), max(rows, _SMALL_CHUNK // per_row)))
