"""Networks of a file that give the same to the bit when they run again: they draw nothing, and keep nothing."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound
from oomfix.rewrite.facts.steady_networks import SteadyNetworks
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_KEEPING = Pattern(r"[bB]atch_?[nN]orm|[iI]nstance_?[nN]orm|[sS]pectral|[wW]eight_?[nN]orm|[lL]azy|[bB]uffer|hook")
"""Layers and functions that count, average or change something each time they run."""

_ACTIVATIONS = Pattern(r"LU6?$|^Hard|^hard|lu6?_?$|Mish|mish|threshold", re.IGNORECASE)
"""What may work in place, by an argument, on what the network was given."""


class StatelessNetworks(SteadyNetworks):
    """Says of networks, by path, whether they draw and keep nothing, in whatever mode they are."""

    def gives_the_same_again(self, path: str | None) -> bool:
        """Whether a network may run twice on the same inputs, and nothing tells that from one run."""
        return self.draws_nothing(path)

    def _is_steady(self, call: ast.Call, inside: set[str]) -> bool:
        name = last_name(call)
        given = [*call.args, *(one.value for one in call.keywords if one.arg == "inplace")]
        in_place = _ACTIVATIONS.search(name) and any(isinstance(one, ast.Constant) and one.value for one in given)
        is_plain = not _KEEPING.search(name) and not in_place and (not name.endswith("_") or name.endswith("__"))
        of_weights = "init." in ast.unparse(call.func)
        return (is_plain or of_weights) and super()._is_steady(call, inside)

    def _is_steady_function(self, function: FunctionNode) -> bool:
        return (function.name == "__init__" or not _keeps(function)) and super()._is_steady_function(function)


def _keeps(function: FunctionNode) -> bool:
    """Whether a function changes what is not its own, `self.calls += 1`, or asks for the mode of its network."""
    own = names_bound(*function.body)
    changed = {path for statement in function.body for path in changed_paths(statement)}
    return any(path.split(".")[0] not in own for path in changed) or any(
        isinstance(node, ast.Global | ast.Nonlocal) or (isinstance(node, ast.Attribute) and node.attr == "training")
        for node in walk(function)
    )
