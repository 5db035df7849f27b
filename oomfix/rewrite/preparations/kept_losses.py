"""A loss that is assigned to an attribute, `self.loss = ...`, gets a name of its own, which a slice can bind."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.liveness import nodes_of_scope_body
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk


def name_losses(reading: Reading, manager: str) -> list[Edit]:
    """The edits that turn `self.loss = f(x)`, `memory.backward(self.loss)` into three statements with `loss`.

    `loss = f(x)`, `self.loss = loss` and `memory.backward(loss)`: where one statement of the block makes the loss,
    alone or among others, and the name means nothing in the function yet.
    """
    edits: list[Edit] = []
    for call in reading.calls_to(f"{manager}.backward"):
        match call.args:
            case [ast.Attribute(value=ast.Name()) as root, *_]:
                edits += _named(reading, call, root)
    return edits


def _named(reading: Reading, call: ast.Call, root: ast.Attribute) -> list[Edit]:
    source, layout, blocks = reading.source, reading.layout, reading.blocks
    statement, scope = blocks.statement_of(call), blocks.scope_of(call)
    block, path, name = blocks.block_of(statement), path_of(root), root.attr
    if scope is None or any(isinstance(n, ast.Name) and n.id == name for n in nodes_of_scope_body(scope)):
        return []
    made = [
        (other, target)
        for other in block[: block.index(statement)]
        if isinstance(other, ast.Assign)
        for target in walk(other)
        if isinstance(target, ast.Attribute) and path_of(target) == path and isinstance(target.ctx, ast.Store)
    ]
    own = layout.own_lines(made[0][0]) if len(made) == 1 else None
    if own is None:
        return []
    assignment, target = made[0]
    end = layout.span(own)[1]
    kept = f"{layout.newline}{layout.margin(assignment)}{path} = {name}"
    return [Edit(*bounds(source, target), name), Edit(end, end, kept), Edit(*bounds(source, root), name)]
