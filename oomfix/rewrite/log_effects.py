"""What statements that log change and see, so that they may run behind others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.calls import called_name
from oomfix.rewrite.changes import changed_paths, paths_read
from oomfix.rewrite.effects import draws_random_numbers, fetches
from oomfix.rewrite.liveness import FunctionNode, names_bound
from oomfix.rewrite.reading import Reading
from oomfix.script.nodes import walk
from oomfix.script.parameters import names_of_parameters


class LogEffects:
    """What statements change and see, in the functions of the file that they call too.

    Args:
        reading: the file.

    Attributes:
        functions: those of the file.
    """

    def __init__(self, reading: Reading) -> None:
        self.functions = reading.functions
        self._forwards = [one for one in reading.script.imports.nodes.functions if one.name in ("forward", "__call__")]

    def are_all(self, statement: ast.stmt) -> bool:
        """Whether a statement does nothing else than to change something, which no draw or fetch has a part in."""
        if any(draws_random_numbers(one) or fetches(one) for one in (statement, *self._run_inside(statement))):
            return False
        if isinstance(statement, ast.If):
            return all(map(self.are_all, (*statement.body, *statement.orelse)))
        if not isinstance(statement, ast.Expr):
            return isinstance(statement, ast.AugAssign)
        call = statement.value
        if not isinstance(call, ast.Call):
            return False
        return isinstance(call.func, ast.Attribute) or called_name(call) == "print" or bool(self.functions.by(call))

    def changed(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement changes, and that functions change which it calls."""
        found = changed_paths(statement)
        for function in self._run_by(statement):
            own = _bound_in(function)
            for inner in function.body:
                paths = changed_paths(inner) | {name for name in names_bound(inner) if name not in own}
                found |= {path for path in paths if path.split(".")[0] not in own}
        return found

    def read(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement reads, and that functions read which it calls, or which networks run."""
        return self.asked(statement).union(*map(_read_in, self._networks_of(statement)))

    def asked(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement reads that runs no network, and that functions read which it calls."""
        return paths_read(statement).union(*map(_read_in, self._run_by(statement)))

    def left(self, statement: ast.stmt) -> set[str]:
        """The attributes that functions write which a statement calls, or that networks and losses leave behind."""
        functions = (*self._run_by(statement), *self._networks_of(statement))
        inside = [one for function in functions for one in function.body]
        stored = (node for one in inside for node in walk(one) if isinstance(node, ast.Attribute))
        found = {node.attr for node in stored if isinstance(node.ctx, ast.Store)}
        return found | {path.split(".")[1] for one in inside for path in changed_paths(one) if "." in path}

    def _networks_of(self, statement: ast.stmt) -> list[FunctionNode]:
        """What networks and losses of the file run where a statement may call them."""
        return self._forwards if any(isinstance(node, ast.Call) for node in walk(statement)) else []

    def _run_inside(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements of the functions that a statement calls."""
        return (one for function in self._run_by(statement) for one in function.body)

    def _run_by(self, statement: ast.stmt) -> list[FunctionNode]:
        found: list[FunctionNode] = []
        waiting: list[ast.AST] = [statement]
        for node in waiting:
            calls = (child for child in walk(node) if isinstance(child, ast.Call))
            new = dict.fromkeys(one for call in calls for one in self.functions.by(call) if one not in found)
            found += new
            waiting += new
        return found


def _read_in(function: FunctionNode) -> set[str]:
    """The paths that a function reads of what is not its own."""
    own = _bound_in(function)
    return {path for one in function.body for path in paths_read(one) if path.split(".")[0] not in own}


def _bound_in(function: FunctionNode) -> set[str]:
    """The names that are a function's own, but for that of its object."""
    outer = (node for node in walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
    bound = {name for statement in function.body for name in names_bound(statement)}
    return (bound | names_of_parameters(function.args)) - {name for node in outer for name in node.names} - {"self"}
