"""What a loop on the way to a loss logs of each round, `log[task].append(loss.item())`, in a loop of its own behind it.

The loop that computes keeps what is logged, and the slice gives it out; next to the loss, every part of a batch would
be logged.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import (
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
)
from oomfix.rewrite.dataflow.shared_tensors import are_changed_in_place
from oomfix.rewrite.facts.log_effects import LogEffects
from oomfix.rewrite.facts.needed import needed_for, ways_to
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.rewrite.text.layout import Lines
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import path_of, unpacked
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_AGAIN = frozenset({"range", "zip", "enumerate", "list", "tuple", "sorted", "reversed", "items", "keys", "values"})
"""What gives the same when it is called again on the same."""

_FETCHED = Pattern(r"(loader|iter|iterator|data|dataset|batch|batche)s?$", re.IGNORECASE)
"""What may give other batches when it is run over again."""


_PASSING = frozenset(
    "iter map filter zip enumerate reversed cycle count chain islice product parameters named_parameters modules "
    "children named_children".split()
)
"""What gives something to run over once."""


@dataclass(frozen=True)
class _Loop:
    """A loop on the way to a loss.

    Attributes:
        node: the loop.
        outer: the statement that it stands in, or is itself, in the block of the backward.
        before: the statements of that block ahead of `outer`.
        behind: those from there to the backward, it included.
        logged: the statements of its body that log.
    """

    node: ast.For
    outer: ast.stmt
    before: Sequence[ast.stmt]
    behind: Sequence[ast.stmt]
    logged: Sequence[ast.stmt]

    @property
    def computes(self) -> list[ast.stmt]:
        """The statements of its body that are left."""
        return [statement for statement in self.node.body if statement not in self.logged]


def log_behind(reading: Reading, manager: str) -> list[Edit]:
    """The edits that take what is logged out of the loops on the way to a loss.

    What is logged has to be made by calls in the round itself, whatever else the loop does must not see that it is
    logged later, and what the loop runs over must be there again.
    """
    names = FreeNames(reading.script)
    forwards = reading.events.running
    passing = _gone_behind_a_loop(reading)
    effects = LogEffects(reading)
    edits: list[Edit] = []
    lists: Counter[object] = Counter()
    for loop in _loops(reading, manager, effects):
        runs_network = any(not forwards.isdisjoint(walk(statement)) for statement in loop.logged)
        values = _values(loop, effects)
        scope = reading.blocks.scope_of(loop.node)
        others = lists[scope]
        kept = names.one_of(f"kept_{others + 1}") if others else names.one_of("kept", "kept_values")
        header = None
        if values is not None and not runs_network and not any(map(leaves, loop.node.body)):
            header = _header(loop, values, kept, reading, passing)
        if values is not None and header is None and not runs_network:
            values = _with_rounds(loop, values, effects, passing)
            header = None if values is None else f"for {', '.join(values)} in {kept}:"
        if values is not None and header is not None and (found := _edits(reading, loop, values, header, kept)):
            edits += found
            lists[scope] += 1
    return edits


def _gone_behind_a_loop(reading: Reading) -> set[str]:
    """The paths that are bound somewhere to what can be run over only once: `pairs = zip(outputs, labels)`."""
    made = reading.script.imports.nodes.of(ast.Assign)
    once = (one for one in made if isinstance(one.value, ast.GeneratorExp) or called_name(one.value) in _PASSING)
    return {path for one in once for target in one.targets if (path := path_of(target)) is not None}


def _loops(reading: Reading, manager: str, effects: LogEffects) -> Iterator[_Loop]:
    known: set[ast.stmt] = set()
    for call in reading.calls_to(f"{manager}.backward"):
        ways = ((block, index, end) for block, end in ways_to(call, reading) for index in range(end))
        for block, index, end in ways:
            outer = block[index]
            if outer in known:  # on the way to an earlier loss
                continue
            known.add(outer)
            inner, entered = outer, set[str]()
            while isinstance(inner, ast.With) and isinstance(inner.body[-1], ast.With | ast.For):
                entered |= names_bound(*inner.items)
                inner = inner.body[-1]
            if isinstance(inner, ast.For) and not inner.orelse and _ends_in_itself(inner):
                behind = [block[other] for other in sorted(needed_for(block, end, manager)) if other > index]
                loop = _Loop(inner, outer, block[:index], block[index + 1 : end + 1], ())
                logged = _logged(loop, [*behind, block[end]], effects)
                if logged and entered.isdisjoint(names_read(*logged)):
                    yield replace(loop, logged=logged)


def _ends_in_itself(loop: ast.For) -> bool:
    """Whether nothing in a loop leaves more than a round of it: rounds that go on with the next keep nothing."""
    return all(leaves(one) in (None, "continue", "break") for one in loop.body)


def _logged(loop: _Loop, behind: list[ast.stmt], effects: LogEffects) -> list[ast.stmt]:
    """The statements that change what was made outside, and that nothing on the way to the loss sees.

    Nor do they see anything else that a later round changes.

    Args:
        loop: the loop, whose `logged` is not known yet.
        behind: what the loss needs of what runs behind it, and what runs the backward.
        effects: of the file.
    """
    found = [statement for statement in loop.node.body if effects.are_all(statement)]
    while True:
        computes = [one for one in loop.node.body if one not in found]
        others = [*computes, *behind]
        read = {path for statement in others for path in effects.read(statement)}
        changed = {path for statement in others for path in (*effects.changed(statement), *names_bound(statement))}
        by_rounds = {path for statement in computes for path in effects.changed(statement)}
        left = {name for statement in computes for name in effects.left(statement)}
        seen = [
            one
            for one in found
            if overlap(effects.changed(one) | names_bound(one), read | changed)
            or overlap(by_rounds, effects.read(one))
            or effects.may_leave_for(one, others)
            or any(left.intersection(path.split(".")[1:]) for path in effects.asked(one))
        ]
        if not seen:
            break
        found = [one for one in found if one not in seen]
    inside = names_bound(*loop.before, loop.node)
    lasting = {path for one in found for path in changed_paths(one) if path.split(".")[0] not in inside}
    counted = names_bound(*found) - names_bound(*loop.before)
    return found if lasting or counted else []


def _values(loop: _Loop, effects: LogEffects) -> list[str] | None:
    """The names bound in a round that are logged; None where they may be other values behind the loop."""
    body = loop.node.body
    bound = names_bound(*loop.computes)
    values: set[str] = set()
    for statement in loop.logged:
        read, place = names_read(statement) & bound, body.index(statement)
        again = names_bound(*body[place:])
        if read & again or not read <= definitely_bound(body[:place]):
            return None
        values |= read
    first, last = (body.index(loop.logged[number]) for number in (0, -1))
    if any(map(leaves, body[first:last])):  # a round may log some of it
        return None
    changed = {path for statement in loop.node.body for path in changed_paths(statement)}
    if not values or overlap(changed, values) or not all(_is_made(name, loop, effects) for name in values):
        return None
    if are_changed_in_place(values, [*loop.computes, *loop.behind], effects.functions):
        return None
    return sorted(values, key=lambda name: _first_place(name, loop))


def _is_made(name: str, loop: _Loop, effects: LogEffects) -> bool:
    """Whether a round binds a name to something new that no others hold as well, or to what no round changes."""
    nodes = list(nodes_of_scope(*loop.computes))
    stores = [
        one for one in nodes if isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load)
    ]
    bindings = [one for one in nodes if isinstance(one, ast.Assign) and name in names_bound(one)]
    values = [one.value for one in bindings]
    changed = {path for statement in loop.node.body for path in effects.changed(statement)}
    return len(values) == len(stores) and all(
        isinstance(one, ast.Constant | ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr)
        or (isinstance(one, ast.Subscript) and not overlap(changed, paths_read(one)))
        for one in values
    )


def _first_place(name: str, loop: _Loop) -> tuple[int, int]:
    """Where a round binds a name first: of `loss, accuracy = ...`, the names of a line are in their order there."""
    first = next(statement for statement in loop.computes if name in names_bound(statement))
    stores = [node for node in nodes_of_scope(first) if isinstance(node, ast.Name) and node.id == name]
    places = [(one.lineno, one.col_offset) for one in stores if not isinstance(one.ctx, ast.Load)]
    return min(places, default=(first.lineno, first.col_offset))


def _header(loop: _Loop, values: list[str], kept: str, reading: Reading, passing: set[str]) -> str | None:
    """The header of the loop that logs; None where it would need what the first one runs over, and that is gone."""
    node = loop.node
    needed = _needed(loop)
    one = ", ".join(values)
    nested = one if len(values) == 1 else f"({one})"
    if not needed:
        return f"for {one} in {kept}:"
    target = node.target
    called = called_name(node.iter) if isinstance(node.iter, ast.Call) and len(node.iter.args) == 1 else ""
    if called == "enumerate" and isinstance(target, ast.Tuple) and needed <= names_bound_by_target(target.elts[0]):
        return f"for {ast.unparse(target.elts[0])}, {nested} in enumerate({kept}):"
    if called == "range" and isinstance(target, ast.Name):
        return f"for {target.id}, {nested} in enumerate({kept}):"
    inside = names_bound(*loop.before, loop.outer)
    if not _is_there_again(node.iter) or names_read(node.iter) & inside or paths_read(node.iter) & passing:
        return None
    told = ast.unparse(target)
    told = f"({told})" if isinstance(target, ast.Tuple) and not told.startswith("(") else told
    return f"for {told}, {nested} in zip({_text(node.iter, reading)}, {kept}):"


def _needed(loop: _Loop) -> set[str]:
    """What the loop runs over, by the names that are logged."""
    return names_read(*loop.logged) & names_bound_by_target(loop.node.target)


def _text(node: ast.expr, reading: Reading) -> str:
    """An expression as it is written, on one line."""
    text = reading.source.segment(node)
    return ast.unparse(node) if "\n" in text or (isinstance(node, ast.Tuple) and not text.startswith("(")) else text


def _with_rounds(loop: _Loop, values: list[str], effects: LogEffects, passing: set[str]) -> list[str] | None:
    """The values with what the loop runs over, to be kept as well; None where it may be something else each time."""
    needed = _needed(loop)
    bound = names_bound(*loop.node.body)
    changed = {path for statement in loop.node.body for path in changed_paths(statement)}
    run_over = paths_read(loop.node.iter)
    if needed & bound or overlap(changed, needed) or run_over & passing or any(map(_FETCHED.search, run_over)):
        return None
    if are_changed_in_place(needed, [*loop.computes, *loop.behind], effects.functions):
        return None
    return [*(name for name in _names_in_order(loop.node.target) if name in needed), *values]


def _names_in_order(target: ast.expr) -> list[str]:
    return [node.id for node in walk(*unpacked(target)) if isinstance(node, ast.Name)]


def _is_there_again(node: ast.expr) -> bool:
    """Whether what a loop runs over is there again behind it: a name that each iteration runs over, `range(n)`."""
    if isinstance(node, ast.Call):
        given = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        return called_name(node) in _AGAIN and not node.keywords and all(map(_is_there_again, given))
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_there_again, node.elts))
    path = path_of(node)
    return isinstance(node, ast.Constant) or (path is not None and not _FETCHED.search(path))


def _edits(reading: Reading, loop: _Loop, values: Sequence[str], header: str, kept: str) -> list[Edit]:
    layout = reading.layout
    chunks = reading.chunks(loop.logged)
    if chunks is None or layout.own_lines(loop.outer) is None:
        return []
    margin, inner = layout.margin(loop.outer), layout.margin(loop.node.body[0])
    value = values[0] if len(values) == 1 else f"({', '.join(values)})"
    logs = [f"{margin}{header}"]
    for chunk in chunks:
        logs += layout.moved(chunk, inner, f"{margin}{layout.unit}")
    start = layout.span(Lines(loop.node.lineno, loop.node.lineno))[0]
    edits = [layout.inserted(start, [f"{layout.margin(loop.node)}{kept} = []"])]
    ahead = definitely_bound(loop.node.body[: loop.node.body.index(loop.logged[0])])
    here = chunks.pop(0 if set(values) <= ahead | names_bound_by_target(loop.node.target) else -1)
    edits.append(Edit(*layout.span(here), f"{inner}{kept}.append({value})"))
    edits += map(layout.removed, chunks)
    behind = layout.whole(Lines(loop.outer.lineno, layout.last_line(loop.outer)))[1]
    return [*edits, layout.inserted(behind, logs)]
