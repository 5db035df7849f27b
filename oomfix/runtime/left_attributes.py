"""Attributes that every run of a forward writes before it reads them: attention maps, auxiliary losses.

Such an attribute is a result that is not returned. Where a batch is split, numbers that its micro-batches leave (means,
counts) are put together by the rule that the check found, so that a reader finds what the whole batch would have left.
Attributes with rows per sample stay those of the last micro-batch: all of them would take the memory that splitting
saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomfix.runtime import rule_choice
from oomfix.runtime.attributes import namespace
from oomfix.runtime.outputs import Collector, Mean, Rule, Sum, Unforeseen, Weight, Zero


@dataclass(frozen=True)
class LeftAttribute:
    """An attribute that a forward leaves behind.

    Attributes:
        owner: number of the object that has it, among those that were looked at.
        name: its name.
        rule: how the values of micro-batches give that of the batch.
    """

    owner: int
    name: str
    rule: Rule

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
        found.append(LeftAttribute(*key, rule))
    return tuple(found)


class LeftBehind:
    """What the micro-batches of one call leave in attributes.

    Args:
        attributes: those that depend on the samples.
        owners: every object that was looked at.
        rows: samples in the batch.
    """

    def __init__(self, attributes: Sequence[LeftAttribute], owners: Sequence[Any], rows: int) -> None:
        places = [(namespace(owners[left.owner]), left.name) for left in attributes]
        self._collectors: list[Collector] = [left.rule.collector(rows) for left in attributes]
        self._places = places

    def add(self, weight: Weight) -> None:
        """A micro-batch of this weight has run.

        Raises:
            Unforeseen: it left something else.
        """
        for (attributes, name), collector in zip(self._places, self._collectors, strict=True):
            if name not in attributes:
                raise Unforeseen("it leaves other attributes behind than on the rows that were checked")
            collector.add(attributes[name], weight)

    def put_together(self) -> None:
        """Leave what the batch would have left."""
        for (attributes, name), collector in zip(self._places, self._collectors, strict=True):
            attributes[name] = collector.result()
