"""What a statement does besides binding names: it draws random numbers, fetches a batch, or switches layers."""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import switches_what_is_new
from oomfix.rewrite.dataflow.liveness import nodes_of_scope
from oomfix.script.syntax.names import last_name

_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform uniform_ bernoulli "
    "bernoulli_ multinomial exponential_ dropout shuffle choice choices sample rsample random randrange permutation "
    "beta manual_seed seed gumbel_softmax poisson".split()
)

_FETCHING = frozenset("next __next__ next_batch get_next get_next_batch get_batch fetch_batch sample_batch".split())

_MODE_METHODS = frozenset("train eval requires_grad_ load_state_dict freeze unfreeze".split())

_MODE_FUNCTIONS = frozenset(
    "manual_seed seed set_state set_grad_enabled freeze unfreeze set_requires_grad toggle_grad requires_grad".split()
)


def draws_random_numbers(node: ast.AST) -> bool:
    """Whether a node calls something known to draw random numbers, or to set a seed."""
    return any(map(is_drawing, calls_in(node)))


def is_drawing(call: ast.Call) -> bool:
    """Whether a call is known to draw random numbers, or to set a seed."""
    return last_name(call) in _RANDOM


def fetches(node: ast.AST) -> bool:
    """Whether a node fetches a batch, which is another one each time."""
    return any(last_name(call) in _FETCHING for call in calls_in(node))


def only_sets_mode(statement: ast.stmt) -> bool:
    """`model.train()`, `model.eval()`: a graph that is there remembers the mode its layers ran in."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "eval")


def switches_mode(node: ast.AST, *, computes: Callable[[ast.Call], bool] | None = None) -> bool:
    """Whether a node switches layers or gradients on or off for what comes after it, as a context does not.

    Args:
        node: the node.
        computes: whether a call computes a loss, under the name of a switch: `loss = model.train(batch)`.
    """
    contexts = {id(child.context_expr) for child in nodes_of_scope(node) if isinstance(child, ast.withitem)}
    return any(
        last_name(call) in _MODE_FUNCTIONS or (isinstance(call.func, ast.Attribute) and call.func.attr in _MODE_METHODS)
        for call in calls_in(node)
        if id(call) not in contexts and not switches_what_is_new(call) and not (computes and computes(call))
    ) or any(
        isinstance(child, ast.Attribute) and child.attr == "requires_grad" and isinstance(child.ctx, ast.Store)
        for child in nodes_of_scope(node)
    )
