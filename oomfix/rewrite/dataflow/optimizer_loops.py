"""Loops over optimizers, `for optimizer in optimizers:`, which are gone through ahead of a clip of them all as well."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, names_bound_by_target, nodes_of_scope_body
from oomfix.script.facts.trace import Step
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import names_in

_ITERATORS = frozenset({"iter", "map", "filter", "zip", "enumerate", "reversed", "chain"})


def optimizer_of(step: Step) -> ast.expr:
    """What stands for the optimizer: `optimizer` of `optimizer.step()` and of `scaler.step(optimizer)`."""
    assert isinstance(step.node.func, ast.Attribute)
    return step.node.args[0] if step.scaled and step.node.args else step.node.func.value


def loop_over_optimizers(step: Step, reader: ast.stmt, blocks: Blocks) -> ast.For | None:
    """The loop that binds what stands for the optimizer of a step, behind a statement that reads gradients.

    None where no loop does. `optimizers[i]` and `parts["optimizer"]` stand for one in a loop that binds `i` or `parts`.
    """
    names = names_in(optimizer_of(step))
    for parent in blocks.ancestors(step.node):
        if isinstance(parent, FunctionNode):
            break
        if isinstance(parent, ast.For) and names & names_bound_by_target(parent.target):
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
