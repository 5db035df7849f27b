"""Whether statements may draw random numbers, as functions out of sight say by their names."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.steady_networks import SteadyNetworks
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of
from oomfix.script.syntax.patterns import Pattern

_MAY_DRAW = Pattern(r"rand|noise|noisy|sampl|mix|augment|shuffle|drop|jitter|perturb|mask|penalty", re.IGNORECASE)
"""How functions of other files are called that may draw random numbers."""


class MayDraw:
    """Whether a node may draw random numbers, as dropout does, and what is given a network or named so may.

    Networks do unless all of their layers are seen to draw none.

    Args:
        reading: the script.
        helpers: its functions.
    """

    def __init__(self, reading: Reading, helpers: Helpers) -> None:
        self._script, self._helpers, self._calls_run = reading.script, helpers, reading.calls_run
        self._paths_of: dict[ast.AST, list[str | None]] = {}
        for forward in reading.events.runs.values():
            self._paths_of.setdefault(forward.node, []).append(forward.path)
        self._paths = {path for paths in self._paths_of.values() for path in paths} - {None}

    @cached_property
    def _steady(self) -> SteadyNetworks:
        return SteadyNetworks(self._script)

    def networks_of(self, node: ast.AST) -> set[str | None]:
        """The paths of the networks that a node runs; None for one that has no name."""
        run = self._paths_of.keys() & set(self._calls_run.by(node))
        return {path for call in run for path in self._paths_of[call]}

    def __call__(self, node: ast.AST) -> bool:
        if self._helpers.draw_random_numbers(node):
            return True
        if not all(map(self._steady.draws_nothing, self.networks_of(node))):
            return True
        calls = list(calls_in(node))
        given = (path_of(one) for call in calls for one in arguments_of(call))
        return not self._paths.isdisjoint(given) or any(_MAY_DRAW.search(last_name(call)) for call in calls)
