"""What a loop on the way to a loss logs of each round, `log[task].append(loss.item())`, in a loop of its own behind it.

The loop that computes keeps what is logged, and the slice gives it out; next to the loss, every part of a batch would
be logged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oomfix.rewrite.effects import called_name, changed_paths, leaves, overlap, paths_read
from oomfix.rewrite.layout import Lines
from oomfix.rewrite.liveness import definitely_bound, names_bound, names_bound_by_target, names_read
from oomfix.rewrite.module import Names
from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

_AGAIN = frozenset({"range", "zip", "enumerate", "list", "tuple", "sorted", "reversed", "items", "keys", "values"})
"""What gives the same when it is called again on the same."""

_FETCHED = re.compile(r"(loader|iter|iterator|data|dataset|batch|batche)s?$", re.IGNORECASE)
"""What may give other batches when it is run over again."""


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
    kept = Names(reading.script).free("kept", "kept_values")
    forwards = {forward.node for forward in reading.script.trace.forwards.values()}
    edits: list[Edit] = []
    for loop in _loops(reading, manager):
        runs_network = any(not forwards.isdisjoint(walk(statement)) for statement in loop.logged)
        values = _values(loop)
        header = None if runs_network or values is None else _header(loop, values, kept)
        if values is not None and header is not None:
            edits += _edits(reading, loop, values, header, kept)
    return edits


def _loops(reading: Reading, manager: str) -> Iterator[_Loop]:
    blocks = reading.blocks
    for call in reading.script.imports.nodes.of(ast.Call):
        if path_of(call.func) != f"{manager}.backward" or not call.args:
            continue
        statement = blocks.statement_of(call)
        block = blocks.block_of(statement)
        end = block.index(statement)
        for index, outer in enumerate(block[:end]):
            inner = outer
            while isinstance(inner, ast.With) and isinstance(inner.body[-1], ast.With | ast.For):
                inner = inner.body[-1]
            if isinstance(inner, ast.For) and not inner.orelse and not any(leaves(one) for one in inner.body):
                loop = _Loop(inner, outer, block[:index], block[index + 1 : end + 1], ())
                if logged := _logged(loop):
                    yield _Loop(inner, outer, block[:index], block[index + 1 : end + 1], logged)


def _logged(loop: _Loop) -> list[ast.stmt]:
    """The statements that change what was made outside, and that nothing on the way to the loss sees."""
    found = [statement for statement in loop.node.body if _is_for_effect(statement)]
    while True:
        others = [*(one for one in loop.node.body if one not in found), *loop.behind]
        read = {path for statement in others for path in paths_read(statement)}
        changed = {path for statement in others for path in (*changed_paths(statement), *names_bound(statement))}
        seen = [one for one in found if overlap(_changes(one), read | changed)]
        if not seen:
            break
        found = [one for one in found if one not in seen]
    inside = {name for statement in (*loop.before, loop.node) for name in names_bound(statement)}
    lasting = {path for one in found for path in changed_paths(one) if path.split(".")[0] not in inside}
    counted = {name for one in found for name in names_bound(one)} - {
        name for statement in loop.before for name in names_bound(statement)
    }
    return found if lasting or counted else []


def _changes(statement: ast.stmt) -> set[str]:
    return names_bound(statement) | changed_paths(statement)


def _is_for_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(map(_is_for_effect, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.AugAssign)


def _values(loop: _Loop) -> list[str] | None:
    """The names bound in a round that are logged; None where they may be other values behind the loop."""
    body = loop.node.body
    first = body.index(loop.logged[0])
    bound = {name for statement in loop.computes for name in names_bound(statement)}
    values = {name for statement in loop.logged for name in names_read(statement)} & bound
    if not values or not values <= definitely_bound(body[:first]):
        return None
    again = {name for statement in body[first:] for name in names_bound(statement)}
    changed = {path for statement in loop.computes for path in changed_paths(statement)}
    added_to = (node for statement in loop.computes for node in walk(statement) if isinstance(node, ast.AugAssign))
    changed |= {path for node in added_to if (path := path_of(node.target)) is not None}
    if values & again or overlap(changed, values) or not all(_is_made(name, loop) for name in values):
        return None
    return sorted(values, key=lambda name: _first_line(name, loop))


def _is_made(name: str, loop: _Loop) -> bool:
    """Whether a round binds a name to something new, and not to what others hold as well."""
    bindings = [statement for statement in loop.computes if name in names_bound(statement)]
    return all(isinstance(one, ast.Assign) and isinstance(one.value, ast.Call | ast.BinOp) for one in bindings)


def _first_line(name: str, loop: _Loop) -> int:
    return next(statement.lineno for statement in loop.computes if name in names_bound(statement))


def _header(loop: _Loop, values: list[str], kept: str) -> str | None:
    """The header of the loop that logs; None where it would need what the first one runs over, and that is gone."""
    node = loop.node
    inside = {name for one in (*loop.before, loop.outer) for name in names_bound(one)}
    needed = {name for one in loop.logged for name in names_read(one)} & names_bound_by_target(node.target)
    one = ", ".join(values)
    nested = one if len(values) == 1 else f"({one})"
    if not needed:
        return f"for {one} in {kept}:"
    target = node.target
    counts = called_name(node.iter) == "enumerate" and isinstance(node.iter, ast.Call) and len(node.iter.args) == 1
    if counts and isinstance(target, ast.Tuple) and needed <= names_bound_by_target(target.elts[0]):
        return f"for {ast.unparse(target.elts[0])}, {nested} in enumerate({kept}):"
    if not _is_there_again(node.iter) or names_read(node.iter) & inside:
        return None
    told = ast.unparse(target)
    told = f"({told})" if isinstance(target, ast.Tuple) and not told.startswith("(") else told
    return f"for {told}, {nested} in zip({ast.unparse(node.iter)}, {kept}):"


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
    layout, newline = reading.layout, reading.layout.newline
    chunks = _chunks(reading, loop)
    if chunks is None or layout.own_lines(loop.outer) is None:
        return []
    margin, inner = layout.margin(loop.outer), layout.margin(loop.node.body[0])
    value = values[0] if len(values) == 1 else f"({', '.join(values)})"
    logs = [f"{margin}{header}"]
    for chunk in chunks:
        logs += layout.moved(chunk, inner, f"{margin}{layout.unit}")
    start = layout.span(Lines(loop.node.lineno, loop.node.lineno))[0]
    edits = [Edit(start, start, f"{layout.margin(loop.node)}{kept} = []{newline}")]
    edits.append(Edit(*layout.span(chunks[0]), f"{inner}{kept}.append({value})"))
    edits += [Edit(*layout.whole(chunk), "") for chunk in chunks[1:]]
    behind = layout.whole(Lines(loop.outer.lineno, layout.last_line(loop.outer)))[1]
    return [*edits, Edit(behind, behind, newline.join(logs) + newline)]


def _chunks(reading: Reading, loop: _Loop) -> list[Lines] | None:
    """The lines of what is logged, with the comments above; None where it shares them."""
    layout, body = reading.layout, loop.node.body
    header = reading.blocks.header_of(body[0])
    chunks = [layout.chunk(statement, body, header) for statement in loop.logged]
    found = [chunk for chunk in chunks if chunk is not None]
    return found if len(found) == len(chunks) else None
