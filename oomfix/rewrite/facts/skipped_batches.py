"""Batches that are skipped between forward and backward, whose gradients would be there by then."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cached_property
from typing import TypeGuard

from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad
from oomfix.rewrite.dataflow.shared_parameters import SharedParameters
from oomfix.rewrite.facts.diverged import asks_if_diverged
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.rewrite.facts.reading import Reading
from oomfix.script import Script
from oomfix.script.syntax.names import last_name, owner_of, path_of
from oomfix.script.syntax.nodes import walk


def skips_if_diverged(statement: ast.stmt) -> TypeGuard[ast.If]:
    """`if torch.isnan(loss) or loss > 1e4: print("skipped"); continue`."""
    if not isinstance(statement, ast.If) or statement.orelse or not asks_if_diverged(statement.test):
        return False
    *others, last = statement.body
    return isinstance(last, ast.Continue | ast.Break | ast.Return) and not any(map(leaves, others))


def body_of_skip(skip: ast.If) -> list[ast.stmt]:
    """What a skip does before it leaves, but for resets of gradients."""
    return [other for other in skip.body[:-1] if not is_zero_grad(other)]


def looks_for_anomalies(script: Script) -> bool:
    """Whether the backward of a loss that is no number raises."""
    calls = script.imports.nodes.of(ast.Call)
    return any(last_name(call) in ("set_detect_anomaly", "detect_anomaly") for call in calls)


class SkippedBatches:
    """Looks at what may skip a batch once its gradients are there.

    Args:
        reading: a script whose steps are the manager's.
        manager: the name of the manager.
    """

    def __init__(self, reading: Reading, manager: str) -> None:
        self._script, self._blocks, self._manager = reading.script, reading.blocks, manager
        self._calls_of = reading.functions.calls_of

    def check(self, lift: Lift) -> None:
        """Whether the gradients of skipped batches are dropped before others are added to them, and used by nothing.

        Raises:
            CannotLift: they may stay; says which line skips the batch.
        """
        block = lift.site.block
        ahead = block[: block.index(lift.site.end)]
        for statement in lift.after:
            if skips_if_diverged(statement):
                if self._backward_raises or not self._drops_gradients(statement, lift):
                    keyword = leaves(statement)
                    raise CannotLift(f"`{keyword}` in line {statement.lineno} stands between forward and backward")
            elif not any(map(is_zero_grad, ahead)):
                raises = [node for node in nodes_of_scope(statement) if isinstance(node, ast.Raise | ast.Assert)]
                if raises and self._blocks.may_be_skipped_by_exceptions(statement, self._calls_of):
                    raise CannotLift(f"line {raises[0].lineno} may skip the batch between forward and backward")

    def _drops_gradients(self, skip: ast.If, lift: Lift) -> bool:
        """Whether gradients of skipped batches are reset by the skip itself, or by whatever comes next to them."""
        block, end = lift.site.block, lift.site.block.index(lift.site.end)
        skipped = set(walk(*block[end + 1 :]))
        by_skip = {path for path in self._steps.values() if self._reset(path, skip.body)}
        own = {path for call, path in self._steps.items() if call in skipped}
        if not all(self._reset(path, [*block[:end], *skip.body]) for path in own):
            return False
        steps = [(call, path) for call, path in self._steps.items() if call not in skipped and path not in by_skip]
        if not all(self._begins_anew(call, path, skip) for call, path in steps):
            return False
        readers = [node for node in self._readers if node not in skipped]
        open_paths = set(self._steps.values()) - by_skip
        return all(self._begins_anew(node, path, skip) for node in readers for path in open_paths)

    def _begins_anew(self, node: ast.expr, optimizer: str | None, skip: ast.If) -> bool:
        """Whether gradients are reset ahead of what uses them, in its own iteration, with no skip in between."""
        current: ast.AST = self._blocks.statement_of(node)
        while isinstance(current, ast.stmt) and not isinstance(current, FunctionNode):
            block = self._blocks.block_of(current)
            around = any(one is skip for one in walk(*block))
            for reset in block[: block.index(current)]:
                if self._reset(optimizer, [reset]) and not (around and reset.lineno < skip.lineno < node.lineno):
                    return True
            current = next(self._blocks.ancestors(current))
            if isinstance(current, ast.For | ast.AsyncFor | ast.While):
                return False
        return False

    def _reset(self, optimizer: str | None, statements: Iterable[ast.stmt]) -> bool:
        """Whether `zero_grad()` is called of an optimizer, or of the network that it steps."""
        calls = (one.value for one in statements if isinstance(one, ast.Expr) and is_zero_grad(one))
        methods = (call.func for call in calls if isinstance(call, ast.Call))
        paths = {path_of(method.value) for method in methods if isinstance(method, ast.Attribute)} - {None}
        if optimizer is None:
            return False
        made_for = self._shared.is_made_for_all
        return any(path == optimizer or made_for(optimizer, path) for path in paths if path is not None)

    @cached_property
    def _shared(self) -> SharedParameters:
        return SharedParameters(self._script)

    @cached_property
    def _steps(self) -> dict[ast.Call, str | None]:
        """The steps of the manager and of optimizers that are left alone, each with the path of its optimizer."""
        found: dict[ast.Call, str | None] = {}
        reset = {path_of(call.func) for call in self._script.calls_of_method("zero_grad")}
        for call in self._script.calls_of_method("step"):
            owner = owner_of(call)
            if owner == self._manager and call.args:
                found[call] = path_of(call.args[0])
            elif owner != self._manager and f"{owner}.zero_grad" in reset:
                found[call] = owner
        return found

    @cached_property
    def _readers(self) -> list[ast.Attribute]:
        """Where gradients are read."""
        attributes = self._script.imports.nodes.of(ast.Attribute)
        return [node for node in attributes if node.attr == "grad" and isinstance(node.ctx, ast.Load)]

    @cached_property
    def _backward_raises(self) -> bool:
        return looks_for_anomalies(self._script)
