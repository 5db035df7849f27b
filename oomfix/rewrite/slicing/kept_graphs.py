"""A loss that only `if due:` differentiates: whether its graph is needed where it is not, and cannot be dropped."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Liveness,
    Scope,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope_body,
)
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.script.syntax.names import last_name, root_of
from oomfix.script.syntax.nodes import blocks, children, walk

_WITHOUT_GRAPH = frozenset("item detach detach_ tolist numpy float int len print".split())


def check_graphs_end(
    lift: Lift, liveness: Liveness, blocks: Blocks, runs_forward: Callable[[ast.AST], bool], manager: str
) -> None:
    """Whether no later backward goes through what the ways past this one compute.

    Args:
        lift: the slice, whose backward is in a branch.
        liveness: of the scope that it stands in.
        blocks: where statements stand.
        runs_forward: whether code runs a network's forward.
        manager: the name of the manager, which keeps no graph that it is given.

    Raises:
        CannotLift: a later iteration goes on from it, or its gradient is taken there.
    """
    branch, iteration = lift.site.branch, lift.site.iteration
    if not isinstance(branch, ast.If):
        return
    line, outside = branch.lineno, (*lift.lifted, lift.site.statement)
    where = f"where line {line} runs no backward"
    made = names_bound(*lift.lifted)
    for statement in _statements((iteration or lift.site.scope).body, outside):
        if not _blocks_of(statement) and _takes_gradient(statement, made):
            raise CannotLift(f"line {statement.lineno} takes a gradient {where}")
    if iteration is None:
        return
    running = [one for one in _statements(lift.lifted) if not _blocks_of(one) and runs_forward(one)]
    graphs = names_bound(*running)
    graphs = _with_graph(graphs, _statements(lift.lifted)) if graphs else made
    kept = _with_graph(graphs, _statements(iteration.body, outside))
    for call in _backwards_outside(lift.site.scope, iteration):
        if through := names_read(call) & (kept - made):
            name = min(through)
            raise CannotLift(
                f"line {call.lineno} runs a backward through {name}, with its graph where line {line} runs none"
            )
    wanted = liveness.before(lift.lifted, names_read(lift.site.root)) - _bound_each_time(branch, lift, blocks)
    if carried := wanted & kept - {manager}:
        raise CannotLift(f"{min(carried)} goes on into the loss of a later iteration, with its graph {where}")


def _backwards_outside(scope: Scope, iteration: ast.stmt) -> Iterator[ast.Call]:
    inside = {id(node) for node in walk(iteration)}
    for node in nodes_of_scope_body(scope):
        if isinstance(node, ast.Call) and last_name(node) == "backward" and id(node) not in inside:
            yield node


def _with_graph(found: set[str], statements: Iterator[ast.stmt]) -> set[str]:
    """Names that carry a graph, and what statements bind or change with their help."""
    ways = [way for statement in statements for way in _ways_on(statement)]
    found = set(found)
    while more := {name for read, names in ways if read & found for name in names} - found:
        found |= more
    return found


def _ways_on(statement: ast.stmt) -> Iterator[tuple[set[str], set[str]]]:
    """The names that a statement itself, without its blocks, reads for more than numbers, and what it makes of them."""
    if isinstance(statement, ast.For | ast.AsyncFor):
        yield _read_with_graph(statement.iter), names_bound_by_target(statement.target)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars is not None:
                yield _read_with_graph(item.context_expr), names_bound_by_target(item.optional_vars)
    elif not _blocks_of(statement):
        changed = set(map(root_of, changed_paths(statement)))
        yield _read_with_graph(statement), names_bound(statement) | changed


def _statements(body: list[ast.stmt], without: Sequence[ast.stmt] = ()) -> Iterator[ast.stmt]:
    """Statements and those in their blocks."""
    for statement in body:
        if statement not in without and not isinstance(statement, FunctionNode | ast.ClassDef):
            yield statement
            for block in _blocks_of(statement):
                yield from _statements(block, without)


def _blocks_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    holders = (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
    return [block for block in blocks(holders) if block]


def _read_with_graph(node: ast.AST) -> set[str]:
    """The names that a node reads for more than their numbers."""
    if isinstance(node, ast.Call) and last_name(node) in _WITHOUT_GRAPH:
        return set()
    if isinstance(node, ast.Attribute) and node.attr in ("data", "shape"):
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    return {name for child in children(node) for name in _read_with_graph(child)}


def _takes_gradient(statement: ast.stmt, made: set[str]) -> bool:
    return any(last_name(call) == "grad" and names_read(call) & made for call in calls_in(statement))


def _bound_each_time(branch: ast.If, lift: Lift, blocks: Blocks) -> set[str]:
    """The names that every round of the iteration binds outside of the slice and the branch."""
    bound: set[str] = set()
    current: ast.stmt = branch
    while True:
        bound |= definitely_bound(
            other for other in blocks.block_of(current) if other is not current and other not in lift.lifted
        )
        parent = next(blocks.ancestors(current))
        if isinstance(parent, ast.For | ast.AsyncFor):
            bound |= names_bound_by_target(parent.target)
        if parent is lift.site.iteration or not isinstance(parent, ast.stmt):
            return bound
        current = parent
