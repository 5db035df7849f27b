"""The calls that run in a statement, and their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import nodes_of_scope
from oomfix.script.syntax.names import last_name, path_of


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """The calls that run when nodes do, in their own scope."""
    return (child for child in nodes_of_scope(*nodes) if isinstance(child, ast.Call))


def called_name(node: ast.expr) -> str:
    """The last name of what an expression calls; "" where it is no call."""
    return last_name(node) if isinstance(node, ast.Call) else ""


def only_calls(statement: ast.stmt, path: str) -> bool:
    """Whether a statement is a call of this path and nothing else: `memory.backward(loss)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and path_of(call.func) == path
