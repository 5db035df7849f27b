"""What has no graph: names that are read without theirs, `(returns - values).detach()`, and constants."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.script.facts.torch_facts import TORCH_GRAPH_FREE
from oomfix.script.syntax.names import path_of

_WITHOUT_GRAPH = frozenset("detach data item shape size device dtype".split())
_LIBRARIES = ("torch.", "F.")
_MOVES = frozenset({"to", "cuda", "type", "type_as"})
_PASSING_GRAPHS_ON = frozenset({"as_tensor"})


def is_read_without_graph(name: ast.Name, blocks: Blocks) -> bool:
    """Whether nothing of a name but its value, or a part of that, goes on from where it is read.

    It may be part of a computation that is detached as a whole; one by a function of the script may do anything else.
    """
    node: ast.AST = name
    for parent in blocks.ancestors(name):
        match parent:
            case ast.Attribute(attr=attribute) if attribute in _WITHOUT_GRAPH:
                return True
            case ast.BinOp() | ast.UnaryOp() | ast.Attribute():
                pass
            case ast.Subscript(value=value) if value is node:
                pass
            case ast.Call(func=function) if function is node or (path_of(function) or "").startswith(_LIBRARIES):
                pass
            case _:
                return False
        node = parent
    return False


def makes_constant(statement: ast.stmt) -> bool:
    """`valid = torch.ones(len(x), 1).to(device)`, `z = Variable(torch.randn(8, 2))`, `z = torch.rand(8) / 0.5`."""
    return isinstance(statement, ast.Assign) and _is_constant(statement.value)


def _is_constant(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return True
        case ast.UnaryOp(operand=operand):
            return _is_constant(operand)
        case ast.BinOp(left=left, right=right):
            return _is_constant(left) and _is_constant(right)
        case ast.Call(func=ast.Attribute(value=moved, attr=method)) if method in _MOVES:
            return _is_constant(moved)
        case ast.Call(keywords=keywords) if not any(keyword.arg == "requires_grad" for keyword in keywords):
            module, _, name = (path_of(value.func) or "").rpartition(".")
            if name == "Variable" and len(value.args) == 1:
                return _is_constant(value.args[0])
            return module == "torch" and name.removesuffix("_like") in TORCH_GRAPH_FREE - _PASSING_GRAPHS_ON
    return False
