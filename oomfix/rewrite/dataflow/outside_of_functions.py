"""What functions of a file change and read of what is bound outside of them, where a statement calls them."""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomfix.rewrite.dataflow.changes import changed_paths, paths_read
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope, names_bound, names_declared
from oomfix.script.syntax.names import root_of
from oomfix.script.syntax.nodes import walk


class OutsideOfFunctions:
    """Says what calls change and read that is not among their arguments: globals, and names of functions around.

    What a method does to its own object is left out: a call shows that object.

    Args:
        functions: those of the file.
    """

    def __init__(self, functions: FunctionsCalled) -> None:
        self._functions = functions
        self._changed: dict[FunctionNode, set[str]] = {}
        self._read: dict[FunctionNode, set[str]] = {}

    def changed(self, statement: ast.stmt, scope: Scope) -> set[str]:
        """The paths that functions change which a statement calls, where those mean the same in a scope."""
        return self._all(statement, scope, self._changed, _changed_in)

    def read(self, statement: ast.stmt, scope: Scope) -> set[str]:
        """The paths that functions read which a statement calls, where those mean the same in a scope."""
        return self._all(statement, scope, self._read, paths_read)

    def given_to_parts(self, statement: ast.stmt) -> set[str]:
        """The attributes that functions set which a statement calls, on what their own object or another one holds.

        `self.trainer.active = False` in a callback: who else calls the trainer by what name is not known.
        """
        inside = walk(*self._functions.run_by(statement))
        stored = (node for node in inside if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        return {node.attr for node in stored if isinstance(node.value, ast.Attribute)}

    def _all(
        self,
        statement: ast.stmt,
        scope: Scope,
        known: dict[FunctionNode, set[str]],
        paths_in: Callable[..., set[str]],
    ) -> set[str]:
        found: set[str] = set()
        for function in self._functions.run_by(statement):
            if function not in known:
                own = _own_names(function)
                known[function] = {path for path in paths_in(*function.body) if root_of(path) not in own}
            found |= {path for path in known[function] if _means_the_same(root_of(path), function, scope)}
        return found


def _changed_in(*statements: ast.stmt) -> set[str]:
    return {path for one in statements for path in changed_paths(one) | names_bound(one)}


def _own_names(function: FunctionNode) -> set[str]:
    """The names that are a function's own, or belong to what is defined or repeated in it."""
    inside = list(walk(function))
    declared = names_declared(*function.body)
    declared.update(name for node in inside if isinstance(node, ast.Global) for name in node.names)
    bound = names_bound(*function.body)
    bound.update(node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return (bound - declared) | {node.arg for node in inside if isinstance(node, ast.arg)}


def _means_the_same(name: str, function: FunctionNode, scope: Scope) -> bool:
    """Whether a name that a function takes from around it is not a name of its own in a scope elsewhere."""
    if isinstance(scope, ast.Module) or any(node is function for node in walk(scope)):
        return True
    return name not in _own_names(scope)
