"""The sides of decisions that are only taken where there is no GPU."""

from __future__ import annotations

import ast
from functools import cached_property

from oomfix.script.analyses.switches import bindings, outcome_of
from oomfix.script.facts.trace import Site
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import path_of


class WithoutGpu:
    """What runs only where there is no GPU: the `else` of `if torch.cuda.is_available()`.

    Args:
        imports: what the names of the file refer to.
    """

    def __init__(self, imports: Imports) -> None:
        self._imports = imports

    def leads_to(self, site: Site) -> bool:
        """Whether a condition on the way to a site never comes out like that where there is a GPU."""
        return any(outcome_of(guard.test, self._with_gpu) is (not guard.value) for guard in site.guards_within(None))

    def _with_gpu(self, test: ast.expr) -> bool | None:
        """What a part of a test is where there is a GPU."""
        return True if test in self._asked or path_of(test) in self._answers else None

    @cached_property
    def _asked(self) -> set[ast.Call]:
        return set(self._imports.calls("torch.cuda.is_available"))

    @cached_property
    def _answers(self) -> set[str]:
        """`use_cuda = torch.cuda.is_available()`: what holds the answer, and is never anything else."""
        nodes = self._imports.nodes
        answered = [node.targets[0] for node in nodes.of(ast.Assign) if node.value in self._asked]
        bound = list(bindings(nodes))
        return {path for node in answered if (path := path_of(node)) is not None and bound.count(path) == 1}
