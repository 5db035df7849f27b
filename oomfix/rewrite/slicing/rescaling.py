"""A loss that is divided at the end of its slice, `loss = loss / k`, is divided where it is returned instead."""

from __future__ import annotations

import ast
from dataclasses import replace

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import names_bound, names_read
from oomfix.rewrite.facts.amp import without_scaler
from oomfix.rewrite.facts.lift import Site
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk


def without_scaling(site: Site, chosen: list[int]) -> tuple[Site, list[int], list[ast.stmt]] | None:
    """The slice without the `loss = loss / k` at its end, which the returned expression does instead.

    `loss = loss.mean() / k` is taken likewise, and `if k > 1: loss = loss / k` becomes `loss / k if k > 1 else loss`.
    """
    named = without_scaler(site.root)
    if len(chosen) < 2 or not isinstance(named, ast.Name):
        return None
    *others, last = (site.block[index] for index in chosen)
    loss = named.id
    if loss not in names_bound(*others) or _is_told_in_branch(site, loss):
        return None
    test = None
    statement = last
    if isinstance(last, ast.If) and len(last.body) == 1 and not last.orelse:
        test, statement = last.test, last.body[0]
    value: ast.expr
    if isinstance(statement, ast.Assign) and [path_of(target) for target in statement.targets] == [loss]:
        value = statement.value
    elif isinstance(statement, ast.AugAssign) and path_of(statement.target) == loss:
        between = site.block[chosen[0] : chosen[-1]]
        if any(_may_be_kept(loss, other) for other in between if other not in others):
            return None  # what is kept of it is divided with it, in place
        value = ast.BinOp(ast.Name(loss, ast.Load()), statement.op, statement.value)
    else:
        return None
    if any(not _reduces(call, loss) for call in calls_in(last)) or loss not in names_read(value):
        return None
    if test is not None:
        value = ast.IfExp(test, value, ast.Name(loss, ast.Load()))
    if isinstance(site.root, ast.Call):
        value = ast.Call(site.root.func, [value], [])
    root = ast.parse(ast.unparse(value), mode="eval").body
    return replace(site, root=root), chosen[:-1], [last]


def _is_told_in_branch(site: Site, loss: str) -> bool:
    """Whether the branch of the backward has another use for the loss, which it would find undivided."""
    branch = [] if site.branch is None else [*site.branch.body, *getattr(site.branch, "orelse", ())]
    return any(loss in names_read(other) | names_bound(other) for other in branch if other is not site.statement)


def _may_be_kept(loss: str, statement: ast.stmt) -> bool:
    """Whether a statement keeps the loss itself, or what shares its memory: `kept.append(loss.detach())`."""
    computing = [node for node in walk(statement) if _computes(node)]
    read = {id(node) for node in walk(*computing)}
    return any(isinstance(node, ast.Name) and node.id == loss and id(node) not in read for node in walk(statement))


def _computes(node: ast.AST) -> bool:
    """`loss.item()`, `total += loss`, `0.9 * mean + loss`, and what is printed: all of them leave the loss alone."""
    if isinstance(node, ast.Call):
        return last_name(node) in ("item", "tolist", "float", "int", "print", "isnan", "isfinite", "isinf")
    if isinstance(node, ast.AugAssign):
        return not isinstance(node.value, ast.List | ast.Tuple)
    return isinstance(node, ast.BinOp | ast.Compare | ast.JoinedStr)


def _reduces(call: ast.Call, loss: str) -> bool:
    """`loss.mean()`, `loss.sum()`."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("mean", "sum")
        and path_of(function.value) == loss
        and not call.args
        and not call.keywords
    )
