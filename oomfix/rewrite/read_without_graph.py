"""Whether a name is read without the graph behind it: `fake.detach()`, `(returns - values).detach()`."""

from __future__ import annotations

import ast

from oomfix.rewrite.blocks import Blocks
from oomfix.script.names import path_of

_WITHOUT_GRAPH = frozenset("detach data item shape size device dtype".split())
_LIBRARIES = ("torch.", "F.")


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
