"""Hand-written gradient accumulation that loses something, folded into `memory.accumulate`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.rewrite.facts.window_shape import CannotFold, WindowShape, bound_to_quotients, shape_of
from oomfix.rewrite.in_place.divisions import Divisions
from oomfix.rewrite.in_place.no_sync import exchange_edits
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.script.analyses.training_loop import Window
from oomfix.script.analyses.windows import is_divided
from oomfix.script.facts.torch_facts import SUMMED
from oomfix.script.facts.trace import Backward
from oomfix.script.syntax.edits import Edit, bounds, remove_statement
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_SUM = Pattern(
    r"reduction\s*=\s*[\"']sum[\"']|size_average\s*=\s*False|\.sum\(\)\.backward|loss\w*\s*=.*\.sum\(\)\s*$", re.M
)


class Folded(NamedTuple):
    """How a window is folded.

    Attributes:
        edits: of the script.
        mended: the codes and lines of what the script did wrong.
        notes: what changes in the training.
    """

    edits: list[Edit]
    mended: list[tuple[str, int]]
    notes: list[str]


class WindowFolder:
    """Folds accumulation windows that lose their tail, or do not divide their losses.

    A window that does neither stays as it is written: it is right.

    Args:
        reading: the script.
        manager: the name of the manager.
        wants: whether findings with a code are to be mended.
    """

    def __init__(self, reading: Reading, manager: str, wants: Callable[[str], bool]) -> None:
        self._reading, self._script, self._source = reading, reading.script, reading.source
        self._blocks, self._layout = reading.blocks, reading.layout
        self._manager = manager
        self._wants = wants
        self._names = FreeNames(reading.script)

    @cached_property
    def _quotients(self) -> set[str]:
        return bound_to_quotients(self._script.imports.nodes)

    def fold(self, verdict: Verdict) -> Folded | None:
        """The edits for a loop's window; None where it has none, or nothing is wrong with it.

        Raises:
            CannotFold: something is wrong with it, and it has to stay.
        """
        window = verdict.loop.window
        if window is None or not isinstance(verdict.loop.node, ast.For):
            return None
        undivided = self._undivided(verdict, window)
        loses_tail = window.decision is not None and self._script.loses_tail(verdict.loop) and self._wants("OOM302")
        if not undivided and not loses_tail:
            return None
        if window.decision is None:
            raise CannotFold("it is counted by a loop of its own")
        if window.alternatives or window.elsewhere:
            raise CannotFold("a flag decides which of several steps closes it")
        shape = shape_of(verdict.loop.node, window.decision, self._blocks, self._quotients)
        self._check_body(verdict, window.decision)
        schedules = [] if shape.closes_on_last else list(self._schedules(verdict, window.decision))
        if schedules and self._makes_one_cycle:
            raise CannotFold("OneCycleLR counts its steps, and refuses more than it was made for")
        edits = list(self._header(shape, window.decision))
        closed = f"{self._manager}.window_closed"
        edits += exchange_edits(shape, self._reading, closed)
        edits += self._tail_behind(verdict)
        self._check_no_sums(verdict, bool(undivided))
        if not undivided:
            divisions = Divisions(self._reading)
            edits += [edit for event in verdict.backwards for edit in divisions.undone(event, shape.size)]
        size = self._source.segment(shape.size)
        mended = [("OOM301", event.node.lineno) for event in undivided]
        mended += [("OOM302", window.decision.lineno)] if loses_tail else []
        notes = list(_notes(size, bool(undivided), loses_tail, self._is_reset_each_epoch(verdict.loop.node)))
        notes += [
            f"`{ast.unparse(call.func)}` in line {call.lineno} runs with that step too, once more per epoch: "
            "a schedule that counts whole windows alone ends sooner"
            for call in schedules
        ]
        return Folded(list(dict.fromkeys(edits)), mended, notes)

    def _undivided(self, verdict: Verdict, window: Window) -> list[Backward]:
        if self._script.divides_gradients(verdict.loop) or not self._wants("OOM301"):
            return []
        divided = {id(event.node) for event in verdict.loop.backwards if is_divided(event, window)}
        free = {id(event.node) for event in verdict.loop.accumulated_backwards}
        if free - divided and self._script.reads_window_size(verdict.loop):
            return []
        return [event for event in verdict.backwards if id(event.node) in free - divided]

    def _header(self, shape: WindowShape, decision: ast.If) -> Iterator[Edit]:
        start, end = bounds(self._source, shape.count.batches)
        statement = self._blocks.statement_of(shape.count.batches)
        before, after = f"{self._manager}.accumulate(", f", {self._source.segment(shape.size)})"
        if len(self._source.lines[shape.count.batches.lineno - 1]) + len(before + after) <= self._layout.longest_line:
            yield Edit(start, start, before)
            yield Edit(end, end, after)
        else:
            name = self._names.one_of("batches", "windowed_batches")
            margin, line = self._layout.margin(statement), self._source.line_starts[statement.lineno - 1]
            made = f"{margin}{name} = {before}{self._source.text[start:end]}{after}"
            yield Edit(line, line, made + self._layout.newline)
            yield Edit(start, end, name)
        closed = f"{self._manager}.window_closed"
        if shape.test is not decision.test:
            yield Edit(*bounds(self._source, shape.test), f"not {closed}" if shape.skips else closed)
            return
        last = bounds(self._source, decision.test)[1]
        keyword = bounds(self._source, decision)[0] + len("if")
        # the parentheses around the test are not part of it
        behind = re.compile(r"[\s)]*").match(self._source.text, last)
        assert behind is not None
        yield Edit(keyword, behind.end(), f" not {closed}" if shape.skips else f" {closed}")

    # -- what stands in the way ------------------------------------------------------------------------------------

    def _check_body(self, verdict: Verdict, decision: ast.If) -> None:
        loop = verdict.loop.node
        assert isinstance(loop, ast.For)
        self._check_reached(decision, loop)
        self._check_left(decision, loop)
        apart = self._blocks.exclude_each_other
        nodes = [event.node for event in verdict.backwards]
        for node in nodes:
            around = self._blocks.conditions_of(node)
            either_way = [one for one in around if any(self._blocks.are_apart_in(one, node, o) for o in nodes)]
            self._check_reached(node, loop, decision, either_way)
        for one in verdict.backwards:
            if any(one is not other and not apart(one.node, other.node) for other in verdict.backwards):
                raise CannotFold("several losses share it, whose batches could not be weighed together")
        behind = {id(node) for node in walk(*self._stepping(decision, loop))}
        for step in (*verdict.loop.steps, *verdict.steps):
            inside = any(parent is loop for parent in self._blocks.ancestors(step.node))
            if inside and id(step.node) not in behind:
                raise CannotFold(f"line {step.node.lineno} steps within it")
        self._check_resets(behind, loop)
        for statement in walk(loop):
            if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign) and id(statement) not in behind:
                if reads_gradients(statement) and not is_zero_grad(statement):
                    raise CannotFold(f"line {statement.lineno} clips or reads gradients within it")

    def _stepping(self, decision: ast.If, loop: ast.AST) -> list[ast.stmt]:
        """The statements that run when the window closes."""
        if isinstance(decision.body[0], ast.Continue):
            block = self._blocks.block_of(decision)
            return block[block.index(decision) + 1 :]
        return decision.body

    def _check_reached(
        self, node: ast.AST, loop: ast.AST, decision: ast.If | None = None, either_way: Collection[ast.If] = ()
    ) -> None:
        """Whether a node runs in each iteration: nothing ahead of it leaves, no condition of the batch is around it.

        Args:
            either_way: conditions on both sides of which such a node runs.
        """
        current: ast.AST = node if isinstance(node, ast.stmt) else self._blocks.statement_of(node)
        bound = names_bound(loop, *getattr(loop, "body", ()))
        while current is not loop:
            assert isinstance(current, ast.stmt)
            block = self._blocks.block_of(current)
            for statement in block[: block.index(current)]:
                if statement is not decision and (keyword := leaves(statement)) is not None:
                    raise CannotFold(f"`{keyword}` in line {statement.lineno} may leave it open")
            parent = next(self._blocks.ancestors(current))
            if isinstance(parent, ast.If) and names_read(parent.test) & bound and parent not in either_way:
                raise CannotFold(f"line {parent.lineno} may pass over a batch")
            if isinstance(parent, ast.Try) and parent.handlers:
                raise CannotFold(f"the `try` in line {parent.lineno} may pass over a batch")
            if not isinstance(parent, ast.If | ast.With | ast.Try | ast.For):
                raise CannotFold("it is decided in another function")
            if isinstance(parent, ast.For) and parent is not loop:
                raise CannotFold(f"the loop in line {parent.lineno} runs within it")
            current = parent

    def _check_left(self, decision: ast.If, loop: ast.For) -> None:
        """Whether the loop is left, if at all, where a window has closed."""
        for statement in loop.body:
            if statement is not decision and leaves(statement) in ("break", "return"):
                raise CannotFold(f"line {statement.lineno} may leave it open")

    def _check_resets(self, behind: set[int], loop: ast.AST) -> None:
        resets = [node for node in walk(loop) if isinstance(node, ast.Call) and last_name(node) == "zero_grad"]
        if not any(id(node) in behind for node in resets):
            raise CannotFold("gradients are not reset behind its step")
        for node in resets:
            if id(node) not in behind and not self._blocks.conditions_of(node):
                raise CannotFold(f"line {node.lineno} resets gradients within it")

    def _is_reset_each_epoch(self, loop: ast.For) -> bool:
        """Whether gradients are reset beside the loop whenever it starts, so that those of a tail are lost."""
        epochs = self._blocks.loop_of(loop)
        scope = self._blocks.scope_of(loop)
        beside = any(not _is_under(node, loop, self._blocks) for node in self._resets.get((scope, epochs), ()))
        return beside or (epochs is None and isinstance(scope, ast.Module))

    @cached_property
    def _resets(self) -> dict[tuple[ast.AST | None, ast.AST | None], list[ast.Call]]:
        """What resets gradients, by the function and the loop in which it stands."""
        found: dict[tuple[ast.AST | None, ast.AST | None], list[ast.Call]] = {}
        for call in self._script.calls_of_method("zero_grad"):
            found.setdefault((self._blocks.scope_of(call), self._blocks.loop_of(call)), []).append(call)
        return found

    def _schedules(self, verdict: Verdict, decision: ast.If) -> Iterator[ast.Call]:
        """The schedules that are stepped where a window closes, and not where the tail of an epoch is stepped."""
        optimizers = {id(step.node) for step in (*verdict.loop.steps, *verdict.steps)}
        behind = {ast.unparse(call.func) for call in calls_in(*self._tails(verdict))}
        for call in calls_in(*self._stepping(decision, verdict.loop.node)):
            if last_name(call) == "step" and id(call) not in optimizers and ast.unparse(call.func) not in behind:
                yield call

    @cached_property
    def _makes_one_cycle(self) -> bool:
        return any(last_name(call) == "OneCycleLR" for call in self._script.imports.nodes.of(ast.Call))

    def _check_no_sums(self, verdict: Verdict, undivided: bool) -> None:
        sums = any(SUMMED in event.divisors for event in verdict.backwards)
        if sums or (undivided and _SUM.search(self._source.text)):
            raise CannotFold("its loss may be a sum, which is not divided")

    # -- the tail behind the loop ----------------------------------------------------------------------------------

    def _tail_behind(self, verdict: Verdict) -> Iterator[Edit]:
        """Take out what steps the last window by hand behind the loop."""
        for tail in self._tails(verdict):
            if not all(_belongs_to_step(statement) for statement in tail.body):
                raise CannotFold(f"line {tail.lineno} does more behind the loop than to step")
            yield from remove_statement(self._source, tail, self._blocks.block_of(tail))

    def _tails(self, verdict: Verdict) -> Iterator[ast.If]:
        """What steps the last window by hand behind the loop.

        Raises:
            CannotFold: it is stepped there on other terms.
        """
        for step in verdict.loop.later_steps:
            tail = next((p for p in self._blocks.ancestors(step.node) if isinstance(p, ast.If)), None)
            beside = self._blocks.block_of(verdict.loop.node)
            if tail is None or tail.orelse or self._blocks.block_of(tail) is not beside:
                raise CannotFold(f"line {step.node.lineno} steps behind the loop")
            yield tail


def _belongs_to_step(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    name = last_name(statement.value)
    return name in ("step", "update", "zero_grad", "unscale_") or name.startswith("clip_grad")


def _is_under(node: ast.AST, loop: ast.AST, blocks: Blocks) -> bool:
    return any(parent is loop for parent in blocks.ancestors(node))


def _notes(size: str, undivided: bool, loses_tail: bool, reset_each_epoch: bool) -> Iterator[str]:
    if undivided:
        yield (
            f"the loss was not divided by `{size}`, and is now: gradients are `{size}` times smaller, and a learning "
            "rate that was tuned to them has to grow (by the same factor for plain SGD)"
        )
    if loses_tail:
        was = "was lost" if reset_each_epoch else "went into the first step of the next epoch, if there was one,"
        yield f"the last window of an epoch, where shorter, {was} and is now stepped; batches weigh by their samples"
