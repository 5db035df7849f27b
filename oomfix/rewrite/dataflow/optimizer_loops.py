"""Loops over optimizers, `for optimizer in optimizers:`, which are gone through ahead of a clip of them all as well."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, names_bound_by_target, nodes_of_scope_body
from oomfix.script.syntax.names import last_name

_ITERATORS = frozenset({"iter", "map", "filter", "zip", "enumerate", "reversed", "chain"})


def loop_over_optimizers(optimizer: str, step: ast.AST, reader: ast.stmt, blocks: Blocks) -> ast.For | None:
    """The loop that binds the optimizer of a step, behind a statement that reads gradients; None where none does.

    Args:
        optimizer: the path that stands for it.
        step: a node of its step.
        reader: the statement.
        blocks: where nodes stand.
    """
    for parent in blocks.ancestors(step):
        if isinstance(parent, FunctionNode):
            break
        if isinstance(parent, ast.For) and optimizer.split(".")[0] in names_bound_by_target(parent.target):
            return parent if reader.lineno < parent.lineno else None
    return None


def may_run_ahead(loop: ast.For, reader: ast.stmt, blocks: Blocks) -> bool:
    """Whether going through a loop ahead of a statement too meets the same optimizers, and changes nothing else."""
    scope = blocks.scope_of(loop)
    if scope is None:
        return False
    gone_through, targets = paths_read(loop.iter), names_bound_by_target(loop.target)
    for node in nodes_of_scope_body(scope):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assign) and _makes_iterator(node.value) and overlap(_bound(node), gone_through):
            return False
        if reader.lineno <= line < loop.lineno:
            if overlap(_bound(node), gone_through):
                return False
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in targets:
                return False  # it would read what the loop has left there
    return True


def _bound(node: ast.AST) -> set[str]:
    """What a statement binds or changes; of one with a block, which may be around the loop, what its header binds."""
    if isinstance(node, ast.For):
        return names_bound_by_target(node.target)
    if not isinstance(node, ast.stmt) or hasattr(node, "body"):
        return set()
    return names_bound(node) | changed_paths(node)


def _makes_iterator(value: ast.expr) -> bool:
    """`iter(optimizers)`, `(one for one in optimizers)`: a second time, there is nothing left."""
    return isinstance(value, ast.GeneratorExp) or (isinstance(value, ast.Call) and last_name(value) in _ITERATORS)
