"""The in-place form: backward, step, clipping and precision go through the manager, each where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from oomfix.rewrite.amp import Amp
from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.effects import is_zero_grad, last_name, leaves
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.liveness import FunctionNode, Scope, names_bound, names_read, nodes_of_scope, nodes_of_scope_body
from oomfix.rewrite.prepare import is_optimizer_class
from oomfix.rewrite.removal import without
from oomfix.rewrite.scale import reads_gradients
from oomfix.rewrite.step_functions import StepFunction
from oomfix.rewrite.verdict import Scaling, Verdict
from oomfix.script import Script
from oomfix.script.edits import Edit, bounds
from oomfix.script.names import path_of
from oomfix.script.nodes import walk
from oomfix.script.trace import Backward, Step


class InPlace:
    """Edits that hand training over to the manager called `name`.

    Args:
        script: the script.
        blocks: where its nodes stand.
        layout: what its text looks like.
        amp: what it does about precision.
        name: the manager.
        scaling: who scales losses.
    """

    def __init__(
        self, script: Script, blocks: Blocks, layout: Layout, amp: Amp, name: str, scaling: Scaling = "ours"
    ) -> None:
        self._script = script
        self._source = script.source
        self._blocks = blocks
        self._layout = layout
        self._amp = amp
        self._name = name
        self._scaling = scaling

    @cached_property
    def _one_optimizer(self) -> bool:
        return _makes_one_optimizer(self._script, self._blocks)

    @cached_property
    def _gradients_are_read(self) -> bool:
        return _gradients_read_elsewhere(self._script)

    def edits(self, verdicts: list[Verdict]) -> list[Edit]:
        """Every edit of the loops that are not left alone."""
        rewritten = [verdict for verdict in verdicts if verdict.form != "none"]
        if not rewritten:
            return []
        backwards = {id(event.node): event for verdict in rewritten for event in verdict.backwards}
        liftable = {id(call) for verdict in rewritten for call in verdict.liftable}
        steps = {id(step.node): step for verdict in rewritten for step in verdict.steps}
        edits = [self._backward(event, id(event.node) in liftable) for event in backwards.values()]
        if self._scaling == "script's":
            return edits
        edits += self._amp.edits(self._name, self._layout, list(backwards.values()), list(steps.values()))
        removed: set[int] = set()
        by_scope = self._backwards_by_scope(verdicts)
        for step in steps.values():
            edits += self._step(step, verdicts, by_scope, removed)
        for verdict in rewritten if self._scaling == "ours" else ():
            edits += self._unscaled(verdict, [event.node for event in backwards.values()])
        return list(dict.fromkeys(edits))

    def _backward(self, event: Backward, lifted: bool) -> Edit:
        assert isinstance(event.node.func, ast.Attribute)
        own = self._scaling == "script's"
        root = self._source.segment(event.node.func.value if own else self._amp.root_of(event.node))
        given = [] if lifted else [f"gradient={self._source.segment(argument)}" for argument in event.node.args]
        for keyword in () if lifted else event.node.keywords:
            given.append(f"{keyword.arg}={self._source.segment(keyword.value)}")
        return Edit(*bounds(self._source, event.node), f"{self._name}.backward({', '.join([root, *given])})")

    # -- steps and gradients -----------------------------------------------------------------------------------

    def _step(
        self, step: Step, verdicts: list[Verdict], by_scope: dict[Scope | None, list[ast.stmt]], removed: set[int]
    ) -> Iterator[Edit]:
        node = step.node
        assert isinstance(node.func, ast.Attribute)
        optimizer = node.args[0] if step.scaled and node.args else node.func.value
        text = self._source.segment(optimizer)
        path = path_of(optimizer)
        statement = self._blocks.statement_of(node)
        resets = path is not None
        gone = self._reset_behind(statement, path) or self._reset_ahead(statement, path, verdicts)
        if gone is not None and id(gone) not in removed:
            removed.add(id(gone))
            yield without(self._layout, gone, self._blocks.block_of(gone))
        elif gone is None:
            resets = self._is_reset_before_backward(statement, path, by_scope)
        option = "" if resets else ", zero_grad=False"
        yield Edit(*bounds(self._source, node), f"{self._name}.step({text}{option})")

    def _reset_behind(self, statement: ast.stmt, path: str | None) -> ast.stmt | None:
        """`optimizer.zero_grad()` behind the step in its block, where nothing in between looks at gradients."""
        block = self._blocks.block_of(statement)
        for other in block[block.index(statement) + 1 :]:
            if _resets(other, path):
                return other
            if reads_gradients(other) or leaves(other) or _calls_backward(other) or not isinstance(other, ast.Expr):
                return None
        return None

    def _reset_ahead(self, statement: ast.stmt, path: str | None, verdicts: list[Verdict]) -> ast.stmt | None:
        """`optimizer.zero_grad()` ahead of the one backward of the file, in one block with it and the one step.

        It stays where the optimizer or the loop is in another file, which may leave gradients behind or read them;
        where another one may come after it, whose parameters have gathered gradients meanwhile (stages of a training);
        where something is given the network between a step and the next reset, as an attack is that runs a backward of
        its own out of sight; and where an exception may skip the step and the training goes on with the gradients of
        that batch.
        """
        if not self._one_optimizer or any(isinstance(verdict.loop, StepFunction) for verdict in verdicts):
            return None
        if len(verdicts) != 1 or len(verdicts[0].steps) != 1 or len(verdicts[0].backwards) != 1:
            return None
        if verdicts[0].kept_steps:
            return None
        if len({id(event.node) for event in self._script.backwards}) != 1 or self._gradients_are_read:
            return None
        backward = self._blocks.statement_of(verdicts[0].backwards[0].node)
        block = self._blocks.block_of(statement)
        if backward not in block or block.index(backward) > block.index(statement):
            return None
        reset = next((other for other in block[: block.index(backward)] if _resets(other, path)), None)
        if reset is None:
            return None
        away = [*block[: block.index(reset)], *block[block.index(statement) + 1 :]]
        if any(self._hands_network_on(other, verdicts[0]) for other in away):
            return None
        passed = block[block.index(reset) : block.index(statement)]
        if any(leaves(other) or (reads_gradients(other) and not _clips(other)) for other in passed):
            return None
        if self._blocks.may_be_skipped_by_exceptions(statement):
            return None
        return reset if len(list(self._script.calls_of_method("zero_grad"))) == 1 else None

    def _hands_network_on(self, statement: ast.stmt, verdict: Verdict) -> bool:
        """Whether a statement gives the network to something, or asks something that was made of it.

        A function of the file may hand it on to something out of sight.
        """
        networks = {forward.path for forward in verdict.loop.forwards} - {None}
        keepers = {
            path_of(target)
            for node in walk(self._source.tree)
            if isinstance(node, ast.Assign) and _is_given(node.value, networks)
            for target in node.targets
        } - {None}
        for call in (node for node in walk(statement) if isinstance(node, ast.Call)):
            if path_of(call.func) == "torch.save":
                continue
            asked = {path_of(call.func), path_of(call.func.value) if isinstance(call.func, ast.Attribute) else None}
            if _is_given(call, networks) or (asked & keepers) - networks:
                return True
        return False

    def _backwards_by_scope(self, verdicts: list[Verdict]) -> dict[Scope | None, list[ast.stmt]]:
        """The statements that run backwards, by the function or module they are in."""
        found: dict[Scope | None, list[ast.stmt]] = {}
        for verdict in verdicts:
            for event in verdict.backwards:
                statement = self._blocks.statement_of(event.node)
                found.setdefault(self._blocks.scope_of(statement), []).append(statement)
        return found

    def _is_reset_before_backward(
        self, statement: ast.stmt, path: str | None, by_scope: dict[Scope | None, list[ast.stmt]]
    ) -> bool:
        """Whether the optimizer's gradients are reset on every way from its step to the next backward."""
        if path is None or self._gradients_are_read:
            return False
        return any(
            any(_resets(other, path) for other in self._run_ahead(backward))
            and self._only_step_between(statement, backward, path)
            for backward in by_scope.get(self._blocks.scope_of(statement), ())
        )

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

    def _only_step_between(self, step: ast.stmt, backward: ast.stmt, path: str) -> bool:
        """Whether the step follows this backward in the same iteration, so that the reset comes round after it."""
        loop = self._blocks.loop_of(backward)
        return step.lineno > backward.lineno and loop is not None and loop in list(self._blocks.ancestors(step))

    def _unscaled(self, verdict: Verdict, backwards: list[ast.Call]) -> Iterator[Edit]:
        """`memory.unscale_(optimizer)` ahead of what clips or reads gradients between a backward and a step.

        Args:
            backwards: those of all loops; a loop of another function may be stepped behind one of them.
        """
        known = self._amp.unscaled(verdict.steps)
        for step in verdict.steps:
            assert isinstance(step.node.func, ast.Attribute)
            optimizer = step.node.args[0] if step.scaled and step.node.args else step.node.func.value
            scope = self._blocks.scope_of(step.node)
            own = [event.node for event in verdict.backwards]
            before = self._ahead_in(scope, own, step.node) or self._ahead_in(scope, backwards, step.node)
            lines = sorted(node.lineno for node in before)
            # the last one, and those that run in its place in another branch
            last = [n.lineno for n in before if n is before[-1] or self._blocks.exclude_each_other(n, before[-1])]
            apart = self._blocks.exclude_each_other
            others = [other.node for other in verdict.steps if not apart(other.node, step.node)]
            passed = [other.lineno for other in others if other.lineno < step.node.lineno]
            first = max([*sorted(last)[:1], *(line for line in passed if not lines or line > lines[0])], default=0)
            mine = (call.lineno for call in known if not apart(call, step.node))
            if scope is None or any(first < line <= step.node.lineno for line in mine):
                continue
            if not before:
                first = scope.lineno if not isinstance(scope, ast.Module) else 0
            # clips of several optimizers may all stand ahead of the first step
            readers = [self._first_readers(scope, line, step.node) for line in (first, max(last, default=first))]
            for reader in readers[0] or readers[1]:
                start = self._layout.above_comments(reader)
                margin = self._layout.margin(reader)
                text = f"{margin}{self._name}.unscale_({self._source.segment(optimizer)}){self._layout.newline}"
                yield Edit(start, start, text)

    def _ahead_in(self, scope: Scope | None, nodes: list[ast.Call], step: ast.Call) -> list[ast.Call]:
        """Those of the nodes that stand in a scope above a step."""
        return [node for node in nodes if self._blocks.scope_of(node) is scope and node.lineno < step.lineno]

    def _first_readers(self, scope: Scope, first: int, step: ast.Call) -> list[ast.stmt]:
        """The statements between a line and a step that clip or read gradients, where none has done so for certain."""
        around_step = {id(parent) for parent in self._blocks.ancestors(step)}
        readers = [
            node
            for node in nodes_of_scope_body(scope)
            if isinstance(node, ast.stmt) and first < node.lineno < step.lineno
            # compound statements have a reader in them, or none; so has the loop that the step is in
            if not isinstance(node, ast.If | ast.With | ast.Try | ast.While | FunctionNode | ast.ClassDef)
            and id(node) not in around_step
            and reads_gradients(node)
            and not is_zero_grad(node)
            and not self._blocks.exclude_each_other(node, step)
        ]
        readers.sort(key=lambda node: node.lineno)
        found = self._not_behind_another(readers)
        if len(found) > 1:
            # one ahead of all, unless that is ahead of a backward, or where no step follows
            around = self._blocks.conditions_of(found[0])
            outer = [one for one in around if one.lineno > first and one not in self._blocks.conditions_of(step)]
            found = self._not_behind_another([*outer[-1:], *readers])
        return found

    def _not_behind_another(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements, given by line, that can run without an earlier one having run."""
        found: list[ast.stmt] = []
        for statement in statements:
            around = set(map(id, self._blocks.conditions_of(statement)))
            before = (other for other in found if not self._blocks.exclude_each_other(other, statement))
            if not any(around.issuperset(map(id, self._blocks.conditions_of(other))) for other in before):
                if self._layout.own_lines(statement) is not None:
                    found.append(statement)
        return found


def _makes_one_optimizer(script: Script, blocks: Blocks) -> bool:
    """Whether a file makes an optimizer, and no second one for what the first one trains or leaves alone."""
    made = [
        node
        for node in script.imports.nodes
        if isinstance(node, ast.Call)
        and (last_name(node) == "configure_optimizers" or is_optimizer_class(script, node.func))
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
    bound = {name for statement in loop.body for name in names_bound(statement)}
    return not any(names_read(argument) & bound for argument in node.args)


def _is_given(value: ast.expr, networks: set[str | None]) -> bool:
    given = (*value.args, *(keyword.value for keyword in value.keywords)) if isinstance(value, ast.Call) else ()
    return any(path_of(one) in networks for one in given)


def _resets(statement: ast.stmt, path: str | None) -> bool:
    return (
        path is not None
        and isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr == "zero_grad"
        and path_of(statement.value.func.value) == path
    )


def _calls_backward(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node) == "backward" for node in nodes_of_scope(statement))


def _clips(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node).startswith("clip_") for node in walk(statement))


def _gradients_read_elsewhere(script: Script) -> bool:
    """Whether anything in the file reads `.grad`, perhaps after a step."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "grad"
        and isinstance(node.ctx, ast.Load)
        and "autograd" not in (path_of(node) or "")
        for node in script.imports.nodes
    )
