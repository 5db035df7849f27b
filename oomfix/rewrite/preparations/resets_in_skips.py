"""What skips a batch whose loss is not finite resets its gradients, where no others are there yet."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.on_gradients import frees_gradients_of
from oomfix.rewrite.facts.out_of_sight import OutOfSight
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.skipped_batches import skips_if_diverged
from oomfix.rewrite.in_place.resets import makes_one_optimizer
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import path_of


def reset_in_skips(reading: Reading, manager: str) -> list[Edit]:
    """The edits that write `optimizer.zero_grad()` into `if torch.isnan(loss): continue`, for when the backward is run.

    They change nothing where the gradients are not there.
    """
    backwards = [reading.blocks.statement_of(call) for call in reading.calls_to(f"{manager}.backward")]
    skips = [skip for backward in backwards for skip in _skips_ahead(backward, reading)]
    optimizer = only_optimizer(reading, manager) if skips else None
    return [] if optimizer is None else [_reset(skip.body[-1], optimizer, reading) for skip in skips]


def only_optimizer(reading: Reading, manager: str) -> str | None:
    """The one optimizer of a file, if there are gradients only between each backward and its step in the same block.

    It steps and resets them there whatever happens, and no other file gets the network or gave it.
    """
    backwards = [reading.blocks.statement_of(call) for call in reading.calls_to(f"{manager}.backward") if call.args]
    if len(list(reading.script.calls_of_method("backward"))) != len(backwards):
        return None
    steps = {_resetting_step(backward, reading, manager) for backward in backwards}
    optimizer = steps.pop() if len(steps) == 1 else None
    if optimizer is None or not makes_one_optimizer(reading.script, reading.blocks):
        return None
    networks = {forward.path for loop in reading.loops for forward in loop.forwards if forward.path is not None}
    out_of_sight = OutOfSight(reading, networks)
    others = (call for call in out_of_sight.calls() if not (path_of(call.func) or "").startswith(f"{manager}."))
    if any(others) or any(out_of_sight.comes_from_elsewhere(loop.node) for loop in reading.loops):
        return None
    return optimizer


def _skips_ahead(backward: ast.stmt, reading: Reading) -> Iterator[ast.If]:
    block = reading.blocks.block_of(backward)
    yield from filter(skips_if_diverged, block[: block.index(backward)])


def _resetting_step(backward: ast.stmt, reading: Reading, manager: str) -> str | None:
    """The optimizer that always steps behind a backward in its block, and then has its gradients reset."""
    block = reading.blocks.block_of(backward)
    behind = block[block.index(backward) + 1 :]
    for number, statement in enumerate(behind):
        if leaves(statement) is not None:
            return None
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and path_of(call.func) == f"{manager}.step" and call.args:
            path = path_of(call.args[0])
            if any(keyword.arg == "zero_grad" for keyword in call.keywords):
                following = behind[number + 1 : number + 2]
                path = path if any(frees_gradients_of(other, path) for other in following) else None
            skipped = reading.blocks.may_be_skipped_by_exceptions(statement, reading.functions.calls_of)
            return None if skipped else path
    return None


def _reset(leaving: ast.stmt, optimizer: str, reading: Reading) -> Edit:
    layout, (start, _) = reading.layout, bounds(reading.source, leaving)
    own = layout.own_lines(leaving) is not None
    return Edit(start, start, f"{optimizer}.zero_grad()" + (layout.newline + layout.margin(leaving) if own else "; "))
