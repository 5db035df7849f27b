"""A backward that is run where its loss is finite is run in any case, and its gradients are reset where it is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import next_in_chain
from oomfix.rewrite.dataflow.on_gradients import frees_gradients_of
from oomfix.rewrite.facts.diverged import asks_if_diverged, asks_if_finite
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.skipped_batches import looks_for_anomalies
from oomfix.rewrite.preparations.resets_in_skips import only_optimizer
from oomfix.script.syntax.edits import Edit


class _Tested(NamedTuple):
    """A test of a loss with its backward on one side.

    Attributes:
        branch: the `if`.
        side: the side of the backward.
        other: the other side, empty where there is no `else`.
        backward: the statement.
    """

    branch: ast.If
    side: list[ast.stmt]
    other: list[ast.stmt]
    backward: ast.stmt


def run_backwards_first(reading: Reading, manager: str) -> list[Edit]:
    """The edits that move backwards of `if torch.isfinite(loss): ...` ahead of the test, with a reset in its `else`.

    They change nothing where there are no other gradients by then: see `only_optimizer`.
    """
    backwards = [reading.blocks.statement_of(call) for call in reading.calls_to(f"{manager}.backward") if call.args]
    tested = [found for backward in backwards if (found := _test_of(backward, reading)) is not None]
    if not tested or looks_for_anomalies(reading.script):
        return []
    optimizer = only_optimizer(reading, manager)
    return [] if optimizer is None else [edit for one in tested for edit in _edits(one, optimizer, reading)]


def _test_of(backward: ast.stmt, reading: Reading) -> _Tested | None:
    branch = next(reading.blocks.ancestors(backward))
    if not isinstance(branch, ast.If) or reading.blocks.is_elif(branch) or next_in_chain(branch) is not None:
        return None
    if backward in branch.body:
        return _Tested(branch, branch.body, branch.orelse, backward) if asks_if_finite(branch.test) else None
    return _Tested(branch, branch.orelse, branch.body, backward) if asks_if_diverged(branch.test) else None


def _edits(tested: _Tested, optimizer: str, reading: Reading) -> Iterator[Edit]:
    layout, (branch, side, other, backward) = reading.layout, tested
    ahead = side[: side.index(backward)]
    if not all(frees_gradients_of(one, optimizer) for one in ahead):
        return
    taken, around = reading.chunks([*ahead, backward]), reading.chunk(branch)
    below = reading.chunk(other[0]) if other else around
    if around is None or below is None or taken is None or (other and other[0].lineno == branch.lineno):
        return
    inner, newline = layout.margin(backward), layout.newline
    yield from map(layout.removed, taken)
    moved = layout.moved(taken[-1], inner, layout.margin(branch))
    yield layout.inserted(layout.span(around)[0], moved)
    reset = f"{inner}{optimizer}.zero_grad()"
    if other:
        yield layout.inserted(layout.span(below)[0], [reset])
    else:
        end = layout.span(around._replace(last=layout.last_line(branch)))[1]
        yield Edit(end, end, f"{newline}{layout.margin(branch)}else:{newline}{reset}")
