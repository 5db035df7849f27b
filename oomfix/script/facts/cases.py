"""What a name is told apart by: the texts and constants that it is compared with, and that calls give for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import Scope
from oomfix.script.syntax.parameters import bind_call


def compared_texts(test: ast.Compare) -> list[str]:
    """The texts that a comparison tells apart: `phase == "train"`, `phase in ("train", "val")`."""
    return [
        part.value for part in _compared_with(test) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def compared_constants(test: ast.Compare) -> set[str]:
    """The names of the constants that a comparison tells apart: `mode == TRAIN`."""
    return {part.id for part in _compared_with(test) if isinstance(part, ast.Name) and part.id.isupper()}


def _compared_with(test: ast.Compare) -> list[ast.expr]:
    """The right side of a comparison, one by one where it lists several."""
    right = test.comparators[0]
    return right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]


def given_for(parameters: set[str], nodes: list[tuple[ast.AST, Scope]]) -> Iterator[str]:
    """The constants that calls give for parameters of some names: `EVAL` in `run(loader, mode=EVAL)`.

    `MODE` for `mode` is a setting of the whole script, and no case.
    """
    functions = {node.name: node.args for node, _ in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for call in (node for node, _ in nodes if isinstance(node, ast.Call)):
        given = [(keyword.arg, keyword.value) for keyword in call.keywords]
        if (called := functions.get(path_of(call.func) or "")) is not None:
            given += [(parameter.arg, value) for parameter, value in bind_call(call, called).given]
        for name, value in given:
            if name in parameters and isinstance(value, ast.Name) and value.id.isupper() and value.id != name.upper():
                yield value.id
