"""Losses whose backward something else runs: Accelerate, a scaler such as timm's.

They become those of `memory.loss`, which has computed their gradients in micro-batches by then.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import Scope, names_bound
from oomfix.script.facts.trace import Backward
from oomfix.script.syntax.names import path_of, root_of

_SETTINGS = {"args", "opt", "opts", "cfg", "config", "conf", "hparams", "hps", "FLAGS"}
"""What command lines and files of settings are read into."""


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
    made_here = _made_in(blocks.loop_of(call) or blocks.scope_of(call))
    if isinstance(given, ast.BinOp) and _scales(given, made_here):
        given = given.left
    if not isinstance(given, ast.Name) or not all(map(_asks_for_no_graph, call.keywords)):
        return None
    statement = blocks.statement_of(call)
    if not isinstance(statement, ast.Expr | ast.Assign):
        return None
    block = blocks.block_of(statement)
    before = block[: block.index(statement)]
    making = (
        one for one in before[::-1] if given.id in names_bound(one) and not _is_rescaled(given.id, one, made_here)
    )
    made_by = next(making, None)
    return None if made_by is None else HandedLoss(given.id, made_by)


def _made_in(around: ast.For | ast.AsyncFor | ast.While | Scope | None) -> set[str]:
    """The names that a loop, or a function, binds: what they hold may carry a graph."""
    return set() if around is None else names_bound(around, *around.body)


def _asks_for_no_graph(keyword: ast.keyword) -> bool:
    """Whether an argument leaves the graph to be freed: `create_graph=False`, or timm's `=is_second_order`."""
    if keyword.arg not in (None, "retain_graph", "create_graph"):
        return True
    if keyword.arg != "create_graph":
        return False
    off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
    return off or (isinstance(keyword.value, ast.Name) and keyword.value.id == "is_second_order")


def _is_rescaled(loss: str, statement: ast.stmt, made_here: set[str]) -> bool:
    """`loss /= k`, `loss = loss / k`, or either of them under a test, by what no graph goes through."""
    if isinstance(statement, ast.If):
        return len(statement.body) == 1 and not statement.orelse and _is_rescaled(loss, statement.body[0], made_here)
    match statement:
        case ast.AugAssign(target=ast.Name(name), op=ast.Div() | ast.Mult(), value=factor):
            return name == loss and _is_plain(factor, made_here)
        case ast.Assign(targets=[ast.Name(name)], value=ast.BinOp(left=ast.Name(scaled)) as product):
            return name == scaled == loss and _scales(product, made_here)
    return False


def _scales(product: ast.BinOp, made_here: set[str]) -> bool:
    return isinstance(product.op, ast.Div | ast.Mult) and _is_plain(product.right, made_here)


def _is_plain(factor: ast.expr, made_here: set[str]) -> bool:
    """Whether a factor is a number or a setting from outside of the loop, so that it carries no graph of the loss."""
    if isinstance(factor, ast.Attribute):
        return root_of(path_of(factor) or "") in _SETTINGS - made_here
    return isinstance(factor, ast.Constant) or (isinstance(factor, ast.Name) and factor.id not in made_here)
