"""The rows of a batch that one check runs a forward on, whole and in two parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from oomfix.runtime import compat
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.batches.rows import Gaps, choose_rows, telling, without_single_rows
from oomfix.runtime.memory.oom import free_what_is_left, is_out_of_memory
from oomfix.runtime.verification.comparison import compare
from oomfix.runtime.verification.counted_first import Counted
from oomfix.runtime.verification.evidence import Evidence, Runs

ROWS_OF_GROUPS = 8  # the first part of so many is no whole groups of two or three that the other goes on with
_MOST_ROWS = 32  # as many as one micro-batch has, up to this
_FEW_ROWS = 4  # for gradients; a part that is a single row is paired with itself by most losses of pairs
_FEWEST_ROWS = 3  # where memory has no room for more
_TRIES = 2

_T = TypeVar("_T")


@dataclass(frozen=True)
class RowCounts:
    """On how many rows a check runs a forward: of each list, on the most that memory has room for.

    Attributes:
        results: where no graph is kept.
        gradients: where one is.
        together: where no part may be a single row.
    """

    results: list[int]
    gradients: list[int]
    together: list[int]

    @classmethod
    def of(cls, size: int, most_rows: int, single_rows: bool) -> "RowCounts":
        """Those for a batch of `size` samples and micro-batches of `most_rows`.

        Args:
            single_rows: a part may be one.
        """
        most, together = most_to_look_at(most_rows), without_single_rows(size)
        of_groups = [ROWS_OF_GROUPS] if _FEW_ROWS < most < ROWS_OF_GROUPS <= size else []
        if not single_rows:
            return cls([most, *together, *of_groups], together, together)
        fewer = [telling(most // 2), _FEWEST_ROWS, 2]
        return cls([most, *fewer, *of_groups], [_FEW_ROWS, _FEWEST_ROWS, 2], together)

    @property
    def may_be_single(self) -> bool:
        """Whether a part may be a single row."""
        return self.gradients != self.together

    def of_all(self) -> "RowCounts":
        """As many with a graph as without."""
        most = [max(self.results)]
        return replace(self, gradients=most, together=most)

    def in_larger_parts(self) -> "RowCounts":
        """As many where no part may be a single row."""
        return replace(self, gradients=self.together)


def most_to_look_at(most_rows: int) -> int:
    """How many rows a check runs of a batch in micro-batches of `most_rows`."""
    return telling(min(most_rows, _MOST_ROWS))


class FewRows:
    """A forward and its batch, of which each comparison of a check takes so many rows.

    Args:
        modules: every module that the forward may run.
        these: to be taken where so many are asked for.

    Attributes:
        in_order: rows are named in the order of the batch.
        own_targets: cross entropies in the parts are divided by what they have in the whole, see `own_targets`.
        counted_means: means are, see `counted_first`.
    """

    def __init__(
        self, forward: Callable[..., Any], batch: Batch, modules: list[nn.Module], these: Sequence[int] = ()
    ) -> None:
        self.forward = forward
        self.batch = batch
        self.modules = modules
        self.in_order = False
        self.own_targets = False
        self.counted_means: Counted = ()
        self._needs_autocast = False
        self._chosen = {len(these): list(these)}

    def named(self, count: int) -> list[int]:
        """`count` rows, always the same ones."""
        if count not in self._chosen:
            self._chosen[count] = choose_rows(self.batch, count)
        return sorted(self._chosen[count]) if self.in_order else self._chosen[count]

    def compared(
        self,
        count: int,
        how: Runs,
        see: Callable[[Any], Any] = lambda result: result,
        gaps: Gaps = MappingProxyType({}),
        *,
        rows: Sequence[int] = (),
    ) -> Evidence:
        """What runs on `rows`, or on `count` rows, and on two parts of them show, see `comparison.compare`.

        A forward that begins autocast by itself runs without, since rounding to half precision looks like a difference,
        unless it fails without.
        """
        rows = list(rows) or self.named(count)
        if self.counted_means:
            how = replace(how, counted_means=self.counted_means, holds_out=False)
        if self.own_targets:
            # what is held out of the cross entropies does not stand in the batch
            how = replace(how, own_targets=True, holds_out=False)
        run = partial(compare, self.forward, self.batch, self.modules, rows, how, see, gaps)
        if self._needs_autocast:
            return run()
        with compat.autocast_never_begins() as held_off:
            evidence = run()
        if evidence.failure and held_off:
            self._needs_autocast = True
            return run()
        return evidence


def with_rows_that_fit(counts: list[int], run: Callable[[int], _T]) -> _T | None:
    """What `run` returns for the most rows that memory allows; None if it allows none.

    Fewer rows may show less, so every number is tried twice: what filled the memory may have been freed by then.
    """
    for count in sorted({count for count in counts if count >= 2}, reverse=True):
        for _ in range(_TRIES):
            try:
                return run(count)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # outside the `except`, where the frames that failed are gone
            free_what_is_left(thorough=True)
    return None
