"""Whether a loop moves its batches to the GPU as its loader gives them."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.dataflow.liveness import names_bound_by_target
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern
from oomfix.script.syntax.scopes import Scopes

_DEVICE = Pattern(r"(^|\.)\w*(device|cuda)\w*$", re.IGNORECASE)
_SAME_MEMORY = frozenset("view squeeze unsqueeze flatten items values".split())
"""Methods whose result lies where their object lies."""


def moves_batches(loop: ast.For, scopes: Scopes) -> bool:
    """Whether a part of a batch is moved to the GPU in a loop.

    What is computed of it ahead (`x = x.float()`, `x = x.cuda()`) lies in other memory than the loader's. A batch that
    is written into behind its move counts as none: out of page-locked memory, the copy may still be under way.
    """
    parts = names_bound_by_target(loop.target)
    moved = False
    for statement in loop.body:
        inside = list(walk(statement))
        for node in inside:
            if isinstance(node, ast.comprehension) and _is_part(node.iter, parts):
                parts |= names_bound_by_target(node.target)
        moved = moved or any(isinstance(node, ast.Call) and _is_move(node, parts, scopes) for node in inside)
        if moved and any(_writes_into(node, parts) for node in inside):
            return False
        for node in inside:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    bound = names_bound_by_target(target)
                    parts = parts | bound if _is_part(node.value, parts) else parts - bound
    return moved


def _writes_into(node: ast.AST, parts: set[str]) -> bool:
    """`x += 1`, `x[0] = 0`, `x.clamp_(0, 1)`, `torch.neg(x, out=x)`."""
    match node:
        case ast.AugAssign(target=target):
            return _is_part(target, parts)
        case ast.Subscript(ctx=ast.Store()):
            return _is_part(node.value, parts)
        case ast.Call(func=ast.Attribute(value=receiver, attr=method)) if method.endswith("_"):
            return _is_part(receiver, parts)
        case ast.keyword(arg="out", value=value):
            return _is_part(value, parts)
    return False


def _is_part(node: ast.expr, parts: set[str]) -> bool:
    """Whether an expression is a batch or a part of it, in the memory that the loader has put it into."""
    match node:
        case ast.Name():
            return node.id in parts
        case ast.Subscript() | ast.Attribute():
            return _is_part(node.value, parts)
        case ast.Tuple() | ast.List():
            return all(_is_part(one, parts) for one in node.elts)
        case ast.Call(func=ast.Attribute() as method) if method.attr in _SAME_MEMORY:
            return _is_part(method.value, parts)
        case ast.Call(args=[given]) if last_name(node) == "Variable":
            return _is_part(given, parts)
    return False


def _is_move(call: ast.Call, parts: set[str], scopes: Scopes) -> bool:
    if not isinstance(call.func, ast.Attribute) or not _is_part(call.func.value, parts):
        return False
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    if not given:
        return call.func.attr == "cuda"
    return call.func.attr in ("to", "cuda") and _may_be_current_card(given[0], scopes)


def _may_be_current_card(node: ast.expr, scopes: Scopes | None) -> bool:
    """`device`, `"cuda"`, `torch.device("cuda")`, `0`: neither `"cpu"`, nor the number of the process.

    Without `scopes`, a name is taken at its word.
    """
    match node:
        case ast.Constant():
            return node.value in ("cuda", "cuda:0", 0)
        case ast.Call():
            return last_name(node) == "device" and bool(node.args) and _may_be_current_card(node.args[0], scopes)
        case ast.IfExp():
            return any(_may_be_current_card(one, scopes) for one in (node.body, node.orelse))
        case ast.Name() if scopes is not None and (variable := scopes.variable(node)) is not None:
            values = [found[0] for binding in variable.bindings if (found := scopes.assigned(binding)) is not None]
            if values:
                return any(_may_be_current_card(value, None) for value in values)
    return bool(_DEVICE.search(path_of(node) or ""))
