"""What statements that log change and see, so that they may run behind others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.changes import changed_paths, object_changed, paths_read
from oomfix.rewrite.dataflow.effects import draws_random_numbers, fetches
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import names_of_parameters

_DEEPEST = 4  # a list that visits its own parts has no end of paths


class LogEffects:
    """What statements change and see, in the functions of the file that they call too.

    Args:
        reading: the file.

    Attributes:
        functions: those of the file.
    """

    def __init__(self, reading: Reading) -> None:
        self.functions = reading.functions
        functions = reading.script.imports.nodes.functions
        self._forwards = [_Run(one, "self") for one in functions if one.name in ("forward", "__call__")]

    def are_all(self, statement: ast.stmt) -> bool:
        """Whether a statement does nothing else than to change something, which no draw or fetch has a part in."""
        if self.draws(statement):
            return False
        if isinstance(statement, ast.If):
            return all(map(self.are_all, (*statement.body, *statement.orelse)))
        if not isinstance(statement, ast.Expr):
            return isinstance(statement, ast.AugAssign)
        call = statement.value
        if not isinstance(call, ast.Call):
            return False
        return isinstance(call.func, ast.Attribute) or called_name(call) == "print" or bool(self.functions.by(call))

    def draws(self, statement: ast.stmt) -> bool:
        """Whether a statement draws random numbers or fetches a batch."""
        return any(draws_random_numbers(one) or fetches(one) for one in (statement, *self._run_inside(statement)))

    def changed(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement changes, and that functions change which it calls."""
        found = changed_paths(statement)
        for run in self._run_by(statement):
            own = _bound_in(run.function)
            for inner in run.function.body:
                paths = changed_paths(inner) | {name for name in names_bound(inner) if name not in own}
                found |= {run.outside(path) for path in paths if path.split(".")[0] not in own}
        return found

    def read(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement reads, and that functions read which it calls, or which networks run."""
        return self.asked(statement).union(*map(_read_in, self._networks_of(statement)))

    def asked(self, statement: ast.stmt) -> set[str]:
        """The paths that a statement reads that runs no network, and that functions read which it calls."""
        return paths_read(statement).union(*map(_read_in, self._run_by(statement)))

    def left(self, statement: ast.stmt) -> set[str]:
        """The attributes that functions write which a statement calls, or that networks and losses leave behind."""
        return self._written((*self._run_by(statement), *self._networks_of(statement)))

    def may_leave_for(self, log: ast.stmt, statements: Iterable[ast.stmt]) -> bool:
        """Whether functions that a log calls write attributes that statements read, of whatever object."""
        written = self._written(self._run_by(log))
        read = (path for one in statements for path in self.read(one)) if written else ()
        return any(written.intersection(path.split(".")[1:]) for path in read)

    @staticmethod
    def _written(runs: Iterable[_Run]) -> set[str]:
        inside = [one for run in runs for one in run.function.body]
        stored = (node for node in walk(*inside) if isinstance(node, ast.Attribute))
        found = {node.attr for node in stored if isinstance(node.ctx, ast.Store)}
        return found | {path.split(".")[1] for one in inside for path in changed_paths(one) if "." in path}

    def _networks_of(self, statement: ast.stmt) -> list[_Run]:
        """What networks and losses of the file run where a statement may call them."""
        return self._forwards if any(isinstance(node, ast.Call) for node in walk(statement)) else []

    def _run_inside(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements of the functions that a statement calls."""
        return (one for run in self._run_by(statement) for one in run.function.body)

    def _run_by(self, statement: ast.stmt) -> list[_Run]:
        found: dict[_Run, None] = {}
        waiting: list[tuple[ast.AST, str]] = [(statement, "self")]
        for node, owner in waiting:
            own = _bound_in(node) if isinstance(node, FunctionNode) else set()
            for call in (child for child in walk(node) if isinstance(child, ast.Call)):
                runs = [_Run(one, _owner_of(call, owner, own)) for one in self.functions.by(call)]
                new = [run for run in runs if run not in found]
                found |= dict.fromkeys(new)
                waiting += [(run.function, run.owner) for run in new]
        return list(found)


class _Run(NamedTuple):
    """A function of the file that runs.

    Attributes:
        function: the function.
        owner: the path of the object that it is a method of, `self` where that is not known.
    """

    function: FunctionNode
    owner: str

    def outside(self, path: str) -> str:
        """The path of something inside, seen from the outside: `meters.sum` for `self.sum`."""
        return self.owner + path.removeprefix("self") if path == "self" or path.startswith("self.") else path


def _owner_of(call: ast.Call, owner: str, own: set[str]) -> str:
    """The path of what a call is a method of, seen from outside of a function.

    Args:
        call: the call.
        owner: that of the function.
        own: the names that mean something else outside.
    """
    if not isinstance(call.func, ast.Attribute):
        return owner
    path = object_changed(call.func.value)
    if path == "self" or path.startswith("self."):
        path = owner + path.removeprefix("self")
    elif not path or path.split(".")[0] in own:
        return "self"
    return path if path.count(".") < _DEEPEST else "self"


def _read_in(run: _Run) -> set[str]:
    """The paths that a function reads of what is not its own."""
    own = _bound_in(run.function)
    paths = (path for path in paths_read(*run.function.body) if path.split(".")[0] not in own)
    return {run.outside(path) for path in paths}


def _bound_in(function: FunctionNode) -> set[str]:
    """The names that are a function's own, but for that of its object."""
    outer = (node for node in walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
    bound = names_bound(*function.body)
    return (bound | names_of_parameters(function.args)) - {name for node in outer for name in node.names} - {"self"}
