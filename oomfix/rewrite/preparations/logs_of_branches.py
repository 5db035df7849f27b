"""What a branch on the way to a loss logs, `if aux: ...; log.append(aux.item())`, in a branch of its own behind it.

Next to the loss, every part of a batch would be logged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import next_in_chain
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.effects import switches_mode
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Liveness,
    definitely_bound,
    names_bound,
    names_read,
    nodes_of_scope,
)
from oomfix.rewrite.dataflow.on_gradients import keeps_gradients, may_reset_gradients, trains
from oomfix.rewrite.dataflow.shared_tensors import are_changed_in_place
from oomfix.rewrite.facts.log_effects import LogEffects
from oomfix.rewrite.facts.needed import needed_for, ways_to
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.text.layout import Lines
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk

_PURE = frozenset(
    "len isinstance hasattr getattr any all int float bool str sum min max abs item keys startswith endswith lower "
    "size dim numel is_tensor isnan isfinite isinf is_available is_initialized get_rank get".split()
)
"""What answers the same when it is asked again."""


@dataclass(frozen=True)
class _Way:
    """One way through an `if`.

    Attributes:
        test: what it asks; None for `else`.
        body: its statements.
        logged: those of them that log, and that nothing on the way to the loss sees.
    """

    test: ast.expr | None
    body: list[ast.stmt]
    logged: list[ast.stmt]

    @property
    def computes(self) -> list[ast.stmt]:
        """The statements that are left."""
        return [one for one in self.body if one not in self.logged and not isinstance(one, ast.Pass)]


class _Around(NamedTuple):
    """What stands around a statement on the way to the loss.

    Attributes:
        before: what runs ahead of it.
        behind: what the loss needs of what runs behind it.
        place: what its logs go behind, where that is not the statement itself.
        passed: what stands between it and the end of that.
    """

    before: Sequence[ast.stmt]
    behind: Sequence[ast.stmt]
    place: ast.stmt | None = None
    passed: Sequence[ast.stmt] = ()


def log_behind_branches(reading: Reading, manager: str) -> list[Edit]:
    """The edits that take what is logged out of branches on the way to a loss, the inner ones first.

    The tests have to come out the same behind them. A name that is logged, and that only its branch binds, is None
    ahead of the `if` where nothing else reads it: the slice then gives it out in any case.
    """
    finder = _Branches(reading, f"{manager}.autocast")
    edits: list[Edit] = []
    known: set[ast.stmt] = set()
    for call in reading.calls_to(f"{manager}.backward"):
        for block, end in ways_to(call, reading):
            needed = sorted(index for index in needed_for(block, end, manager) if block[index] not in known)
            known.update(block[: end + 1])
            for index in needed:
                behind = [block[other] for other in needed if other > index] + [block[end]]
                edits += finder.edits(block[index], _Around(block[:index], behind))
    return edits


class _Branches:
    """Finds branches that log.

    Args:
        reading: the file.
        autocast: the path of the manager's method.
    """

    def __init__(self, reading: Reading, autocast: str) -> None:
        self._reading, self._autocast = reading, autocast
        self._effects = LogEffects(reading)
        self._forwards = reading.events.running
        self._liveness: dict[ast.AST, Liveness] = {}

    def edits(self, outer: ast.stmt, around: _Around) -> list[Edit]:
        """Those for a statement on the way to the loss and what stands in it."""
        inner: list[Edit] = []
        ends = isinstance(outer, ast.With) and _is_call_of(outer, self._autocast)
        for block in _blocks_in(outer):
            for index, statement in enumerate(block):
                rest = block[index + 1 :]
                place, passed = (around.place or outer, [*rest, *around.passed]) if ends else (None, [])
                before, behind = [*around.before, *block[:index]], [*rest, *around.behind]
                inner += self.edits(statement, _Around(before, behind, place, passed))
        if inner or not isinstance(outer, ast.If):
            return inner
        return self._edits_of(outer, around)

    def _edits_of(self, condition: ast.If, around: _Around) -> list[Edit]:
        ways = [self._way(test, body, condition, around) for test, body in _ways(condition)]
        computes = [one for way in ways for one in way.computes]
        tests = [way.test for way in ways if way.test is not None]
        if not any(way.logged for way in ways) or not (computes or around.place):
            return []
        if not all(self._is_asked_again(test, [*computes, *around.passed], around.before) for test in tests):
            return []
        if not computes and around.place is not None:
            return self._moved(condition, around.place)
        written = _Writing(self._reading, condition, ways, around.place or condition).edits()
        if not written:
            return []
        return [*self._empty_starts(condition, ways), *written]

    def _moved(self, condition: ast.If, place: ast.stmt) -> list[Edit]:
        """The edits that move an `if` which only logs behind a statement around it; none where lines are shared."""
        layout, blocks = self._reading.layout, self._reading.blocks
        block, own = blocks.block_of(condition), layout.own_lines(place)
        chunk = self._reading.chunk(condition)
        if own is None or chunk is None or len(block) == 1:
            return []
        lines = layout.moved(chunk, layout.margin(condition), layout.margin(place))
        behind = layout.whole(Lines(own.first, layout.last_line(place)))[1]
        return [layout.removed(chunk), layout.inserted(behind, lines)]

    def _way(self, test: ast.expr | None, body: list[ast.stmt], condition: ast.If, around: _Around) -> _Way:
        inside = {name for one in (*around.before, condition) for name in _bound_plainly(one)}
        read = paths_read(*around.behind)
        logged = [
            one
            for one in body
            if self._logs(one) and _is_seen_later(one, inside) and not overlap(self._left_behind(one), read)
        ]
        while True:
            seen = [one for one in logged if self._meets(one, body, logged, around)]
            if not seen:
                return _Way(test, body, self._with_makings(logged, body, around))
            logged = [one for one in logged if one not in seen]

    def _with_makings(self, logged: list[ast.stmt], body: list[ast.stmt], around: _Around) -> list[ast.stmt]:
        """Logs with what is computed for them alone: `grid = make_grid(x)`, ahead of `writer.add_image("x", grid)`."""
        found = list(logged)
        for one in reversed(body):
            wanted = names_bound(one) & names_read(*found)
            if not wanted or one in found or not self._only_computes(one):
                continue
            others = [other for other in (*body, *around.behind) if other is not one and other not in found]
            read = {path for other in others for path in self._effects.read(other) - _only_bound(other)}
            if not overlap(self._left_behind(one), read) and not self._meets(one, body, found, around):
                found.append(one)
        return [one for one in body if one in found]

    def _only_computes(self, statement: ast.stmt) -> bool:
        """Whether a statement gives a name to what it computes, and does nothing else."""
        plain = isinstance(statement, ast.Assign) and all(isinstance(one, ast.Name) for one in statement.targets)
        return plain and not self._effects.draws(statement) and self._leaves_training_alone(statement)

    def _logs(self, statement: ast.stmt) -> bool:
        """Whether a statement does nothing else than to log: it trains nothing, and switches and resets nothing."""
        return self._leaves_training_alone(statement) and self._effects.are_all(statement)

    def _leaves_training_alone(self, statement: ast.stmt) -> bool:
        if not self._forwards.isdisjoint(walk(statement)):
            return False
        if trains(statement) or switches_mode(statement) or may_reset_gradients(statement):
            return False
        return not reads_gradients(statement) and not keeps_gradients(statement)

    def _left_behind(self, statement: ast.stmt) -> set[str]:
        return self._effects.changed(statement) | names_bound(statement)

    def _meets(self, log: ast.stmt, body: list[ast.stmt], logged: list[ast.stmt], around: _Around) -> bool:
        """Whether a log sees what it passes does, the rest of its branch first, or that sees that it has logged."""
        index = body.index(log)
        later = [*(one for one in body[index + 1 :] if one not in logged), *around.passed]
        read = {path for one in later for path in self._effects.read(one)}
        changed = {path for one in later for path in self._left_behind(one)}
        left = {name for one in later for name in self._effects.left(one)}
        return (
            overlap(self._left_behind(log), read | changed)
            or overlap(changed, self._effects.read(log))
            or self._effects.may_leave_for(log, later)
            or any(left.intersection(path.split(".")[1:]) for path in self._effects.asked(log))
            or are_changed_in_place(names_read(log), later, self._effects.functions, [*around.before, *body[:index]])
        )

    def _is_asked_again(self, test: ast.expr, computes: list[ast.stmt], before: Sequence[ast.stmt]) -> bool:
        """Whether a test comes out the same behind what its branches compute, and nothing sees that it is asked."""
        if any(isinstance(node, ast.NamedExpr | ast.Await | ast.Lambda) for node in walk(test)):
            return False
        calls = list(calls_in(ast.Expr(test)))
        if any(last_name(call) not in _PURE or (last_name(call) == "get" and not call.args) for call in calls):
            return False
        changed = {path for one in computes for path in self._left_behind(one)}
        left = {name for one in computes for name in self._effects.left(one)}
        paths = paths_read(test)
        if overlap(changed, paths) or any(left.intersection(path.split(".")[1:]) for path in paths):
            return False
        return not are_changed_in_place(names_read(test), computes, self._effects.functions, before)

    def _empty_starts(self, condition: ast.If, ways: list[_Way]) -> Iterator[Edit]:
        """`aux = None` for names that one way binds and logs, that others leave without a value, and nobody misses."""
        layout, blocks = self._reading.layout, self._reading.blocks
        outermost = condition
        while isinstance(parent := next(blocks.ancestors(outermost)), ast.If):
            outermost = parent
        for name in sorted({name for way in ways for name in _bound_and_logged(way)}):
            place = next((one for one in (outermost, condition) if self._is_without_value(name, one)), None)
            if place is not None:
                yield layout.inserted(layout.above_comments(place), [f"{layout.margin(place)}{name} = None"])

    def _is_without_value(self, name: str, condition: ast.If) -> bool:
        """Whether a name has no value ahead of an `if`, which may leave it without one, and nobody misses it."""
        blocks = self._reading.blocks
        scope, block = blocks.scope_of(condition), blocks.block_of(condition)
        if scope is None or name in blocks.bound_before(condition):
            return False
        if name in definitely_bound(block[: block.index(condition) + 1]):
            return False
        if scope not in self._liveness:
            self._liveness[scope] = Liveness(scope, self._reading.source.tree)
        after = self._liveness[scope].after(condition)
        return name not in after | self._liveness[scope].before([condition], after)


@dataclass(frozen=True)
class _Writing:
    """Writes the logs of an `if` behind it.

    Attributes:
        reading: the file.
        condition: the `if`.
        ways: those through it.
        place: what the logs go behind.
    """

    reading: Reading
    condition: ast.If
    ways: list[_Way]
    place: ast.stmt

    def edits(self) -> list[Edit]:
        """The edits; none where lines are shared."""
        layout = self.reading.layout
        margin, own = layout.margin(self.place), layout.own_lines(self.place)
        chunks = [self.reading.chunks(way.logged) for way in self.ways]
        if own is None:
            return []
        inner = margin + layout.margin(self.condition.body[0]).removeprefix(layout.margin(self.condition))
        lines, found = [], list[Edit]()
        for header, way, of_way in zip(self._headers(), self.ways, chunks, strict=True):
            if of_way is None:
                return []
            if header is not None:
                lines.append(f"{margin}{header}:")
                lines += [] if of_way else [f"{inner}pass"]
            for chunk in of_way:
                lines += layout.moved(chunk, layout.margin(way.body[0]), inner)
            found += self._removals(way, of_way)
        behind = layout.whole(Lines(own.first, layout.last_line(self.place)))[1]
        return [*found, layout.inserted(behind, lines)]

    def _headers(self) -> list[str | None]:
        """The first lines of the ways of the new `if`; None for those that it has no need of."""
        last = max(index for index, way in enumerate(self.ways) if way.logged)
        if len(self.ways) == 2 and not self.ways[0].logged and self.ways[1].test is None:
            test = self.ways[0].test
            assert test is not None
            open_ended = isinstance(test, ast.BoolOp | ast.IfExp | ast.Lambda)
            return [None, f"if not ({self._text(test)})" if open_ended else f"if not {self._text(test)}"]
        found: list[str | None] = []
        for index, way in enumerate(self.ways):
            word = "elif" if index else "if"
            header = "else" if way.test is None else f"{word} {self._text(way.test)}"
            found.append(header if index <= last else None)
        return found

    def _text(self, test: ast.expr) -> str:
        text = self.reading.source.segment(test)
        return ast.unparse(test) if "\n" in text else text

    def _removals(self, way: _Way, chunks: list[Lines]) -> list[Edit]:
        """The edits that take logs out of a way, and the `else` with them that holds nothing else."""
        layout = self.reading.layout
        if not chunks or len(way.logged) < len(way.body):
            return [layout.removed(chunk) for chunk in chunks]
        first, last = chunks[0].first, chunks[-1].last
        if way.test is None:
            lines = layout.source.lines
            first = next(number for number in range(first, 0, -1) if lines[number - 1].strip().startswith("else"))
            return [layout.removed(Lines(first, last))]
        return [Edit(*layout.span(Lines(first, last)), f"{layout.margin(way.body[0])}pass")]


def _bound_and_logged(way: _Way) -> set[str]:
    return definitely_bound(way.computes) & names_read(*way.logged)


def _ways(condition: ast.If) -> Iterator[tuple[ast.expr | None, list[ast.stmt]]]:
    yield condition.test, condition.body
    if (further := next_in_chain(condition)) is not None:
        yield from _ways(further)
    elif condition.orelse:
        yield None, condition.orelse


def _blocks_in(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a statement that run where it does; an `elif` has none of its own."""
    if isinstance(statement, ast.If):
        yield from (body for _, body in _ways(statement))
    elif isinstance(statement, ast.For | ast.With):
        yield statement.body


def _is_call_of(block: ast.With, path: str) -> bool:
    """`with memory.autocast():`."""
    contexts = [item.context_expr for item in block.items if item.optional_vars is None]
    return len(contexts) == len(block.items) == 1 and all(
        isinstance(one, ast.Call) and path_of(one.func) == path for one in contexts
    )


def _only_bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds and does not read."""
    return names_bound(statement) - names_read(statement)


def _bound_plainly(statement: ast.stmt) -> set[str]:
    """The names that a statement binds, but for those that it only counts on."""
    nodes = list(nodes_of_scope(statement))
    counted = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    stored = (node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    defined = {node.name for node in nodes if isinstance(node, FunctionNode | ast.ClassDef)}
    return defined | {node.id for node in stored if id(node) not in counted}


def _is_seen_later(log: ast.stmt, inside: set[str]) -> bool:
    """Whether what a statement does outlasts the iteration: it changes what was made outside of it, or prints."""
    changed = changed_paths(log) | names_bound(log)
    if any(path.split(".")[0] not in inside for path in changed):
        return True
    return not changed
