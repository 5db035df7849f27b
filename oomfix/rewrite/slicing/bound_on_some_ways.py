"""What a slice binds on some of its ways only, and has a value on all that end in a backward which does not fail."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from oomfix.rewrite.dataflow.blocks import next_in_chain
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Liveness,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
)
from oomfix.rewrite.facts.lift import Lift
from oomfix.rewrite.slicing.hidden_states import makes_state
from oomfix.rewrite.slicing.unsure_inputs import read_at_once


def loss_of_some_ways(lift: Lift) -> set[str]:
    """The loss, where nothing else in the iteration binds it, nor anything ahead of the loop.

    `for out in outputs: if first: loss = ... else: loss += ...`: where no way binds it, there is no loss, or one whose
    graph is gone, and its backward fails.
    """
    if lift.loss is None or lift.site.branch is not None:
        return set()
    return {lift.loss} - _bound_besides(lift) - lift.site.bound_before


def bound_with_the_loss(lift: Lift) -> set[str]:
    """The names that are bound on every way on which the loss is, where one `if` binds it.

    `if len(out) == 2: loss = ... elif len(out) == 3: loss = ...`: on the way past both, there is no loss, or one whose
    graph is gone, and its backward fails.
    """
    binding = [statement for statement in lift.lifted if lift.loss in names_bound(statement)]
    if lift.site.branch is not None or len(binding) != 1 or not isinstance(binding[0], ast.If):
        return set()
    ways = _ways(binding[0])
    with_loss = [definitely_bound(way) for way in ways if lift.loss in names_bound(*way)]
    return set.intersection(*with_loss) if all(lift.loss in bound for bound in with_loss) else set()


def bound_by_the_networks_ways(lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> set[str]:
    """The names that every way of an `if` binds by running the network, and that are read behind it in any case.

    `if clean: out = model(x) elif adversarial: out = model(attacked(x))`, then `loss = criterion(out, y)`: on the
    way past both, `out` has no value, or one whose graph is gone, and its backward fails; unless something else in
    the iteration binds it, as `out = out.detach()` at its end.
    """
    found: set[str] = set()
    for index, statement in enumerate(lift.lifted if lift.site.branch is None else ()):
        if isinstance(statement, ast.If):
            ways = [[one for one in way if runs_forward(one)] for way in _ways(statement)]
            read = read_at_once([*lift.lifted[index + 1 :], ast.Expr(lift.site.root)])
            read -= names_read(*lift.lifted[: index + 1])
            found |= read.intersection(*(definitely_bound(way) for way in ways))
    return found - _bound_besides(lift) - lift.site.bound_before


def bound_by_the_networks_loop(lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> set[str]:
    """What each round of the one `for` binds that runs the network: without a round there is nothing to backpropagate.

    `for t in range(length): out, hidden = rnn(x[:, t], hidden)`, with `out` read behind the backward.
    """
    loop = _networks_loop(lift, runs_forward)
    if loop is None:
        return set()
    first = itertools.takewhile(lambda statement: not _may_end_round(statement), loop.body)
    return names_bound_by_target(loop.target) | definitely_bound(first)


def bound_by_its_rounds(lift: Lift, runs_forward: Callable[[ast.AST], bool], liveness: Liveness) -> set[str]:
    """Of what each round of the network's loop binds, what no round reads from the one before, nor the loss ahead.

    `for t in range(length): out, hidden = rnn(x[:, t], hidden)`, then `loss = criterion(out, y)`.
    """
    loop = _networks_loop(lift, runs_forward)
    if loop is None or lift.site.branch is not None:
        return set()
    read = liveness.before(lift.lifted[: lift.lifted.index(loop) + 1], set())
    return bound_by_the_networks_loop(lift, runs_forward) - read - _bound_besides(lift) - lift.site.bound_before


def missed_otherwise(lift: Lift) -> set[str]:
    """The names that an `if` binds on some ways and that the slice reads behind it in any case.

    `if hinge: loss = ... elif wasserstein: loss = ...`, then `total = loss + other`: on the way past both, a function
    whose loop is in its caller has no value from before, and fails.
    """
    site = lift.site
    if site.iteration is not None or site.branch is not None or not isinstance(site.scope, FunctionNode):
        return set()
    found: set[str] = set()
    for index, statement in enumerate(lift.lifted):
        if isinstance(statement, ast.If):
            read = read_at_once([*lift.lifted[index + 1 :], ast.Expr(site.root)])
            read -= names_read(*lift.lifted[: index + 1])
            found |= names_bound(statement) & read
    return found - _bound_besides(lift) - site.bound_before


def _networks_loop(lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> ast.For | None:
    """The `for` that alone runs the network, but for what makes the state that it begins with."""
    running = [statement for statement in lift.lifted if runs_forward(statement) and not makes_state(statement)]
    if len(running) != 1 or runs_forward(lift.site.root):
        return None
    return running[0] if isinstance(running[0], ast.For) else None


def _may_end_round(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in nodes_of_scope(statement))


def _ways(condition: ast.If) -> list[list[ast.stmt]]:
    """What an `if`, each of its `elif` and its `else` hold."""
    ways, current = [], condition
    while (further := next_in_chain(current)) is not None:
        ways.append(current.body)
        current = further
    return [*ways, current.body, *([current.orelse] if current.orelse else [])]


def _bound_besides(lift: Lift) -> set[str]:
    """The names that the iteration binds outside of the slice."""
    lifted = {id(node) for node in nodes_of_scope(*lift.lifted)}
    body = (lift.site.iteration or lift.site.scope).body
    return {
        node.id
        for node in nodes_of_scope(*body)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in lifted
    }
