"""Scripts that ask what a loss leaves for its graph, which a rewritten loss has none of."""

from __future__ import annotations

import ast

from oomfix.rewrite.lift import CannotLift, Lift
from oomfix.rewrite.liveness import names_bound, nodes_of_scope_body
from oomfix.script.carried_leaves import carried_from_leaves
from oomfix.script.nodes import walk

_OF_THE_GRAPH = frozenset({"grad_fn", "requires_grad", "is_leaf"})


def asks_for_graph(statement: ast.stmt) -> bool:
    """Whether a statement may ask what it reads for its graph."""
    return any(isinstance(node, ast.Attribute) and node.attr in _OF_THE_GRAPH for node in walk(statement))


def check_graphs_not_asked(lift: Lift) -> None:
    """Whether nothing asks for the graph of what a slice gives, behind it or in the next iteration.

    `assert loss.requires_grad` does.

    Raises:
        CannotLift: something does; says where.
    """
    _check_not_carried(lift)
    given = {*lift.outputs, lift.loss}
    # ahead of the slice, the loop reads what its last iteration has left
    first = min(one.lineno for one in (lift.site.iteration, lift.site.block[0]) if one is not None)
    moved = {id(node) for statement in lift.lifted for node in walk(statement)}
    for node in nodes_of_scope_body(lift.site.scope):
        if not isinstance(node, ast.Attribute) or node.attr not in _OF_THE_GRAPH or id(node) in moved:
            continue
        asked = isinstance(node.value, ast.Name) and node.value.id in given and isinstance(node.ctx, ast.Load)
        if asked and node.lineno >= first:
            raise CannotLift(f"line {node.lineno} reads `{ast.unparse(node)}`, and the call leaves no graph")


def _check_not_carried(lift: Lift) -> None:
    """Whether no loss goes back to a leaf through what an earlier round of the slice has computed from it.

    `x = x + delta`, of `Adam([delta])`.
    """
    if lift.site.iteration is None:
        return
    carried = carried_from_leaves(lift.site.iteration, nodes_of_scope_body(lift.site.scope))
    bound = {name for statement in lift.lifted for name in names_bound(statement)}
    if again := carried & bound & {*lift.inputs}:
        raise CannotLift(f"{min(again)} goes on into the loss of the next iteration, with its graph")
