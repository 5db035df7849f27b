"""Losses whose backward something else runs: Accelerate, Fabric, a scaler such as timm's.

They become those of `memory.loss`, which has computed their gradients in micro-batches by then.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.script.facts.trace import Backward


class HandedLoss(NamedTuple):
    """A loss that is handed on by its name.

    Attributes:
        name: the loss.
        made_by: the last statement that computes it, beside the one that hands it on; divisions of it come later.
    """

    name: str
    made_by: ast.stmt


def handed_loss(event: Backward, blocks: Blocks) -> HandedLoss | None:
    """The loss that a call is given to run its backward; None where that is not seen, or may keep its graph."""
    call = event.node
    given = call.args[0] if call.args else None
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Div | ast.Mult):
        given = given.left
    if not isinstance(given, ast.Name) or any(keyword.arg in (None, "retain_graph") for keyword in call.keywords):
        return None
    statement = blocks.statement_of(call)
    if not isinstance(statement, ast.Expr | ast.Assign):
        return None
    block = blocks.block_of(statement)
    before = block[: block.index(statement)]
    making = (one for one in reversed(before) if given.id in names_bound(one) and not _is_rescaled(given.id, one))
    made_by = next(making, None)
    return None if made_by is None else HandedLoss(given.id, made_by)


def _is_rescaled(loss: str, statement: ast.stmt) -> bool:
    """`loss /= k`, `loss = loss / k`, or either of them under a test."""
    if isinstance(statement, ast.If):
        return len(statement.body) == 1 and not statement.orelse and _is_rescaled(loss, statement.body[0])
    match statement:
        case ast.AugAssign(target=ast.Name(name), op=ast.Div() | ast.Mult(), value=factor):
            return name == loss and loss not in names_read(factor)
        case ast.Assign(
            targets=[ast.Name(name)],
            value=ast.BinOp(left=ast.Name(scaled), op=ast.Div() | ast.Mult(), right=factor),
        ):
            return name == scaled == loss and loss not in names_read(factor)
    return False
