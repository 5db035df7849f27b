"""The calls of a file that run networks, and the backwards that go through them: what lifting asks of a trace.

Rewriting in place, a backward becomes one of the manager's, and networks run where they ran. So these events are not
found out again from the new text: they move on with their calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from oomfix.script import Script
from oomfix.script.facts.trace import Loop


class Run(NamedTuple):
    """A call that runs a network, on one way through the script.

    Attributes:
        node: the call.
        origin: its number.
        path: what is called; None for what has no name.
        direct: it calls the network or its `forward`, not another method.
        trains: it runs the network itself, and a graph of it is recorded for certain.
        may_record_graph: a graph may be recorded.
        loops: the loops around it, through the calls that led to it.
    """

    node: ast.Call
    origin: int
    path: str | None
    direct: bool
    trains: bool
    may_record_graph: bool
    loops: tuple[Loop, ...]


class Differentiated(NamedTuple):
    """A backward, on one way through the script.

    Attributes:
        node: the call.
        order: its place in program order.
        origins: the numbers of the runs that it goes through, among others.
        loops: the loops around it, through the calls that led to it.
    """

    node: ast.Call
    order: int
    origins: frozenset[int]
    loops: tuple[Loop, ...]


class Events(NamedTuple):
    """What runs networks and what goes back through them, in program order.

    Attributes:
        runs: by their numbers.
        backwards: the backwards.
    """

    runs: dict[int, Run]
    backwards: list[Differentiated]

    @classmethod
    def of(cls, script: Script) -> Events:
        """Those of a script, which is followed for them."""
        runs = {
            origin: Run(
                one.node,
                origin,
                one.path,
                one.direct,
                one.records_graph and script.is_forward_of_network(one),
                one.may_record_graph,
                one.site.loops,
            )
            for origin, one in script.trace.forwards.items()
        }
        backwards = [Differentiated(one.node, one.order, one.origins, one.site.loops) for one in script.backwards]
        return cls(runs, backwards)

    @property
    def running(self) -> set[ast.Call]:
        """The calls that run networks."""
        return {run.node for run in self.runs.values()}

    def origins_of(self, statement: ast.stmt) -> set[int]:
        """The numbers of the runs that a statement goes back through, where it is a backward."""
        called = statement.value if isinstance(statement, ast.Expr) else None
        return {origin for one in self.backwards if one.node is called for origin in one.origins}

    def moved(
        self, unchanged: Callable[[ast.Call], ast.Call | None], counterpart: Callable[[ast.Call], ast.Call | None]
    ) -> Events | None:
        """The same events in another text; None where one of them is not there.

        Args:
            unchanged: the call there that is written as a given one was.
            counterpart: the call there in the place of a given one.
        """
        calls = {one.node: counterpart(one.node) for one in self.backwards}
        calls |= {call: unchanged(call) for call in self.running}
        there = {call: other for call, other in calls.items() if other is not None}
        if len(there) < len(calls):
            return None
        runs = {origin: run._replace(node=there[run.node]) for origin, run in self.runs.items()}
        return Events(runs, [one._replace(node=there[one.node]) for one in self.backwards])
