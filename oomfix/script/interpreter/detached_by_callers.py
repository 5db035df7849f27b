"""Functions of which all callers in the file take numbers: nothing goes back through what they return."""

from __future__ import annotations

import ast
from collections import Counter

from oomfix.script.facts.torch_facts import INTEGER_RESULTS, LEAVING_THE_GRAPH
from oomfix.script.syntax.names import last_name, receivers
from oomfix.script.syntax.nodes import Scope

_TAKING = LEAVING_THE_GRAPH | INTEGER_RESULTS


def always_taken_off(nodes: list[tuple[ast.AST, Scope]]) -> frozenset[str]:
    """The names of the functions and methods whose result is taken off the graph wherever the file mentions them.

    `agent.act(x).squeeze(0).detach()`, or `action = agent.act(x)` where `action.detach()` is all that is asked of it.
    """
    attributes = [node for node, _ in nodes if isinstance(node, ast.Attribute)]
    read = [(node, scope) for node, scope in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    taken: set[ast.expr] = set()
    for attribute in attributes:
        if attribute.attr in _TAKING:
            taken.update(receivers(attribute.value))
    loads = Counter((scope, node.id) for node, scope in read)
    taken_loads = Counter((scope, node.id) for node, scope in read if node in taken)
    for node, scope in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            key = (scope, node.targets[0].id)
            if 0 < loads[key] == taken_loads[key]:
                taken.add(node.value)
    mentions = Counter([*(node.attr for node in attributes), *(node.id for node, _ in read)])
    calls = Counter(last_name(node) for node in taken if isinstance(node, ast.Call))
    return frozenset(name for name, count in calls.items() if name and count == mentions[name])
