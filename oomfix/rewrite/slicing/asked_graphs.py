"""Scripts that ask what a loss leaves for its graph, which a rewritten loss has none of."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomfix.rewrite.dataflow.liveness import names_bound, names_read, nodes_of_scope_body
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.script.analyses.carried_leaves import carried_from_leaves
from oomfix.script.syntax.nodes import walk

_OF_THE_GRAPH = frozenset({"grad_fn", "requires_grad", "is_leaf", "retain_grad", "register_hook"})


def asks_for_graph(statement: ast.stmt) -> bool:
    """Whether a statement may ask what it reads for its graph."""
    return any(isinstance(node, ast.Attribute) and node.attr in _OF_THE_GRAPH for node in walk(statement))


def with_asserts(block: Sequence[ast.stmt], chosen: Sequence[int], end: int) -> list[int]:
    """A slice with what is asserted of its graph ahead of its backward: `assert loss.requires_grad` holds of all parts.

    Args:
        block: the statements around the slice.
        chosen: the indices of the slice's statements, ascending.
        end: the index of the backward.
    """
    found = list(chosen)
    for index in range(chosen[0], end) if chosen else ():
        statement = block[index]
        made = {name for other in chosen if other < index for name in names_bound(block[other])}
        if isinstance(statement, ast.Assert) and _only_asks_for_graph(statement.test) and names_read(statement) <= made:
            found.append(index)
    return sorted({*found})


def _only_asks_for_graph(test: ast.expr) -> bool:
    """`loss.requires_grad`, `loss.grad_fn is not None and out.requires_grad`."""
    match test:
        case ast.Attribute(value=ast.Name(), attr=attribute):
            return attribute in _OF_THE_GRAPH
        case ast.BoolOp(values=values):
            return all(map(_only_asks_for_graph, values))
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant()]):
            return _only_asks_for_graph(left)
    return False


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
    moved = {id(node) for node in walk(*lift.lifted)}
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
    bound = names_bound(*lift.lifted)
    if again := carried & bound & {*lift.inputs}:
        raise CannotLift(f"{min(again)} goes on into the loss of the next iteration, with its graph")
