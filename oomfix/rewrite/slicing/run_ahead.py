"""Networks that run ahead of a loss for a later one: their statements stay where they are, and are given to both.

The samples of a generator, of which its discriminator sees copies without their graph first, also in a loop of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.rewrite.facts.lift import Site
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.nodes import encloses, walk

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class RunAhead:
    """Finds what runs networks ahead of a backward which a later one goes through.

    Args:
        reading: a script whose backwards are the manager's.
    """

    def __init__(self, reading: Reading) -> None:
        self._events, self._blocks, self._calls_run = reading.events, reading.blocks, reading.calls_run

    def of(self, calls: Sequence[ast.Call]) -> set[ast.stmt]:
        """The statements of an iteration ahead of a backward that run networks which a later one goes through.

        Where a loop of its own runs an earlier backward, that is the loop.

        Args:
            calls: the backwards of a loop, in the order of the text.
        """
        found: set[ast.stmt] = set()
        for number, call in enumerate(calls):
            ends = [self._blocks.statement_of(other) for other in calls[:number]]
            for one in self._around(call):
                found |= self._ahead(one, call, [end for end in ends if end in self._blocks.block_of(one)])
            for loop in self._loops_with_backwards(call):
                found |= self._ahead(self._blocks.statement_of(call), call, [loop])
        for call in calls:
            for later in self._behind_the_loop_of(call):
                found |= self._ahead(self._blocks.statement_of(call), later, [self._blocks.statement_of(call)])
        return found

    def first_line_of(self, calls: Sequence[ast.Call]) -> int | None:
        """The first line ahead of a backward that itself calls a network which a later one goes through."""
        running = self._events.running
        return min((one.lineno for one in self.of(calls) if not running.isdisjoint(walk(one))), default=None)

    def _ahead(self, statement: ast.stmt, later: ast.Call, ends: Sequence[ast.stmt]) -> set[ast.stmt]:
        """What runs the networks of a later backward beside a statement, up to the last of some ends (with a loop)."""
        block = self._blocks.block_of(statement)
        last = max((block.index(end) + isinstance(end, _LOOPS) for end in ends), default=0)
        through = {origin for one in self._events.backwards if one.node is later for origin in one.origins}
        run = {run.node for origin, run in self._events.runs.items() if origin in through}
        return {one for one in block[:last] if not run.isdisjoint(self._calls_run.by(one))}

    def _around(self, call: ast.Call) -> Iterator[ast.stmt]:
        """The statement of a backward and those around it, up to its loop."""
        statement = self._blocks.statement_of(call)
        around = takewhile(lambda one: not isinstance(one, (*_LOOPS, FunctionNode)), self._blocks.ancestors(statement))
        yield from (statement, *(one for one in around if isinstance(one, ast.stmt)))

    def _loops_with_backwards(self, call: ast.Call) -> Iterator[ast.stmt]:
        """The loops ahead of a backward in its block in which others run."""
        statement = self._blocks.statement_of(call)
        others = [self._blocks.statement_of(other.node) for other in self._events.backwards]
        block = self._blocks.block_of(statement)
        loops = (one for one in block[: block.index(statement)] if isinstance(one, _LOOPS))
        yield from (loop for loop in loops if any(encloses(loop, other) for other in others))

    def _behind_the_loop_of(self, call: ast.Call) -> Iterator[ast.Call]:
        """The backwards that stand behind the loop of one, in the same scope."""
        loop = self._blocks.loop_of(call)
        for other in {one.node: None for one in self._events.backwards}:
            same = self._blocks.scope_of(other) is self._blocks.scope_of(call)
            if loop is not None and same and other.lineno > (loop.end_lineno or loop.lineno):
                yield other


def behind(outside: Collection[ast.stmt], site: Site) -> Site:
    """The site of a slice that may begin behind statements which stay where they are."""
    block = site.block
    places = (index for index, one in enumerate(block[: block.index(site.end)]) if one in outside)
    return replace(site, first=max((index + 1 for index in places), default=site.first))
