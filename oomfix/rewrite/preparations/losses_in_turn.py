"""Two losses that are computed ahead of the backwards of both are computed in turn: the second behind the first's.

`a = critic_a(x)`, `b = critic_b(x)`, `loss_a = f(a)`, `loss_b = f(b)`, `loss_a.backward()`, `loss_b.backward()`: what
the second loss alone is computed from moves behind the first backward, and both are slices of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomfix.rewrite.dataflow.calls import only_calls
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.effects import switches_mode
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import definitely_bound, names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad, keeps_gradients, may_reset_gradients, only_clips
from oomfix.rewrite.dataflow.shared_parameters import SharedParameters
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.may_draw import MayDraw
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.preparations.joined_lines import separate
from oomfix.rewrite.slicing.between import stays_the_same_ahead_of
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import owner_of, path_of
from oomfix.script.syntax.nodes import is_remark


def part_backwards(reading: Reading, manager: str) -> list[Edit]:
    """The edits that give backwards lines of their own where there are several: what moves goes behind such a line."""
    calls = reading.calls_to(f"{manager}.backward")
    return separate(reading, [call.lineno for call in calls]) if len(calls) > 1 else []


def compute_in_turn(reading: Reading, manager: str) -> list[Edit]:
    """The edits that move what runs other networks, and what depends on it, behind the first of two backwards.

    All that may draw random numbers runs in the same order as before, networks that are not seen to draw none included;
    a backward changes nothing but gradients, which nothing that moves may look at, and the step behind it only what
    nothing that moves reads.
    """
    turns = Turns(reading, manager)
    return [edit for block in turns.blocks() for edit in _edits(reading, block, turns)]


def _edits(reading: Reading, block: list[ast.stmt], turns: Turns) -> Iterator[Edit]:
    layout = reading.layout
    for end, moved in turns.of(block):
        chunks, own = reading.chunks([block[index] for index in moved]), layout.own_lines(block[end])
        if own is None or chunks is None:
            continue
        margin = layout.margin(block[end])
        lines = [line for chunk in chunks for line in layout.moved(chunk, margin, margin)]
        yield from map(layout.removed, chunks)
        yield layout.inserted(layout.whole(own)[1], lines)


class Turns:
    """Finds what may move behind backwards.

    Attributes:
        backward: the path of the manager's method.
    """

    def __init__(self, reading: Reading, manager: str) -> None:
        self.backward = f"{manager}.backward"
        self._manager, self._reading = manager, reading
        nodes = reading.script.imports.nodes
        self._networks: set[ast.AST] = {*reading.events.running}
        self._functions, self._calls_run = reading.functions, reading.calls_run
        attributes = (node for node in nodes.of(ast.Attribute) if isinstance(node.ctx, ast.Store))
        self._stored = {path_of(node) for node in attributes}
        self._helpers = Helpers(reading, self._networks)
        self._draws = MayDraw(reading, self._helpers)
        self.networks_of, self.may_draw = self._draws.networks_of, self._draws
        self._shared = SharedParameters(reading.script)

    def blocks(self) -> list[list[ast.stmt]]:
        """The blocks that backwards of the manager stand in."""
        backwards = [
            call for call in self._reading.calls_to(self.backward) if len(call.args) == 1 and not call.keywords
        ]
        plain = map(self._reading.blocks.statement_of, backwards)
        return list({id(block): block for block in map(self._reading.blocks.block_of, plain)}.values())

    def ends(self, block: list[ast.stmt]) -> list[int]:
        """The indices of the backwards in a block."""
        return [index for index, one in enumerate(block) if only_calls(one, self.backward)]

    def leaves_effect(self, statement: ast.stmt) -> bool:
        """Whether functions of the file that a statement runs leave something behind in objects."""
        return self._helpers.lasting_effect(statement) is not None

    def is_of_manager(self, statement: ast.stmt) -> bool:
        """Whether a statement is a backward or a step of the manager."""
        return any(only_calls(statement, f"{self._manager}.{method}") for method in ("backward", "step", "unscale_"))

    def of(self, block: list[ast.stmt]) -> Iterator[tuple[int, list[int]]]:
        """The indices of backwards in a block, or of their last steps, with those of what may move behind them."""
        ends = self.ends(block)
        for number, end in enumerate(ends[:-1]):
            first = ends[number - 1] + 1 if number else 0
            steps = self.steps(block[end + 1 : ends[number + 1]])
            for moved in self._others(block, first, end):
                passes = moved and all(self.may_move(block, index, moved, end) for index in moved)
                if passes and all(self.may_follow(step, block[index]) for step in steps for index in moved):
                    yield max([end, *map(block.index, steps)]), moved
                    break

    def steps(self, behind: list[ast.stmt]) -> list[ast.stmt]:
        """Behind a backward, all that clips, steps and resets up to the last step; what else there is stays there."""
        last = max((index for index, one in enumerate(behind) if only_calls(one, f"{self._manager}.step")), default=-1)
        return behind[: last + 1]

    def may_follow(self, step: ast.stmt, statement: ast.stmt) -> bool:
        """Whether a statement means the same behind the step of an optimizer: it reads nothing that it steps."""
        if is_zero_grad(step) or is_remark(step):
            return not names_bound(step) & (names_read(statement) | names_bound(statement))
        if not only_calls(step, f"{self._manager}.step"):
            clips = only_clips(step) or only_calls(step, f"{self._manager}.unscale_")
            return clips and stays_the_same_ahead_of(statement, [step])
        assert isinstance(step, ast.Expr) and isinstance(step.value, ast.Call)
        optimizer = path_of(step.value.args[0]) if step.value.args else None
        paths = self._read_by(statement)
        return optimizer is not None and paths is not None and not self._shared.may_be_read(optimizer, paths)

    def _read_by(self, statement: ast.stmt) -> set[str] | None:
        """The paths that a statement reads, in functions of the file too; None where a method out of sight may read."""
        calls = list(self._calls_run.by(statement))
        functions = [function for call in calls for function in self._functions.by(call)]
        found = paths_read(statement, *functions) - {self._manager}
        for call in calls:
            owner = owner_of(call)
            if owner == "self" and call not in self._networks and not self._functions.by(call):
                if path_of(call.func) not in self._stored:
                    return None
            elif owner is not None and owner != "self":
                found.add(owner)
        return found

    def _others(self, block: list[ast.stmt], first: int, end: int) -> Iterator[list[int]]:
        """What a backward does not depend on, from the first such statement on that runs a network.

        First with networks that run ahead of its own, then without.
        """
        needed = self.dependences(block, first, end)
        running = min((index for index in needed if self._runs_network(block[index])), default=end)
        others = [
            index
            for index in range(first, end)
            if index not in needed and not is_zero_grad(block[index]) and not is_remark(block[index])
        ]
        starts = [index for index in others if self._runs_network(block[index])]
        if running < end and starts:
            yield from (
                [index for index in others if index >= start]
                for start in dict.fromkeys([starts[0], *[index for index in starts if index >= running][:1]])
            )

    def dependences(self, block: list[ast.stmt], first: int, end: int) -> set[int]:
        """The indices, from one on, of what a backward depends on."""
        names, paths = names_read(block[end]), paths_read(block[end]) - {self.backward}
        found: set[int] = set()
        for index in range(end - 1, first - 1, -1):
            statement = block[index]
            changed = changed_paths(statement) - {self._manager}
            if names_bound(statement) & names or overlap(changed, paths):
                if is_zero_grad(statement):
                    continue
                found.add(index)
                names = (names - definitely_bound([statement])) | names_read(statement)
                paths |= paths_read(statement)
        return found

    def may_move(self, block: list[ast.stmt], index: int, moved: Sequence[int], end: int) -> bool:
        """Whether a statement means the same behind a backward, and behind what stays ahead of that."""
        statement = block[index]
        staying = [block[other] for other in range(index + 1, end + 1) if other not in moved]
        # gradients are none of its business, but the names of a loop that resets them may be
        resets = [one for one in staying if is_zero_grad(one)]
        if any(names_bound(one) & names_read(statement) or names_bound(statement) & names_read(one) for one in resets):
            return False
        passed = [one for one in staying if one not in resets]
        if self.may_draw(statement) and any(map(self.may_draw, passed[:-1])):
            return False
        if any(map(self.leaves_effect, (statement, *passed[:-1]))):
            return False
        if leaves(statement) is not None or switches_mode(statement) or self._helpers.fetch(statement):
            return False
        if reads_gradients(statement) or keeps_gradients(statement) or self._helpers.train(statement):
            return False
        if may_reset_gradients(statement) or self._helpers.reset_gradients(statement):
            return False
        return stays_the_same_ahead_of(statement, passed)

    def _runs_network(self, statement: ast.stmt) -> bool:
        return not self._networks.isdisjoint(self._calls_run.by(statement))
