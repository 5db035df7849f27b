"""How a statement may leave the block it stands in."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.liveness import FunctionNode


def leaves(node: ast.stmt) -> str | None:
    """The keyword by which a statement may leave the block it stands in; None where it always runs to its end."""
    return _leaving(node, in_loop=False)


def _leaving(node: ast.AST, in_loop: bool) -> str | None:
    if isinstance(node, ast.Return):
        return "return"
    if isinstance(node, ast.Break | ast.Continue):
        return None if in_loop else type(node).__name__.lower()
    if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.AsyncFor | ast.AsyncWith):
        return "await" if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) else "yield"
    if isinstance(node, FunctionNode | ast.Lambda | ast.ClassDef):
        return None
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                inner = isinstance(node, ast.For | ast.While) and field == "body"
                if (found := _leaving(child, in_loop or inner)) is not None:
                    return found
    return None
