"""Following compound statements: branches, contexts and loops, each way as often as it matters."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from oomfix.script.facts.hints import Hints
from oomfix.script.facts.trace import Guard, Loop, Trace
from oomfix.script.facts.values import NUMBER, UNKNOWN, Graph, Kind, Value, flatten
from oomfix.script.interpreter.core import Path
from oomfix.script.interpreter.entering import Entering
from oomfix.script.interpreter.expressions import Called
from oomfix.script.interpreter.freezing import frozen_by, thawed_by
from oomfix.script.interpreter.phases import Phase, phases_told_apart, phases_written
from oomfix.script.interpreter.repeated_tests import asked_by, bound_by, recall, remember
from oomfix.script.interpreter.state import Binding, Frame, State
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.narrowing import narrowed_by, narrowed_to_terms
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.pieces import pieces_of

_MAX_WAYS = 30
"""How often a statement is followed on average, before what is left is given up."""


class Flow(Entering):
    """Follows blocks of statements, and one method per kind of statement that has a body."""

    tree: ast.Module

    def __init__(self, module_frame: Frame, trace: Trace, hints: Hints) -> None:
        super().__init__(module_frame, trace, hints)
        self.steps = 0
        self._most_steps = _MAX_WAYS * (1000 + hints.statements)
        self._carrying: dict[int, tuple[ast.stmt, Loop]] = {}
        self._rounds: list[list[State]] = []
        self._ends_always_taken: dict[ast.AST, set[ast.If]] = {}

    def _block(self, statements: list[ast.stmt]) -> None:
        """Follow statements in order, until a way out of the block is taken for certain."""
        depth = len(self.scopes)
        for statement in statements:
            if self.frame.state is None or self.steps > self._most_steps:
                break
            self.steps += 1
            self.visited.add(id(statement))
            self.statement = statement
            if self.loops and isinstance(statement, ast.Raise) and statement is not statements[-1]:
                continue  # somebody stopped a loop here to look at something; the script is what it was written for
            method = _STATEMENTS.get(type(statement))
            if method is not None:
                method(self, statement)
        del self.scopes[depth:]

    def _if(self, node: ast.If) -> None:
        truth = self.truth(self.evaluate(node.test))
        if _is_main_check(node.test):
            truth = True
        if truth is not None and not self._comes_out_otherwise_later(node.test):
            self._block(node.body if truth else node.orelse)
            return
        before = self.state
        narrowing, without = self._narrowed(node)
        test = self._written_out(node.test)
        self.frame.state = before.branch()
        if narrowing is not None and without:
            self.assign(narrowing, NUMBER, None)
        asked = asked_by(test, self.binding_of)
        recall(self.frame, asked, True)
        body_end = self._branch(Guard(node, test, True), node.body)
        self.frame.state = before.branch()
        recall(self.frame, asked, False)
        if narrowing is not None and not without:
            self.assign(narrowing, NUMBER, None)
        else_end = None if self._always_taken(node) else self._branch(Guard(node, test, False), node.orelse)
        sides = bound_by(before, body_end, else_end)
        self.frame.state = before.after([body_end, else_end])
        remember(self.frame, asked, sides)
        if self.frame.state is not None and (body_end is None) != (else_end is None):
            self.scopes.append(Guard(node, test, body_end is not None))

    def _comes_out_otherwise_later(self, test: ast.expr) -> bool:
        """`if total is None:`, of a name that is None ahead of a loop and set in it: it tells the first round apart."""
        name, _ = narrowed_by(test)
        binding = self.lookup(name.id) if name is not None else None
        if name is None or binding is None or binding.value.constant is not None:
            return False
        return any(
            isinstance(part, ast.Name) and part.id == name.id and isinstance(part.ctx, ast.Store)
            for part in walk(*self.loops[len(binding.loops) :])
        )

    def _always_taken(self, node: ast.If) -> bool:
        """Whether a test holds wherever it is reached, being the last of several one of which must."""
        if node.orelse or node not in self.hints.elifs:
            return False
        function = self.frame.function
        root = self.tree if function is None else function.node
        ends = self._ends_always_taken.get(root)
        if ends is None:
            # few scripts come to this question, and every module is a third of a millisecond of each run
            from oomfix.script.syntax.elif_chains import ends_always_taken

            ends = self._ends_always_taken[root] = ends_always_taken(root)
        return node in ends

    def _match(self, node: ast.Match) -> None:
        """Each case is a way of its own."""
        self.evaluate(node.subject)
        before = self.state
        ends: list[State | None] = []
        for case in node.cases:
            self.frame.state = before.branch()
            for pattern in walk(case.pattern):
                if isinstance(pattern, ast.MatchAs | ast.MatchStar) and pattern.name is not None:
                    self.bind(pattern.name, UNKNOWN, self.loops, None)
            if case.guard is not None:
                self.evaluate(case.guard)
            self.scopes.append(Guard(node, node.subject, True))
            self._block(case.body)
            self.scopes.pop()
            ends.append(self.frame.state)
        self.frame.state = before.after([*ends, before.branch()])

    def _written_out(self, test: ast.expr) -> ast.expr:
        """A decision kept in a variable (`update = (i + 1) % k == 0`), as it was written, also as one of several."""
        if isinstance(test, ast.BoolOp):
            return ast.BoolOp(test.op, [self._written_out(part) for part in test.values])
        binding = self.lookup(test.id) if isinstance(test, ast.Name) else None
        statement = binding.statement if binding is not None else None
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Compare | ast.BoolOp):
            return statement.value
        return test

    def _narrowed(self, branch: ast.If) -> tuple[ast.Name | None, bool]:
        """What a test leaves without a graph, and on which side: `if x is not None:`, `if type(x) == float:`."""
        name, without = narrowed_by(branch.test)
        if name is None:
            name, without = narrowed_to_terms(branch)
        binding = self.lookup(name.id) if name is not None else None
        return (name, without) if binding is not None and binding.value.graph else (None, without)

    def _branch(self, guard: Guard, body: list[ast.stmt]) -> State | None:
        self.scopes.append(guard)
        self.state.take_side(guard.test, guard.value)
        self._block(body)
        self.scopes.pop()
        return self.frame.state

    def _try(self, node: ast.Try) -> None:
        before = self.state
        self.frame.state = before.branch()
        self._block(node.body)
        if self.frame.state is not None:
            self._block(node.orelse)
        body_end = self.frame.state
        handling = self.handling_exception
        handler_ends: list[State | None] = []
        for handler in node.handlers:
            self.frame.state = before.branch()
            self.handling_exception = True
            if handler.name:
                self.bind(handler.name, UNKNOWN, self.loops, None)
            self._block(handler.body)
            handler_ends.append(self.frame.state)
        self.handling_exception = handling
        # What the body did is what happens; a handler is the exception.
        self.frame.state = before.after([body_end] if body_end is not None else handler_ends)
        if node.finalbody:
            coming_through = self.frame.state is not None
            if not coming_through:
                self.frame.state = before
            self._block(node.finalbody)
            if not coming_through:
                self.frame.state = None

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        grad, autocast, apex = self.state.grad, self.autocast, self.apex
        for item in node.items:
            value = self.context_of(item.context_expr, self.evaluate(item.context_expr))
            if value.kind is Kind.CONTEXT:
                self.enter_effects(value.ref)
                if item.optional_vars is not None:
                    entered = value.items[0] if value.items else UNKNOWN
                    self.assign(item.optional_vars, entered, node)
            elif item.optional_vars is not None:
                self.assign(item.optional_vars, value, node)
        left = self._rounds[-1] if self._rounds else []
        earlier, earlier_left = len(self.frame.exits), len(left)
        self._block(node.body)
        self.autocast, self.apex = autocast, apex
        # `return`, `break` and `continue` leave the context as well.
        for end in (self.frame.state, *self.frame.exits[earlier:], *left[earlier_left:]):
            if end is not None:
                end.grad = grad

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        source = self.evaluate(node.iter)
        phases = phases_written(node, source) or phases_told_apart(node, self.frame.function, self.hints)
        if self.loops and self._is_over_parts(node.iter):
            self.trace.loops_over_parts.add(node)
        if flatten(source).graph:
            self.trace.loops_over_graphs.add(node)
        if (pieces := pieces_of(node, self.as_assigned)) is not None:
            self.trace.loops_over_pieces[node] = pieces
            binding = self.binding_of(pieces.whole)
            if self.loops and binding is not None and binding.loops[: len(self.loops)] == self.loops:
                self.trace.pieces_of_batches.add(node)
        if (frozen := frozen_by(node)) is not None:
            network, trains = frozen
            if isinstance(value := self.evaluate(trains).constant, bool):
                self.freeze(network, not value)
        for whole in thawed_by(node, self.as_assigned(node.iter), self.hints.thawed):
            if path_of(whole) is not None and self.is_frozen(self.evaluate(whole), path_of(whole)):
                self.freeze(whole, False)
        element = self.element(source)
        layer = self.network_called(node, node, element)
        if phases:
            self._rounds_over(node, element, phases)
        else:
            self._loop(node, lambda: self._bind_element(node, element, layer))
        if self.frame.state is not None:
            self._block(node.orelse)

    def _bind_element(self, node: ast.For | ast.AsyncFor, element: Value, layer: Called | None) -> None:
        """What a round of a loop binds."""
        self.assign(node.target, element, node)
        if layer is not None:
            self.assign(*layer, node)

    def _is_over_parts(self, iterable: ast.expr) -> bool:
        """A display, or a list that this very iteration has made, also through `zip` and `enumerate`."""
        if isinstance(iterable, ast.Tuple | ast.List):
            return True
        if isinstance(iterable, ast.Call) and path_of(iterable.func) in ("zip", "enumerate", "reversed"):
            return bool(iterable.args) and all(self._is_over_parts(argument) for argument in iterable.args)
        binding = self.lookup(iterable.id) if isinstance(iterable, ast.Name) else None
        if binding is None or binding.loops != self.loops:
            return False
        return binding.value.kind in (Kind.SEQUENCE, Kind.CONTAINER) or bool(binding.value.graph)

    def _while(self, node: ast.While) -> None:
        self._loop(node, lambda: self.evaluate(node.test))
        if self.frame.state is not None:
            self._block(node.orelse)

    def _rounds_over(self, node: ast.For | ast.AsyncFor, element: Value, phases: list[Phase]) -> None:
        """A loop over a few phases (`for phase in ["train", "val"]`) is followed once for each."""
        way = self.way
        for index, phase in enumerate(phases):
            self.way = (*way, id(node), index)

            def bind(phase: Phase = phase) -> None:
                self.assign(node.target, element, node)
                self.assign(phase.target, phase.value, node)

            self._round(node, bind)
            if self.frame.state is None:
                break
        self.way = way

    def _loop(self, node: Loop, start: Callable[[], object]) -> None:
        """Follow a loop once, and again where it trains or feeds itself: what is carried over shows then."""
        backwards, bound = len(self.trace.backwards), len(self.bound)
        before = self.state
        self._round(node, start)
        trains = any(event.site.loop is node for event in self.trace.backwards[backwards:])
        if self.frame.state is not None and (trains or self._feeds_itself(node, self.bound[bound:])):
            self._mark_carried(node, self.bound[bound:])
            self._round(node, start)
        if self.frame.state is None:
            self.frame.state = before

    def _round(self, node: Loop, start: Callable[[], object]) -> None:
        self.scopes.append(node)
        self.loops = (*self.loops, node)
        self.runs = (*self.runs, self.trace.number("run", id(node), self.way))
        self.rounds = (*self.rounds, self.trace.next_round())
        self._rounds.append([])
        before = self.state
        start()
        self._block(node.body)
        self.frame.state = before.after([self.frame.state, *self._rounds.pop()])
        self.loops, self.runs, self.rounds = self.loops[:-1], self.runs[:-1], self.rounds[:-1]
        self.scopes.pop()

    def _feeds_itself(self, node: Loop, bound: list[Path]) -> bool:
        """What a forward gives in one round is an argument of that forward in the next."""
        return any(
            forward.site.loop is node and any(_reads(argument, key) for argument in forward.given)
            for key, binding in self._left_by_round(node, bound)
            for forward in self.trace.forwards_of(flatten(binding.value).origins)
        )

    def _mark_carried(self, node: Loop, bound: list[Path]) -> None:
        """Everything the first round leaves with a graph is carried into the second."""
        for key, binding in self._left_by_round(node, bound):
            number = self.trace.number("carried", (id(binding.statement), id(node)))
            assert binding.statement is not None
            self._carrying[number] = (binding.statement, node)
            bindings: Any = self.state.names if isinstance(key, str) else self.state.attributes
            bindings[key] = binding._replace(value=_with_carried(binding.value, frozenset({number})))

    def _left_by_round(self, node: Loop, bound: list[Path]) -> list[tuple[Path, Binding]]:
        """What a round has bound to something with a graph."""
        left = []
        for key in dict.fromkeys(bound):
            bindings: Any = self.state.names if isinstance(key, str) else self.state.attributes
            binding = bindings.get(key)
            if binding is None or binding.statement is None or node not in binding.loops:
                continue
            if flatten(binding.value).graph is Graph.YES:
                left.append((key, binding))
        return left

    def _leave_round(self, node: ast.stmt) -> None:
        if self._rounds:
            self._rounds[-1].append(self.state)
        self.frame.state = None


def _reads(node: ast.expr, key: Path) -> bool:
    """Whether an expression reads a path, or an attribute of that name."""
    if isinstance(key, tuple):
        return any(isinstance(part, ast.Attribute) and part.attr == key[1] for part in walk(node))
    return any(isinstance(part, ast.expr) and path_of(part) == key for part in walk(node))


def _with_carried(value: Value, numbers: frozenset[int]) -> Value:
    if value.items is not None:
        return Value(value.kind, items=tuple(_with_carried(item, numbers) for item in value.items))
    if value.graph is not Graph.YES:
        return value
    return Value(value.kind, value.graph, value.origins, ref=value.ref, divisors=value.divisors, carried_from=numbers)


def _is_main_check(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


_STATEMENTS: dict[type, Callable[[Any, Any], None]] = {
    ast.Expr: Flow._expression,
    ast.Assign: Flow._assign,
    ast.AnnAssign: Flow._annotated,
    ast.AugAssign: Flow._augmented,
    ast.Delete: Flow._delete,
    ast.Return: Flow._return,
    ast.Raise: Flow._raise,
    ast.Break: Flow._leave_round,
    ast.Continue: Flow._leave_round,
    ast.Assert: Flow._assert,
    ast.Import: Flow._import,
    ast.ImportFrom: Flow._import,
    ast.Global: Flow._global,
    ast.Nonlocal: Flow._nonlocal,
    ast.FunctionDef: Flow._define,
    ast.AsyncFunctionDef: Flow._define,
    ast.ClassDef: Flow._class,
    ast.If: Flow._if,
    ast.Match: Flow._match,
    ast.Try: Flow._try,
    ast.With: Flow._with,
    ast.AsyncWith: Flow._with,
    ast.For: Flow._for,
    ast.AsyncFor: Flow._for,
    ast.While: Flow._while,
}
