"""Which resets of gradients go with the manager's step, which stay, and where the step leaves gradients alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import Scope, names_bound, names_read, nodes_of_scope, nodes_of_scope_body
from oomfix.rewrite.dataflow.on_gradients import CLIPPING, frees_gradients_of
from oomfix.rewrite.dataflow.shared_parameters import SharedParameters
from oomfix.rewrite.dataflow.step_functions import StepFunction
from oomfix.rewrite.facts.out_of_sight import OutOfSight
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.facts.skipped_batches import skips_if_diverged
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.script import Script
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import walk


class Resets:
    """The `zero_grad` lines of a file, and what its steps may do in their place.

    Args:
        reading: the script.
        verdicts: its training loops.
    """

    def __init__(self, reading: Reading, verdicts: Sequence[Verdict]) -> None:
        self._reading, self._script, self._blocks = reading, reading.script, reading.blocks
        self._verdicts = verdicts

    def behind(self, step: ast.stmt, optimizer: str | None) -> ast.stmt | None:
        """`optimizer.zero_grad()` behind the step in its block, where nothing in between looks at gradients."""
        block = self._blocks.block_of(step)
        for other in block[block.index(step) + 1 :]:
            if frees_gradients_of(other, optimizer):
                return other
            if reads_gradients(other) or leaves(other) or _calls_backward(other) or not isinstance(other, ast.Expr):
                return None
            if optimizer is not None and self._steps_shared(other, optimizer):
                return None
            if self._out_of_sight.is_held_elsewhere or any(node in self._readers_out_of_sight for node in walk(other)):
                return None
        return None

    def ahead(self, step: ast.stmt, optimizer: str | None) -> ast.stmt | None:
        """`optimizer.zero_grad()` ahead of the one backward of the file, in one block with it and the one step.

        It stays where the network, the optimizer or the loop is in another file, which may leave gradients behind or
        read them; where another one may come after it, whose parameters have gathered gradients meanwhile (stages of a
        training); where a clip or norm comes first that may use what the step leaves; where something out of sight is
        given the network anywhere but between the reset and the step, as an attack is that runs a backward of its own;
        and where an exception may skip the step and the training goes on with the gradients of that batch.
        """
        if not self._one_optimizer or any(isinstance(verdict.loop, StepFunction) for verdict in self._verdicts):
            return None
        if len(self._verdicts) != 1 or len(self._verdicts[0].steps) != 1 or len(self._verdicts[0].backwards) != 1:
            return None
        if self._verdicts[0].kept_steps:
            return None
        if len({id(event.node) for event in self._script.backwards}) != 1 or self._gradients_are_read:
            return None
        backward = self._blocks.statement_of(self._verdicts[0].backwards[0].node)
        block = self._blocks.block_of(step)
        if backward not in block or block.index(backward) > block.index(step):
            return None
        reset = next((other for other in block[: block.index(backward)] if frees_gradients_of(other, optimizer)), None)
        if reset is None or any(map(skips_if_diverged, block[: block.index(reset)])):
            return None
        passed = block[block.index(reset) : block.index(step)]
        if optimizer is not None and not _all_within(self._clip_calls(step, optimizer), passed):
            return None
        if any(leaves(other) or (reads_gradients(other) and not _clips(other)) for other in passed):
            return None
        if self._out_of_sight.comes_from_elsewhere(self._verdicts[0].loop.node):
            return None
        if self._readers_in_loop(reset, step) or not _all_within(self._out_of_sight.calls(), passed):
            return None
        if self._blocks.may_be_skipped_by_exceptions(step, self._reading.functions.calls_of):
            return None
        return reset if len(list(self._script.calls_of_method("zero_grad"))) == 1 else None

    def comes_round(self, step: ast.stmt, optimizer: str | None) -> bool:
        """Whether an optimizer's gradients are reset on every way from its step to the next backward, read by none."""
        if optimizer is None or self._gradients_are_read or self._out_of_sight.is_held_elsewhere:
            return False
        if any(self._goes_on_with_gradients(verdict, step, optimizer) for verdict in self._verdicts):
            return False
        for backward in self._backwards_by_scope.get(self._blocks.scope_of(step), ()):
            reset = next((other for other in self._run_ahead(backward) if frees_gradients_of(other, optimizer)), None)
            if reset is not None and self._is_only_step_between(step, backward):
                return not self._readers_in_loop(reset, step) and not self._are_needed_first(step, optimizer)
        return False

    def _are_needed_first(self, step: ast.stmt, optimizer: str) -> bool:
        """Whether another step or a clip comes ahead of the next reset and may use the gradients a step leaves."""
        for verdict in self._verdicts:
            for other in (*verdict.steps, *verdict.kept_steps):
                statement = self._blocks.statement_of(other.node)
                if statement is step or self._is_reset_between(step, statement, (optimizer, other.optimizer)):
                    continue
                if self._shared.may_be_shared(optimizer, other.optimizer):
                    return True
        clips = map(self._blocks.statement_of, self._clip_calls(step, optimizer))
        return any(not self._is_reset_between(step, clip, (optimizer,)) for clip in clips)

    def _clip_calls(self, step: ast.stmt, optimizer: str) -> Iterator[ast.Call]:
        """What clips gradients that an optimizer may step, or takes their norm, in the scope of a step."""
        scope = self._blocks.scope_of(step)
        for node in nodes_of_scope_body(scope) if scope is not None else ():
            if isinstance(node, ast.Call) and CLIPPING.search(last_name(node)):
                if self._shared.may_be_given(optimizer, node):
                    yield node

    def _steps_shared(self, statement: ast.stmt, optimizer: str) -> bool:
        """Whether a statement is a step of another optimizer, which may step the same parameters."""
        steps = (step for verdict in self._verdicts for step in (*verdict.steps, *verdict.kept_steps))
        own = (step for step in steps if self._blocks.statement_of(step.node) is statement)
        return any(self._shared.may_be_shared(optimizer, step.optimizer) for step in own)

    def _is_reset_between(self, step: ast.stmt, other: ast.stmt, optimizers: Sequence[str]) -> bool:
        """Whether one of the optimizers is always reset behind a step and ahead of what comes next, or comes round."""
        follows = self._blocks.scope_of(step) is self._blocks.scope_of(other) and other.lineno > step.lineno
        follows = follows and not self._blocks.exclude_each_other(step, other)
        ahead = self._run_ahead(other)
        resets = (one for one in ahead if any(frees_gradients_of(one, optimizer) for optimizer in optimizers))
        return any(one.lineno > step.lineno or not follows for one in resets)

    def _goes_on_with_gradients(self, verdict: Verdict, step: ast.stmt, optimizer: str) -> bool:
        """Whether another loop steps the optimizer with what the last iteration of a step's loop left behind."""
        inside = verdict.loop.node.lineno <= step.lineno <= (verdict.loop.node.end_lineno or step.lineno)
        if inside or all(other.optimizer != optimizer for other in verdict.steps):
            return False
        backwards = [self._blocks.statement_of(event.node) for event in verdict.backwards]
        ahead = (other for backward in backwards for other in self._run_ahead(backward))
        return not any(frees_gradients_of(other, optimizer) for other in ahead)

    @cached_property
    def _one_optimizer(self) -> bool:
        return makes_one_optimizer(self._script, self._blocks)

    @cached_property
    def _gradients_are_read(self) -> bool:
        return _gradients_read_elsewhere(self._script)

    @cached_property
    def _shared(self) -> SharedParameters:
        return SharedParameters(self._script)

    @cached_property
    def _out_of_sight(self) -> OutOfSight:
        paths = {forward.path for verdict in self._verdicts for forward in verdict.loop.forwards}
        return OutOfSight(self._reading, {path for path in paths if path is not None})

    @cached_property
    def _readers_out_of_sight(self) -> list[ast.Call]:
        return [*self._out_of_sight.calls_with_parameters(), *self._out_of_sight.calls_of_holders()]

    def _readers_in_loop(self, reset: ast.stmt, step: ast.stmt) -> list[ast.Call]:
        """The calls out of sight that may read gradients between a step and the next reset."""
        loop = self._blocks.loop_of(step)
        return [
            call
            for call in self._readers_out_of_sight
            if not reset.lineno <= call.lineno <= step.lineno
            and (any(parent is loop for parent in self._blocks.ancestors(call)) or "grad" in last_name(call).lower())
        ]

    @cached_property
    def _backwards_by_scope(self) -> dict[Scope | None, list[ast.stmt]]:
        """The statements that run backwards, by the function or module they are in."""
        found: dict[Scope | None, list[ast.stmt]] = {}
        for verdict in self._verdicts:
            for event in verdict.backwards:
                statement = self._blocks.statement_of(event.node)
                found.setdefault(self._blocks.scope_of(statement), []).append(statement)
        return found

    def _run_ahead(self, backward: ast.stmt) -> Iterator[ast.stmt]:
        """The statements that always run before a backward in its iteration: those above it, in blocks around it."""
        current: ast.stmt = backward
        loop = self._blocks.loop_of(backward)
        while True:
            block = self._blocks.block_of(current)
            yield from block[: block.index(current)]
            parent = next(self._blocks.ancestors(current))
            if parent is loop or not isinstance(parent, ast.stmt) or parent is self._blocks.scope_of(backward):
                return
            current = parent

    def _is_only_step_between(self, step: ast.stmt, backward: ast.stmt) -> bool:
        """Whether the step follows this backward in the same iteration, so that the reset comes round after it."""
        loop = self._blocks.loop_of(backward)
        return step.lineno > backward.lineno and loop is not None and loop in list(self._blocks.ancestors(step))


def makes_one_optimizer(script: Script, blocks: Blocks) -> bool:
    """Whether a file makes an optimizer, and no second one for what the first one trains or leaves alone."""
    made = [
        node
        for node in script.imports.nodes.of(ast.Call)
        if last_name(node) == "configure_optimizers" or script.is_optimizer_class(node.func)
    ]
    apart = blocks.exclude_each_other
    if any(not apart(one, other) for number, one in enumerate(made) for other in made[:number]):
        return False
    return bool(made) and not any(_is_made_again(node, blocks) for node in made)


def _is_made_again(node: ast.Call, blocks: Blocks) -> bool:
    """Whether an optimizer is made in a loop, of something that was made ahead of the loop."""
    loop = blocks.loop_of(node)
    if loop is None:
        return False
    bound = names_bound(*loop.body)
    return not names_read(*node.args) & bound


def _all_within(calls: Iterable[ast.Call], statements: Sequence[ast.stmt]) -> bool:
    within = {id(node) for node in walk(*statements)}
    return all(id(call) in within for call in calls)


def _calls_backward(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node) == "backward" for node in nodes_of_scope(statement))


def _clips(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node).startswith("clip_") for node in walk(statement))


def _gradients_read_elsewhere(script: Script) -> bool:
    """Whether anything in the file reads `.grad`, perhaps after a step."""
    return any(
        node.attr == "grad" and isinstance(node.ctx, ast.Load) and "autograd" not in (path_of(node) or "")
        for node in script.imports.nodes.of(ast.Attribute)
    )
