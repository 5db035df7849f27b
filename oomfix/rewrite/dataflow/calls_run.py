"""The calls that run in a node: they stand there, or in a function of the file that is called there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.script.syntax.nodes import walk


class CallsRun:
    """Tells which calls run in a node of a file.

    Args:
        functions: those of the file.
    """

    def __init__(self, functions: FunctionsCalled) -> None:
        self._functions = functions
        self._known: dict[FunctionNode, tuple[list[ast.Call], list[FunctionNode]]] = {}

    def by(self, node: ast.AST) -> Iterator[ast.Call]:
        """The calls that stand in a node, then those in the functions that it calls, each function once."""
        own = _calls_within([node])
        yield from own
        yield from self.in_functions(own)

    def in_functions(self, calls: list[ast.Call]) -> Iterator[ast.Call]:
        """The calls in the functions of the file that some calls run, and in those that these run."""
        return (call for function in self.functions(calls) for call in self._known[function][0])

    def functions(self, calls: list[ast.Call]) -> list[FunctionNode]:
        """The functions of the file that some calls run, and those that these run."""
        reached = dict.fromkeys(function for call in calls for function in self._functions.by(call))
        waiting = list(reached)
        for function in waiting:
            if function not in self._known:
                inside = _calls_within(function.body)
                self._known[function] = inside, [called for call in inside for called in self._functions.by(call)]
            called = dict.fromkeys(self._known[function][1])
            waiting += [other for other in called if other not in reached]
            reached |= called
        return waiting


def _calls_within(nodes: list[ast.AST] | list[ast.stmt]) -> list[ast.Call]:
    return [child for child in walk(*nodes) if isinstance(child, ast.Call)]
