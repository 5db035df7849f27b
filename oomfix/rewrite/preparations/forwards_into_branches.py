"""A forward right ahead of the `if train:` that makes its loss and runs the backward, moved into both of its branches.

`output = model(x)`, then `if train: loss = criterion(output, y); loss.backward(); ...`: with the forward in it, the
branch holds all of a slice, and the other one runs the network as it did.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Lines
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.nodes import walk

_MOST_LINES = 3
"""How much of a forward is written twice."""


def forwards_into_branches(reading: Reading, manager: str) -> list[Edit]:
    """The edits that move forwards into the branches of the `if` right behind them, where one runs their backward."""
    edits: dict[ast.stmt, list[Edit]] = {}
    for call in reading.calls_to(f"{manager}.backward"):
        statement = reading.blocks.statement_of(call)
        branch = next(reading.blocks.ancestors(statement), None)
        if isinstance(branch, ast.If) and statement in branch.body and branch not in edits:
            moved = _forward_ahead_of(branch, statement, reading)
            edits[branch] = _edits(branch, moved, reading) if moved else []
    return [edit for found in edits.values() for edit in found]


def _forward_ahead_of(branch: ast.If, backward: ast.stmt, reading: Reading) -> list[ast.stmt]:
    """The statements from the network on that stand right ahead of a branch, which makes a loss of what they give."""
    forwards = reading.events.running
    runs = [not forwards.isdisjoint(reading.calls_run.by(one)) for one in branch.body]
    if any(runs) or reading.blocks.is_elif(branch) or any(calls_in(branch.test)):
        return []
    block = reading.blocks.block_of(branch)
    ahead = block[: block.index(branch)]
    first = next((place for place, one in enumerate(ahead) if not forwards.isdisjoint(reading.calls_run.by(one))), None)
    moved = ahead[first:] if first is not None else []
    made = names_bound(*moved)
    needed = names_read(*branch.body[: branch.body.index(backward)])
    fits = len(moved) <= _MOST_LINES and all(map(_only_binds_names, moved)) and bool(made & needed)
    same = made.isdisjoint(names_read(branch.test)) and not _may_set(branch.test, moved, reading)
    return moved if fits and same else []


def _may_set(test: ast.expr, moved: Sequence[ast.stmt], reading: Reading) -> bool:
    """Whether functions of the file that statements run write what a test asks for, of whatever object."""
    asked = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None) for node in walk(test)}
    run = reading.calls_run.functions(list(calls_in(*moved)))
    written = walk(*run)
    if any(isinstance(node, ast.Subscript) for node in walk(test)) and any(map(_stores_items, run)):
        return True
    return any(
        (isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr in asked)
        or (isinstance(node, ast.Global | ast.Nonlocal) and not asked.isdisjoint(node.names))
        for node in written
    )


def _stores_items(function: ast.AST) -> bool:
    return any(isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) for node in walk(function))


def _only_binds_names(statement: ast.stmt) -> bool:
    """`output = model(x)`, `loss, output = run(x)`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return bool(names) and all(isinstance(one, ast.Name) for one in names)


def _edits(branch: ast.If, moved: Sequence[ast.stmt], reading: Reading) -> list[Edit]:
    layout, chunks = reading.layout, reading.chunks(moved)
    sides = [branch.body[0], *branch.orelse[:1]]
    own = layout.own_lines(branch)
    is_apart = all(layout.own_lines(one) is not None and one.lineno > branch.lineno for one in sides)
    other_is_plain = not branch.orelse or not _is_elif(branch.orelse[0], reading)
    if own is None or not is_apart or not other_is_plain or chunks is None:
        return []
    margin, newline, inner = layout.margin(branch), layout.newline, layout.margin(sides[0])
    edits = list(map(layout.removed, chunks))
    for first in sides:
        here = layout.whole(reading.chunk(first) or Lines(first.lineno, first.lineno))[0]
        text = [line for chunk in chunks for line in layout.moved(chunk, margin, layout.margin(first))]
        edits.append(layout.inserted(here, text))
    if not branch.orelse:
        end = layout.span(Lines(branch.lineno, layout.last_line(branch)))[1]
        text = [f"{margin}else:", *(line for chunk in chunks for line in layout.moved(chunk, margin, inner))]
        edits.append(Edit(end, end, "".join(newline + line for line in text)))
    return edits


def _is_elif(statement: ast.stmt, reading: Reading) -> bool:
    return isinstance(statement, ast.If) and reading.blocks.is_elif(statement)
