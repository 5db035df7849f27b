"""Whether a loop moves its batches to the GPU as its loader gives them."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.effects import last_name
from oomfix.rewrite.liveness import names_bound_by_target
from oomfix.rewrite.origins import Origin, Origins, parameter_for
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

_DEVICE = re.compile(r"device|cuda", re.IGNORECASE)
_SAME_MEMORY = frozenset("view squeeze unsqueeze flatten items values".split())
"""Methods whose result lies where their object lies."""
_MOST_CALLS = 3
_MOST_NAMES = 4

Block = ast.For | ast.FunctionDef | ast.AsyncFunctionDef


def moves_batches(loop: ast.For, origins: Origins) -> bool:
    """Whether a part of a batch is moved to the GPU in a loop, or in a function of the file that it is given to.

    What is computed of it ahead (`x.float().cuda()`) lies in other memory than the loader's.
    """
    return _moves(loop, names_bound_by_target(loop.target), origins, _MOST_CALLS)


def _moves(block: Block, names: set[str], origins: Origins, calls: int) -> bool:
    nodes = [node for statement in block.body for node in walk(statement)]
    parts = _parts(nodes, names)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if _is_move(node, parts, origins) and not _is_computed(node, parts, nodes, origins):
            return True
        function = origins.function_of(node) if calls else None
        for argument in [] if function is None else [*node.args, *(keyword.value for keyword in node.keywords)]:
            if function is not None and _is_part(argument, parts):
                parameter = parameter_for(node, argument, function)
                if parameter is not None and _moves(function, {parameter.arg}, origins, calls - 1):
                    return True
    return False


def _parts(nodes: list[ast.AST], names: set[str]) -> set[str]:
    """The names of a batch and of its parts."""
    parts: set[str] = set()
    more = set(names)
    while more:
        parts |= more
        more = set()
        for node in nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    more |= _parts_bound(target, node.value, parts)
            elif isinstance(node, ast.comprehension) and _is_part(node.iter, parts):
                more |= names_bound_by_target(node.target)
        more -= parts
    return parts


def _parts_bound(target: ast.expr, value: ast.expr, parts: set[str]) -> set[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return {
            name for one, other in zip(target.elts, value.elts, strict=True) for name in _parts_bound(one, other, parts)
        }
    return names_bound_by_target(target) if _is_part(value, parts) else set()


def _is_part(node: ast.expr, parts: set[str]) -> bool:
    """Whether an expression is a batch or a part of it, in the memory that the loader has put it into."""
    match node:
        case ast.Name():
            return node.id in parts
        case ast.Subscript() | ast.Attribute():
            return _is_part(node.value, parts)
        case ast.Call(func=ast.Attribute() as method) if method.attr in _SAME_MEMORY:
            return _is_part(method.value, parts)
        case ast.Call(args=[given]) if last_name(node) == "Variable":
            return _is_part(given, parts)
    return False


def _is_move(call: ast.Call, parts: set[str], origins: Origins) -> bool:
    if not isinstance(call.func, ast.Attribute) or not _is_part(call.func.value, parts):
        return False
    where = call.args[:1] or [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    if call.func.attr == "cuda":
        return not where or _may_be_current_card(where[0], origins)
    return call.func.attr == "to" and bool(where) and _may_be_current_card(where[0], origins)


def _may_be_current_card(node: Origin, origins: Origins, known: int = _MOST_NAMES) -> bool:
    """`device`, `"cuda"`, `torch.device("cuda")`, `0`: neither `"cpu"`, nor the number of the process."""
    match node:
        case ast.Constant():
            return node.value in ("cuda", "cuda:0", 0)
        case ast.Call() if last_name(node) == "device" and node.args:
            return _may_be_current_card(node.args[0], origins, known)
        case ast.IfExp():
            return any(_may_be_current_card(one, origins, known) for one in (node.body, node.orelse))
        case ast.Name() | ast.Attribute() if not _DEVICE.search((path_of(node) or "").rsplit(".", 1)[-1]):
            return False
        case ast.Name(ctx=ast.Load()) if known:
            variable = origins.scopes.variable(node)
            found = None if variable is None else origins.of_variable(variable)
            return not found or any(_may_be_current_card(one, origins, known - 1) for one in found)
        case ast.Attribute() if known and (found := origins.of_attribute(node)):
            return any(_may_be_current_card(one, origins, known - 1) for one in found)
    return True


def _is_computed(move: ast.Call, parts: set[str], nodes: list[ast.AST], origins: Origins) -> bool:
    """Whether what is moved was computed from the batch, under the name of the batch, on a line ahead."""
    assert isinstance(move.func, ast.Attribute)
    root: ast.expr = move.func.value
    while isinstance(root, ast.Subscript | ast.Attribute):
        root = root.value
    return any(
        isinstance(node, ast.Assign)
        and node.lineno < move.lineno
        and isinstance(root, ast.Name)
        and any(isinstance(target, ast.Name) and target.id == root.id for target in node.targets)
        and not _is_part(node.value, parts)
        and not (isinstance(node.value, ast.Call) and _is_move(node.value, parts, origins))
        for node in nodes
    )
