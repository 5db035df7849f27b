"""Names for what a rewrite adds to a file, which must not mean anything there yet."""

from __future__ import annotations

import ast
import builtins

from oomfix.rewrite.dataflow.liveness import names_bound
from oomfix.script import Script

_BINDING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias, ast.ExceptHandler),
    *(ast.MatchAs, ast.MatchStar, ast.MatchMapping),
)


class FreeNames:
    """Names that are free in a whole file: nothing binds or reads them anywhere.

    Args:
        script: the file.
    """

    def __init__(self, script: Script) -> None:
        nodes = script.imports.nodes
        self._taken = set(dir(builtins))
        self._taken.update(node.id for node in nodes.of(ast.Name))
        self._taken.update(node.arg for node in nodes.of(ast.arg))
        self._taken.update(name for node in nodes.of(ast.Global) for name in node.names)
        self._taken.update(name for node in nodes.of(ast.Nonlocal) for name in node.names)
        methods = {method for owner in nodes.of(ast.ClassDef) for method in owner.body}
        for kind in _BINDING:
            self._taken.update(name for node in nodes.of(kind) if node not in methods for name in names_bound(node))

    def one_of(self, *wanted: str) -> str:
        """The first of these names that is free, else the last with a number."""
        for name in wanted:
            if name not in self._taken:
                return name
        number = 2
        while f"{wanted[-1]}_{number}" in self._taken:
            number += 1
        return f"{wanted[-1]}_{number}"
