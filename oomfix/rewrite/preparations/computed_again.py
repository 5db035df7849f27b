"""A value that an earlier loss reads without its graph, `returns - value.detach()`, is computed again for its own loss.

`value = critic(x)`, the loss of the actor on advantages, its backward and step, then the loss of the critic on `value`:
the graph of a value that is computed once would be that of all parts. The critic has not changed behind the step of
the actor, so it gives the same there, with a graph for the slice that needs one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.effects import switches_mode
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.stateless_networks import StatelessNetworks
from oomfix.rewrite.preparations.losses_in_turn import Turns
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import is_remark


class _Again(NamedTuple):
    """What is computed again behind a statement of a block, and what moves there because it needs that."""

    behind: int
    copied: list[int]
    moved: list[int]


def compute_again(reading: Reading, manager: str) -> list[Edit]:
    """The edits that repeat what runs the network of a second loss behind the step of the first, which reads its value.

    Only a network that draws and keeps nothing, on what is still the same there.
    """
    finder = _Finder(reading, manager)
    return [
        edit for block in finder.turns.blocks() for found in finder.of(block) for edit in _edits(reading, block, found)
    ]


def _edits(reading: Reading, block: list[ast.stmt], found: _Again) -> Iterator[Edit]:
    layout = reading.layout
    own = layout.own_lines(block[found.behind])
    copied = {index: layout.own_lines(block[index]) for index in found.copied}
    moved = {index: reading.chunk(block[index]) for index in found.moved}
    lines = dict(sorted((copied | moved).items()))
    if own is None or None in lines.values():
        return
    margin = layout.margin(block[found.behind])
    text = [line for chunk in lines.values() if chunk is not None for line in layout.moved(chunk, margin, margin)]
    yield from (layout.removed(chunk) for chunk in moved.values() if chunk is not None)
    yield layout.inserted(layout.whole(own)[1], text)


class _Finder:
    """Finds what may be computed again.

    Attributes:
        turns: what may move behind backwards.
    """

    def __init__(self, reading: Reading, manager: str) -> None:
        self.turns = Turns(reading, manager)
        self._manager = manager
        self._calls_run = reading.calls_run
        self._events = reading.events
        self._stateless = StatelessNetworks(reading.script)

    def of(self, block: list[ast.stmt]) -> Iterator[_Again]:
        """What may be computed again in a block, behind each of its backwards."""
        ends = self.turns.ends(block)
        for number, end in enumerate(ends[:-1]):
            first, last = ends[number - 1] + 1 if number else 0, ends[number + 1]
            steps = self.turns.steps(block[end + 1 : last])
            behind = max([end, *map(block.index, steps)])
            needed = self.turns.dependences(block, first, end)
            wanted = {index for index in self.turns.dependences(block, first, last) if index < end}
            copied = self._copied(block, sorted(needed & wanted), block[end], block[last])
            if not copied:
                continue
            others = [index for index in sorted(wanted - needed) if index > copied[0]]
            behind_first = range(min(others, default=end), end)
            moved = [one for one in behind_first if one not in needed and not _stays(block[one])]
            passes = all(self._is_the_same(block, index, copied + moved, behind) for index in copied)
            passes = passes and all(self.turns.may_move(block, index, moved, end) for index in moved)
            if passes and all(self.turns.may_follow(step, block[one]) for step in steps for one in copied + moved):
                yield _Again(behind, copied, moved)
                return  # what is behind it in the block is looked at again once this is done

    def _copied(self, block: list[ast.stmt], both: list[int], one: ast.stmt, other: ast.stmt) -> list[int]:
        """What two losses need, from the first network on that only the second backward goes through."""
        forwards = self._events.runs
        through_one, through_other = self._events.origins_of(one), self._events.origins_of(other)
        apart = {forwards[origin].node for origin in through_other - through_one if origin in forwards}
        apart -= {forwards[origin].node for origin in through_one if origin in forwards}
        made: set[str] = set()
        copied = []
        for index in both:
            statement = block[index]
            if not apart.isdisjoint(self._calls_run.by(statement)) or made & names_read(statement):
                if names_bound(statement) & names_read(statement) - made:
                    return []
                copied.append(index)
                made |= names_bound(statement)
        return copied

    def _is_the_same(self, block: list[ast.stmt], index: int, gone: Sequence[int], behind: int) -> bool:
        """Whether a statement gives the same behind what stays ahead of its copy."""
        statement = block[index]
        if not self._may_run_twice(statement):
            return False
        names = names_bound(statement) | names_read(statement)
        paths = paths_read(statement) | names_bound(statement)
        for other in (block[one] for one in range(index + 1, behind + 1) if one not in gone):
            if names_bound(other) & names or self.turns.leaves_effect(other):
                return False
            if _sets_mode(other) or self.turns.is_of_manager(other) or is_zero_grad(other):
                continue
            if switches_mode(other) or overlap(changed_paths(other) - {self._manager}, paths):
                return False
        return True

    def _may_run_twice(self, statement: ast.stmt) -> bool:
        """Whether a statement only binds names, to what it gives as often as it runs."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if not targets or not all(isinstance(one, ast.Name | ast.Tuple) for one in targets):
            return False
        if changed_paths(statement):
            return False
        if self.turns.may_draw(statement) or self.turns.leaves_effect(statement):
            return False
        return all(map(self._stateless.gives_the_same_again, self.turns.networks_of(statement)))


def _stays(statement: ast.stmt) -> bool:
    return is_zero_grad(statement) or is_remark(statement)


def _sets_mode(statement: ast.stmt) -> bool:
    """`actor.train()`, which a network that draws and keeps nothing is blind to."""
    called = statement.value if isinstance(statement, ast.Expr) else None
    method = called.func if isinstance(called, ast.Call) and not called.args and not called.keywords else None
    return isinstance(method, ast.Attribute) and method.attr in ("train", "eval")
