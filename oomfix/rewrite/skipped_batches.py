"""Batches that are skipped between forward and backward, whose gradients would be there by then."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cached_property
from typing import TypeGuard

from oomfix.rewrite.calls import called_name
from oomfix.rewrite.leaving import leaves
from oomfix.rewrite.lift import CannotLift, Lift
from oomfix.rewrite.liveness import nodes_of_scope
from oomfix.rewrite.on_gradients import is_zero_grad
from oomfix.rewrite.reading import Reading
from oomfix.script.names import last_name, path_of
from oomfix.script.nodes import walk

_READING = frozenset({"item", "detach", "cpu", "abs"})
"""What is asked of a loss for its number."""


def skips_if_diverged(statement: ast.stmt) -> TypeGuard[ast.If]:
    """`if torch.isnan(loss) or loss > 1e4: print("skipped"); continue`."""
    if not isinstance(statement, ast.If) or statement.orelse or not _asks_if_diverged(statement.test):
        return False
    *others, last = statement.body
    return isinstance(last, ast.Continue | ast.Break | ast.Return) and not any(map(leaves, others))


def body_of_skip(skip: ast.If) -> list[ast.stmt]:
    """What a skip does before it leaves, but for resets of gradients."""
    return [other for other in skip.body[:-1] if not is_zero_grad(other)]


def asks_if_not_finite(test: ast.expr) -> bool:
    """`torch.isnan(loss) or torch.isinf(loss)`, `not torch.isfinite(losses).all()`: true where one number is not."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.Or) and all(map(asks_if_not_finite, test.values))
    asked, over_all = {"isnan", "isinf"}, "any"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, asked, over_all = test.operand, {"isfinite"}, "all"
    while isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and last_name(test) in (over_all, "item"):
        test = test.func.value
    return called_name(test) in asked


def _asks_if_diverged(test: ast.expr) -> bool:
    """Whether a test is true of numbers that are not finite, or too large; other losses may have no graph: `== 0`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return all(map(_asks_if_diverged, test.values))
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return asks_if_not_finite(test)
    number, limit = _without_reading(test.left), test.comparators[0]
    if isinstance(test.ops[0], ast.NotEq):  # of all numbers, only nan differs from itself
        return number is not None and number == _without_reading(limit)
    is_number = isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value > 0
    return isinstance(test.ops[0], ast.Gt | ast.GtE) and is_number and number is not None


def _without_reading(node: ast.expr) -> str | None:
    """The name of `loss`, `loss.item()`, `float(loss)`."""
    if isinstance(node, ast.Call) and called_name(node) == "float" and len(node.args) == 1:
        node = node.args[0]
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and last_name(node) in _READING:
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else None


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
                resets = self._resets([*ahead, *statement.body])
                stays = self._is_used_elsewhere(block[block.index(lift.site.end) + 1 :])
                if stays or self._backward_raises or not self._stepped <= resets:
                    keyword = leaves(statement)
                    raise CannotLift(f"`{keyword}` in line {statement.lineno} stands between forward and backward")
            elif not any(map(is_zero_grad, ahead)):
                raises = [node for node in nodes_of_scope(statement) if isinstance(node, ast.Raise | ast.Assert)]
                if raises and self._blocks.may_be_skipped_by_exceptions(statement, self._calls_of):
                    raise CannotLift(f"line {raises[0].lineno} may skip the batch between forward and backward")

    def _is_used_elsewhere(self, skipped: list[ast.stmt]) -> bool:
        """Whether something steps or reads gradients that is not among the statements that are skipped as well."""
        inside = {node for statement in skipped for node in walk(statement)}
        read = (
            node
            for node in self._script.imports.nodes.of(ast.Attribute)
            if node.attr == "grad" and isinstance(node.ctx, ast.Load)
        )
        return any(node not in inside for node in (*self._steps, *read))

    @cached_property
    def _steps(self) -> list[ast.Call]:
        calls = self._script.calls_of_method("step")
        return [call for call in calls if path_of(call.func) == f"{self._manager}.step" and call.args]

    @cached_property
    def _stepped(self) -> set[str | None]:
        """The access paths of the optimizers that step; None for one without."""
        return {path_of(call.args[0]) for call in self._steps}

    @cached_property
    def _backward_raises(self) -> bool:
        """Whether the script looks for anomalies: the backward of a loss that is no number then raises."""
        calls = self._script.imports.nodes.of(ast.Call)
        return any(last_name(call) in ("set_detect_anomaly", "detect_anomaly") for call in calls)

    @staticmethod
    def _resets(statements: Iterable[ast.stmt]) -> set[str | None]:
        """The access paths of what `zero_grad()` is called of."""
        calls = (one.value for one in statements if isinstance(one, ast.Expr) and is_zero_grad(one))
        methods = (call.func for call in calls if isinstance(call, ast.Call))
        return {path_of(method.value) for method in methods if isinstance(method, ast.Attribute)} - {None}
