"""The in-place form: backward, step, clipping and precision go through the manager, each where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope, nodes_of_scope_body
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad
from oomfix.rewrite.dataflow.optimizer_loops import loop_over_optimizers, optimizer_of
from oomfix.rewrite.facts.amp import differentiated
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.facts.verdict import Scaling, Verdict
from oomfix.rewrite.in_place.resets import Resets
from oomfix.rewrite.text.layout import Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.facts.trace import Backward, Step
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import only_argument


class InPlace:
    """Edits that hand training over to the manager called `name`.

    Args:
        reading: the script.
        name: the manager.
        scaling: who scales losses.
    """

    def __init__(self, reading: Reading, name: str, scaling: Scaling) -> None:
        self._reading, self._source = reading, reading.source
        self._blocks, self._layout, self._amp = reading.blocks, reading.layout, reading.amp
        self._name = name
        self._scaling = scaling

    def edits(self, verdicts: list[Verdict]) -> list[Edit]:
        """Every edit of the loops that are not left alone."""
        rewritten = [verdict for verdict in verdicts if verdict.form != "none"]
        if not rewritten:
            return []
        backwards = {id(event.node): event for verdict in rewritten for event in verdict.backwards}
        liftable = {id(call) for verdict in rewritten for call in verdict.liftable}
        steps = {id(step.node): step for verdict in rewritten for step in verdict.steps}
        handed = {id(e.node) for verdict in rewritten if verdict.handed_to is not None for e in verdict.backwards}
        edits = [
            self._where_it_is_made(event) if key in handed else self._backward(event, key in liftable)
            for key, event in backwards.items()
        ]
        if self._scaling == "script's":
            return edits
        edits += self._amp.edits(self._name, self._layout, list(backwards.values()), list(steps.values()))
        removed: set[int] = set()
        resets = Resets(self._reading, verdicts)
        for step in steps.values():
            edits += self._step(step, resets, removed)
        for verdict in rewritten if self._scaling == "ours" else ():
            edits += self._unscaled(verdict, [event.node for event in backwards.values()])
        return list(dict.fromkeys(edits))

    def _where_it_is_made(self, event: Backward) -> Edit:
        """A backward of the manager behind what computes a loss that is handed to something else; it is lifted."""
        from oomfix.rewrite.facts.handed_losses import handed_loss  # few scripts have such a loop

        loss = handed_loss(event, self._blocks)
        assert loss is not None
        end = self._layout.last_line(loss.made_by)
        behind = self._layout.span(Lines(end, end))[1]
        text = f"{self._layout.newline}{self._layout.margin(loss.made_by)}{self._name}.backward({loss.name})"
        return Edit(behind, behind, text)

    def _backward(self, event: Backward, lifted: bool) -> Edit:
        assert isinstance(event.node.func, ast.Attribute)
        own = self._scaling == "script's"
        root = self._source.segment(event.node.func.value if own else differentiated(event.node))
        given = [] if lifted else [f"gradient={self._source.segment(argument)}" for argument in event.node.args]
        for keyword in () if lifted else event.node.keywords:
            if keyword.arg != "retain_graph" or self._keeps_graph_for_another(event):
                given.append(f"{keyword.arg}={self._source.segment(keyword.value)}")
        return Edit(*bounds(self._source, event.node), f"{self._name}.backward({', '.join([root, *given])})")

    def _keeps_graph_for_another(self, event: Backward) -> bool:
        """Whether a backward may keep its graph because another one needs it, on one of the ways that lead to it."""
        ways = [other for other in self._reading.script.backwards if other.node is event.node]
        return not all(other.retains for other in ways) or any(map(self._reading.script.is_needed_later, ways))

    def _step(self, step: Step, resets: Resets, removed: set[int]) -> Iterator[Edit]:
        node, optimizer = step.node, optimizer_of(step)
        path = path_of(optimizer)
        statement = self._blocks.statement_of(node)
        also_resets = path is not None
        gone = resets.behind(statement, path) or resets.ahead(statement, path)
        if gone is not None and id(gone) not in removed:
            removed.add(id(gone))
            yield without(self._layout, gone, self._blocks.block_of(gone))
        elif gone is None:
            also_resets = resets.comes_round(statement, path)
        option = "" if also_resets else ", zero_grad=False"
        yield Edit(*bounds(self._source, node), f"{self._name}.step({self._source.segment(optimizer)}{option})")

    def _unscaled(self, verdict: Verdict, backwards: list[ast.Call]) -> Iterator[Edit]:
        """`memory.unscale_(optimizer)` ahead of what clips or reads gradients between a backward and a step.

        Args:
            backwards: those of all loops; a loop of another function may be stepped behind one of them.
        """
        known = self._amp.unscaled(verdict.steps)
        for step in verdict.steps:
            optimizer = optimizer_of(step)
            path, scope = path_of(optimizer), self._blocks.scope_of(step.node)
            # what is stepped behind a loop may be made there, by a backward of its own
            own = [] if step in verdict.loop.later_steps else [event.node for event in verdict.backwards]
            ahead = self._ahead_in(scope, own, step.node) or self._ahead_in(scope, backwards, step.node)
            before = sorted(ahead, key=_place)
            places = list(map(_place, before))
            # the last one, and those that run in its place in another branch
            last = [_place(n) for n in before if n is before[-1] or self._blocks.exclude_each_other(n, before[-1])]
            apart = self._blocks.exclude_each_other
            others = [other.node for other in verdict.steps if not apart(other.node, step.node)]
            passed = [_place(other) for other in others if _place(other) < _place(step.node)]
            passed = [place for place in passed if not places or place > places[0]]
            first = max([*sorted(last)[:1], *passed], default=(0, 0))
            mine = [call for call in known if not apart(call, step.node) and _place(call) <= _place(step.node)]
            if scope is None or any(first < _place(call) or self._is_of(call, path, places) for call in mine):
                continue
            if not before:
                first = _place(scope) if not isinstance(scope, ast.Module) else (0, 0)
            # clips of several optimizers may all stand ahead of the first step
            readers = [self._first_readers(scope, place, step.node) for place in (first, max(last, default=first))]
            for reader in readers[0] or readers[1]:
                call = f"{self._name}.unscale_({self._source.segment(optimizer)})"
                loop = loop_over_optimizers(step, reader, self._blocks)
                yield self._ahead_of(reader, call, loop)

    @staticmethod
    def _is_of(call: ast.Call, path: str | None, backwards: list[tuple[int, int]]) -> bool:
        """Whether a call of `unscale_` is given this optimizer, behind the last of the backwards at some places."""
        given = only_argument(call)
        is_given = path is not None and given is not None and path_of(given) == path
        return is_given and _place(call) > max(backwards, default=(0, 0))

    def _ahead_of(self, statement: ast.stmt, call: str, loop: ast.For | None = None) -> Edit:
        """The edit that runs a call ahead of a statement, also of one that shares its line with what is ahead of it.

        It runs in each round of a loop like `loop` where that is given.
        """
        layout, start = self._layout, bounds(self._source, statement)[0]
        ahead = self._source.text[self._source.line_starts[statement.lineno - 1] : start]
        each = "" if loop is None else self._header_like(loop)
        if not ahead.strip():
            here, margin = layout.above_comments(statement), layout.margin(statement)
            lines = [f"{margin}{call}"] if not each else [f"{margin}{each}:", f"{margin}{layout.unit}{call}"]
            return layout.inserted(here, lines)
        call = f"[{call} {each}]" if each else call
        if not ahead.rstrip().endswith(":"):
            return Edit(start, start, f"{call}; ")
        margin = ahead[: len(ahead) - len(ahead.lstrip())] + layout.unit
        header = start - len(ahead) + len(ahead.rstrip())
        return Edit(header, start, "".join(f"{layout.newline}{margin}{line}" for line in (call, "")))

    def _header_like(self, loop: ast.For) -> str:
        """`for optimizer in optimizers`, as a loop and within brackets, where `a, b` has to be `(a, b)`."""
        iterable = ast.unparse(loop.iter) if isinstance(loop.iter, ast.Tuple) else self._source.segment(loop.iter)
        return f"for {self._source.segment(loop.target)} in {iterable}"

    def _ahead_in(self, scope: Scope | None, nodes: list[ast.Call], step: ast.Call) -> list[ast.Call]:
        """Those of the nodes that stand in a scope above a step."""
        return [node for node in nodes if self._blocks.scope_of(node) is scope and _place(node) < _place(step)]

    def _first_readers(self, scope: Scope, first: tuple[int, int], step: ast.Call) -> list[ast.stmt]:
        """The statements between a place and a step that clip or read gradients, where none has done so for certain."""
        around_step = {id(parent) for parent in self._blocks.ancestors(step)}
        readers = [
            node
            for node in nodes_of_scope_body(scope)
            if isinstance(node, ast.stmt) and first < _place(node) < _place(step)
            # compound statements have a reader in them, or none; so has the loop that the step is in
            if not isinstance(node, ast.If | ast.With | ast.Try | ast.While | FunctionNode | ast.ClassDef)
            and id(node) not in around_step
            and reads_gradients(node)
            and not is_zero_grad(node)
            and not self._blocks.exclude_each_other(node, step)
        ]
        readers.sort(key=_place)
        found = self._not_behind_another(readers)
        if len(found) > 1:
            # one ahead of all, unless that is ahead of a backward, or where no step follows
            around = self._blocks.conditions_of(found[0])
            outer = [one for one in around if _place(one) > first and one not in self._blocks.conditions_of(step)]
            found = self._not_behind_another([*outer[-1:], *readers])
        return found

    def _not_behind_another(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements, given by place, that can run without an earlier one having run."""
        found: list[ast.stmt] = []
        for statement in statements:
            around = set(map(id, self._blocks.conditions_of(statement)))
            before = (other for other in found if not self._blocks.exclude_each_other(other, statement))
            if not any(around.issuperset(map(id, self._blocks.conditions_of(other))) for other in before):
                found.append(statement)
        return found


def _place(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where a node begins: its line, and how far into that."""
    return node.lineno, node.col_offset
