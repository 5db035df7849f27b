"""Attributes that every run of a forward writes before it reads them: attention maps, auxiliary losses.

Such an attribute is a result that is not returned. Where a batch is split, numbers that its micro-batches leave (means,
counts), alone or as entries of a dictionary or list, are put together by the rule that the check found, so that a
reader finds what the whole batch would have left.
Attributes with rows per sample stay those of the last micro-batch: all of them would take the memory that splitting
saves.
"""

import functools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomfix.runtime import trees
from oomfix.runtime.batches import rule_choice
from oomfix.runtime.batches.outputs import Collector, Inside, Mean, Rule, Sum, Unforeseen, Weight, Zero
from oomfix.runtime.state.attributes import namespace


@dataclass(frozen=True)
class LeftAttribute:
    """An attribute that a forward leaves behind.

    Attributes:
        owner: number of the object that has it, among those that were looked at.
        name: its name.
        rule: how the values of micro-batches give that of the batch.
        path: keys that lead to the entry that is meant, where it holds a dictionary or a list.
    """

    owner: int
    name: str
    rule: Rule
    path: tuple[Any, ...] = ()

    @property
    def has_rows(self) -> bool:
        """Whether it holds something for each sample, rather than numbers for all."""
        return not isinstance(self.rule, Mean | Sum | Zero)


Left = dict[tuple[int, str], Any]


def left_by(whole: Left, parts: Sequence[Left], shares: Sequence[Weight]) -> tuple[LeftAttribute, ...] | None:
    """The attributes that depend on the samples, with their rules; None if one of them has none.

    Args:
        whole: changed attributes after a run on some rows, under the number of their owner and their name.
        parts: the same after runs on parts of these rows.
        shares: what each part weighs.
    """
    found = []
    for key, value in whole.items():
        values = [part.get(key) for part in parts]
        if all(rule_choice.equal(value, other) for other in values):
            continue
        # registries of modules hold state: running means, queues
        rule = None if key[1] in ("_parameters", "_buffers", "_modules") else rule_choice.choose(value, values, shares)
        if rule is None:
            return None
        found += [LeftAttribute(*key, inner, path) for path, inner in _entries(rule, value, values, ())]
    return tuple(found)


def recorded(by_whole: Left, by_part: Left) -> Left:
    """Containers as a run on all rows filled them; of records, what a part has added after it stands in them instead.

    A record of losses shows that it is read where it has other numbers: the mean of some that are the same is one of
    them. What has rows stays, since a forward may tell by their number that they are of another batch.
    """
    return {place: _last_added(held, by_part.get(place)) for place, held in by_whole.items()}


def _last_added(held: Any, longer: Any) -> Any:
    if not isinstance(held, list | deque) or type(longer) is not type(held):
        return held
    entries, others = list(held), list(longer)[len(held) :]
    kept = len(entries) - len(others)
    if kept < 0 or _shapes(entries[kept:]) != _shapes(others):
        return held
    return type(held)([*entries[:kept], *others])


def _shapes(value: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in trees.tensors(value)]


def _entries(
    rule: Rule, whole: Any, parts: Sequence[Any], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Rule]]:
    """The entries of a dictionary or list that depend on the samples, with their rules; a value itself otherwise."""
    if not isinstance(rule, Inside) or not isinstance(whole, dict | list):
        yield path, rule
        return
    for key, inner in zip(rule.keys, rule.rules, strict=True):
        values = [part[key] for part in parts]
        if not all(rule_choice.equal(whole[key], value) for value in values):
            yield from _entries(inner, whole[key], values, (*path, key))


class LeftBehind:
    """What the micro-batches of one call leave in attributes.

    Args:
        attributes: those that depend on the samples.
        owners: every object that was looked at.
        rows: samples in the batch.
    """

    def __init__(self, attributes: Sequence[LeftAttribute], owners: Sequence[Any], rows: int) -> None:
        self._collectors: list[Collector] = [left.rule.collector(rows) for left in attributes]
        self._places = [(namespace(owners[left.owner]), (left.name, *left.path)) for left in attributes]

    def add(self, weight: Weight) -> None:
        """A micro-batch of this weight has run.

        Raises:
            Unforeseen: it left something else.
        """
        for (attributes, path), collector in zip(self._places, self._collectors, strict=True):
            try:
                value = functools.reduce(operator.getitem, path, attributes)
            except (LookupError, TypeError):
                raise Unforeseen("it leaves other attributes behind than on the rows that were checked") from None
            collector.add(value, weight)

    def put_together(self) -> None:
        """Leave what the batch would have left."""
        for (attributes, path), collector in zip(self._places, self._collectors, strict=True):
            functools.reduce(operator.getitem, path[:-1], attributes)[path[-1]] = collector.result()
