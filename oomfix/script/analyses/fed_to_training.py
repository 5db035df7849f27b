"""What a forward gives to training without a graph: targets, and the log probabilities of before an update."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from oomfix.script.analyses.acting import steps_of_environments
from oomfix.script.analyses.rounds import read_first
from oomfix.script.facts.trace import Forward, Trace
from oomfix.script.syntax.names import unpacked
from oomfix.script.syntax.nodes import children

_Located = ast.stmt | ast.Call
_NUMBERS = frozenset("item tolist shape size dim ndim numel device dtype".split())
"""What is asked of a tensor for a number: a best loss, and no target."""


def feeds_training(forward: Forward, nodes: Iterable[ast.AST], trace: Trace) -> bool:
    """Whether what is made of a forward's result is read by what trains after it.

    `old = policy(x).log_prob(a).detach()`, and updates that compare with it; `update(x, critic(x).detach())`.

    Args:
        forward: through which no backward goes.
        nodes: where its result may be used: those of its function, or of the loop around it.
        trace: what happens in the file.
    """
    located = [node for node in nodes if isinstance(node, _Located)]
    if any(steps_of_environments(located)):
        return False  # what acts runs without a graph, whatever is kept of it
    later = [node for node in located if node.lineno >= forward.node.lineno]
    loops = {loop for backward in trace.backwards for loop in backward.site.loops} - set(forward.site.loops)
    calls = {step for backward in trace.backwards for step in backward.site.way} - set(forward.site.way)
    calls |= {id(backward.node) for backward in trace.backwards if backward.is_grad_call}
    for node in later:
        if isinstance(node, ast.For | ast.While) and node in loops:
            if not _Made(forward.node, _ahead_of(node, later)).names.isdisjoint(read_first(node)):
                return True
        elif isinstance(node, ast.Call) and id(node) in calls:
            if _Made(forward.node, _ahead_of(node, later)).is_given_to(node):
                return True
    return False


def _ahead_of(node: _Located, nodes: list[_Located]) -> list[_Located]:
    return [other for other in nodes if other.lineno < node.lineno]


class _Made:
    """What holds a forward's result, or what was computed from it."""

    def __init__(self, result: ast.expr, nodes: Iterable[ast.AST]) -> None:
        self._result = result
        self.names: set[str] = set()
        bound = [pair for node in nodes for pair in _assigned(node)]
        while more := {name for target, value in bound if self._is_in(value) for name in _names(target)} - self.names:
            self.names |= more

    def is_given_to(self, call: ast.Call) -> bool:
        return any(map(self._is_in, [*call.args, *call.keywords]))

    def _is_in(self, node: ast.AST) -> bool:
        if node is self._result or (isinstance(node, ast.Name) and node.id in self.names):
            return True
        if isinstance(node, ast.Attribute) and node.attr in _NUMBERS:
            return False
        return any(map(self._is_in, children(node)))


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.Assign(targets, value):
            return [(target, value) for target in targets]
        case ast.AugAssign(target, _, value) | ast.AnnAssign(target, _, ast.expr() as value):
            return [(target, value)]
    return []


def _names(target: ast.expr) -> set[str]:
    return {part.id for part in unpacked(target) if isinstance(part, ast.Name)}
