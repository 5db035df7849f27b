"""Loops that take the rows of a batch in turn and hand a state from row to row: such a batch is one sequence."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import Liveness, names_bound, names_bound_by_target, names_read, nodes_of_scope
from oomfix.rewrite.facts.lift import Lift
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import arguments_of

_IN_TURN = frozenset({"zip", "enumerate", "reversed", "tqdm", "trange"})


def why_in_turn(lift: Lift, liveness: Liveness, runs_forward: Callable[[ast.AST], bool]) -> str | None:
    """Why the rows of a slice's inputs cannot be told apart, or None.

    A few rows of a fresh network often hide it: its first hidden states are all but zero.

    Args:
        lift: the slice with its inputs.
        liveness: of the scope it stands in.
        runs_forward: whether a node runs a network.
    """
    made: set[str] = set()
    for statement in lift.lifted:
        for loop in nodes_of_scope(statement):
            if isinstance(loop, ast.For) and _takes_rows(loop, set(lift.inputs) - made):
                carried = sorted(_carried(loop, liveness) & _given_to_networks(loop, runs_forward))
                if carried:
                    return f"line {loop.lineno} takes rows in turn and hands `{carried[0]}` on from each to the next"
        made |= names_bound(statement)
    return None


def _takes_rows(loop: ast.For, inputs: set[str]) -> bool:
    """Whether a loop goes through the first dimension of an input: `for row in x`, `for i in ...: x[i]`."""
    if any(isinstance(given, ast.Name) and given.id in inputs for given in _iterated(loop.iter)):
        return True
    counts = names_bound_by_target(loop.target)
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in inputs
        and _asks_for_a_row(node.slice, counts)
        for node in nodes_of_scope(*loop.body)
    )


def _iterated(node: ast.expr) -> Iterator[ast.expr]:
    """What a loop goes through, inside of `zip`, `enumerate` and the like."""
    if isinstance(node, ast.Call) and last_name(node) in _IN_TURN:
        for argument in node.args:
            yield from _iterated(argument)
    else:
        yield node


def _asks_for_a_row(index: ast.expr, counts: set[str]) -> bool:
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    plain = isinstance(first, ast.Name | ast.BinOp)
    return plain and bool(names_read(first) & counts)


def _carried(loop: ast.For, liveness: Liveness) -> set[str]:
    """The names that a round reads as the round before has left them."""
    bound = names_bound(*loop.body)
    return liveness.before(loop.body, set()) & bound - names_bound_by_target(loop.target)


def _given_to_networks(loop: ast.For, runs_forward: Callable[[ast.AST], bool]) -> set[str]:
    """The names in the arguments of what runs a network in a loop."""
    calls = calls_in(*loop.body)
    return {name for call in calls if runs_forward(call) for name in names_read(*arguments_of(call))}
