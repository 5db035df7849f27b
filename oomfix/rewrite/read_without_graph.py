"""What has no graph: names that are read without theirs, `(returns - values).detach()`, and constants."""

from __future__ import annotations

import ast

from oomfix.rewrite.blocks import Blocks
from oomfix.script.names import path_of
from oomfix.script.torch_facts import TORCH_GRAPH_FREE

_WITHOUT_GRAPH = frozenset("detach data item shape size device dtype".split())
_LIBRARIES = ("torch.", "F.")
_MOVES = frozenset({"to", "cuda", "type", "type_as"})


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
    """`valid = torch.ones(len(x), 1).to(device)`."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        value = value.func.value
    if not isinstance(value, ast.Call) or any(keyword.arg == "requires_grad" for keyword in value.keywords):
        return False
    module, _, name = (path_of(value.func) or "").rpartition(".")
    return module == "torch" and name.removesuffix("_like") in TORCH_GRAPH_FREE
