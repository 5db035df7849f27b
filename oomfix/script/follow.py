"""Following statements: the control flow of a script, once per way that matters."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oomfix.script.contexts import held_elsewhere, is_literal_loop
from oomfix.script.definitions import Class, Function
from oomfix.script.expressions import Expressions
from oomfix.script.hints import read_hints
from oomfix.script.names import USUAL_NAMES, imported, path_of
from oomfix.script.nodes import Scope
from oomfix.script.state import Binding, Frame, Layer, Names, State
from oomfix.script.trace import Guard, Loop, Trace
from oomfix.script.values import (
    NUMBER,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    combine,
    constant,
    flatten,
    join,
)

_BUILTINS = frozenset(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
_MAX_WAYS = 30
"""How often a statement is followed on average, before what is left is given up."""


class Follower(Expressions):
    """Follows a module from its first line, then every function that was not reached from there."""

    def __init__(self, tree: ast.Module, nodes: list[tuple[ast.AST, Scope]]) -> None:
        known = {name: name for name in _BUILTINS} | USUAL_NAMES
        names = Names(own={name: Binding(Value(Kind.EXTERNAL, ref=ref), (), None) for name, ref in known.items()})
        super().__init__(Frame(None, State(names)), Trace(), read_hints(nodes))
        self.tree = tree
        self.functions: list[Function] = []
        self._defined: dict[int, Function] = {}
        self.visited: set[int] = set()
        self.steps = 0
        self._most_steps = _MAX_WAYS * (1000 + self.hints.statements)
        self._carrying: dict[int, tuple[ast.stmt, Loop]] = {}
        self._instances: dict[Class, Value] = {}
        self._invented_calls: list[ast.Call] = []
        """Calls that are in no file are kept, so that no other node takes over their identity."""
        self._rounds: list[list[State]] = []

    # The whole file

    def follow(self) -> Trace:
        """Follow everything; returns what happened."""
        self._block(self.tree.body)
        if self.frame.state is None:
            self.frame.state = State(Names())
        for function in self._callers_first():
            if not self._reached(function):
                self._enter_unreached(function)
        return self.trace

    def _callers_first(self) -> list[Function]:
        """The functions, those first that no other function mentions: helpers are reached through their callers."""
        mentions = self.hints.mentions
        return sorted(
            self.functions,
            key=lambda function: bool(mentions.get(function.name, set()) - {function.node, None}),
        )

    def _reached(self, function: Function) -> bool:
        body = function.node.body
        if isinstance(body, ast.expr):
            return True
        return all(id(statement) in self.visited for statement in body) and all(
            id(child) in self.visited
            for statement in body
            for child in ast.walk(statement)
            if isinstance(child, ast.For | ast.While)
        )

    def _enter_unreached(self, function: Function) -> None:
        owner = function.owner
        if owner is not None and owner.is_lightning:
            return
        inside = owner is not None and owner.is_module and self._belongs_to_forward(function, owner)
        if inside and function.name != "forward":
            return
        receiver = None if owner is None or function.is_static else self._instance_for(owner)
        arguments = {}
        frame = Frame(
            function=function,
            state=self.state.entering(Names()),
            closure=function.closure,
            caller=None,
            instance=self.instance_of(receiver) if receiver is not None else None,
        )
        parameters = function.node.args
        for index, parameter in enumerate([*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]):
            value = receiver if index == 0 and receiver is not None else UNKNOWN
            arguments[parameter.arg] = Binding(value, (), None)
        for extra in (parameters.vararg, parameters.kwarg):
            if extra is not None:
                arguments[extra.arg] = Binding(UNKNOWN, (), None)
        assert frame.state is not None
        frame.state.names = Names(own=arguments)
        frame.state.grad = Graph.YES
        frame.state.evaluating = Layer()
        outer, self.way = self.way, ("entry", id(function.node))
        if inside:
            self.enclosing_forward, self.enclosing_depth = self.trace.number("inside", id(function.node)), 0
        returned = self.run(frame, function, None)
        self.way, self.enclosing_forward, self.enclosing_depth = outer, None, 1 << 30
        for origin in flatten(returned).origins:
            if origin in self.trace.forwards:
                self.trace.forwards[origin].escaped = True
            elif origin in self.trace.keeps:
                self.trace.keeps[origin].returned = True

    def _belongs_to_forward(self, function: Function, owner: Class) -> bool:
        """A module's method that nothing calls: part of its forward, unless the class trains itself."""
        return function.name == "forward" or not owner.training_methods or self._is_part_of_forward(function)

    def _instance_for(self, owner: Class) -> Value:
        """An object of a class that is never made in sight: made here, with unknown arguments."""
        call = ast.Call(func=ast.Name(id=owner.name, ctx=ast.Load()), args=[], keywords=[])
        existing = self._instances.get(owner)
        if existing is None:
            constructor = owner.find("__init__")
            existing = self._instantiate_unknown(owner, call, constructor)
            self._instances[owner] = existing
        return existing

    def _instantiate_unknown(self, owner: Class, call: ast.Call, constructor: Function | None) -> Value:
        self._invented_calls.append(call)
        keywords = {"**": UNKNOWN}
        arguments = [] if constructor is None else [UNKNOWN] * (len(constructor.node.args.args) - 1)
        return self._instantiate(call, owner, arguments, keywords)

    def run(self, frame: Frame, function: Function, call: ast.expr | None) -> Value:
        """Run a function's body in its frame; returns what it returns."""
        caller, way, autocast, apex = self.frame, self.way, self.autocast, self.apex
        guards, statement = self.scopes, self.statement
        state = frame.state
        assert state is not None
        if call is not None:
            self.way = (*way, id(call))
        grad = state.grad
        self.frame = frame
        for effects in function.effects:
            self.enter_effects(effects.ref)
        body = function.node.body
        if isinstance(body, ast.expr):
            frame.returns.append(self.evaluate(body))
            frame.exits.append(self.state)
        else:
            self._block(body)
            if frame.state is not None:
                frame.exits.append(frame.state)
                frame.returns.append(Value(Kind.NUMBER, constant=None))
        frame.state = state.after(list(frame.exits)) or state
        self.frame, self.way, self.autocast, self.apex = caller, way, autocast, apex
        self.scopes, self.statement = guards, statement
        if call is not None:
            self.state.leave(frame.state)
            if function.effects or frame.state.grad == grad:
                self.state.grad = grad
            else:
                self.state.grad = frame.state.grad
        return self._returned(frame)

    def _returned(self, frame: Frame) -> Value:
        if frame.yields:
            content = combine([flatten(value) for value in frame.yields])
            if all(value.items is not None for value in frame.yields):
                return Value(Kind.SEQUENCE, items=(frame.yields[0],))
            return Value(Kind.CONTAINER, content.graph, content.origins)
        values = frame.returns
        if len(values) > 1 and values[-1].constant is None:
            values = [
                value for value in values if value.constant is not None or value.kind is not Kind.NUMBER
            ] or values
        if not values:
            return UNKNOWN
        result = values[0]
        for value in values[1:]:
            result = join(result, value)
        return result

    # Statements

    def _block(self, statements: list[ast.stmt]) -> None:
        """Follow statements in order, until a way out of the block is taken for certain."""
        depth = len(self.scopes)
        for statement in statements:
            if self.frame.state is None or self.steps > self._most_steps:
                break
            self.steps += 1
            self.visited.add(id(statement))
            self.statement = statement
            method = _STATEMENTS.get(type(statement))
            if method is not None:
                method(self, statement)
        del self.scopes[depth:]

    def _expression(self, node: ast.Expr) -> None:
        self.evaluate(node.value)

    def _assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self._store(target, value, node, node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target, self.evaluate(node.value), node, node.value)

    def _store(self, target: ast.expr, value: Value, statement: ast.stmt, value_node: ast.expr) -> None:
        if isinstance(value_node, ast.Constant) and value.constant is not None:
            # A literal is a setting somebody will change: both branches of what it decides are followed.
            value = NUMBER
        path = path_of(target)
        sums = [value_node.body, value_node.orelse] if isinstance(value_node, ast.IfExp) else [value_node]
        for node in sums:
            if path is not None and isinstance(node, ast.BinOp) and self._adds_to(node, path):
                self._accumulate(target, path, value, statement, node)
                return
        if isinstance(target, ast.Subscript) and path is None:
            self._store_entry(target, value, value_node)
            return
        self.assign(target, value, statement)

    def _accumulate(
        self, target: ast.expr, path: str, value: Value, statement: ast.stmt, value_node: ast.BinOp
    ) -> None:
        """`total = total + loss`, `total = 0.9 * total + 0.1 * loss`."""
        loops = self._age(target, self.binding_of(target))
        terms = [(term, self.evaluate(term)) for term in _terms(value_node) if not self._adds_to(term, path)]
        carrying = [(term, term_value) for term, term_value in terms if flatten(term_value).graph]
        kept: frozenset[int] = frozenset()
        if carrying:
            term, term_value = carrying[0]
            alone = len(carrying) == 1
            manner = "store" if term_value.kind in (Kind.SEQUENCE, Kind.CONTAINER) else "add"
            kept = self.keep(target, path, term, term_value, manner, loops, detachable=alone)
        grown = flatten(value)
        self.assign(target, grown.with_graph(grown.graph, grown.origins | kept), statement, loops)

    def _age(self, target: ast.expr, binding: Binding | None) -> tuple[Loop, ...]:
        """The loops around the making of a target; one that the round before has left is as old as the loop."""
        if binding is None:
            return self._loops_of_root(target)
        return binding.loops[:-1] if flatten(binding.value).carried_from else binding.loops

    def _adds_to(self, node: ast.expr, path: str) -> bool:
        """The value under a path goes into an expression by arithmetic."""
        if isinstance(node, ast.BinOp):
            return self._adds_to(node.left, path) or self._adds_to(node.right, path)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            key = node.args[0]  # `log.get("loss", 0) + loss`
            return isinstance(key, ast.Constant) and path == f"{path_of(node.func.value)}[{key.value!r}]"
        return path_of(node) == path

    def _store_entry(self, target: ast.Subscript, value: Value, value_node: ast.expr) -> None:
        """`kept[i] = loss`, with an index that changes."""
        base = self.evaluate(target.value)
        self.evaluate(target.slice)
        content = flatten(value)
        if not content.graph or base.kind is not Kind.CONTAINER:
            return
        binding = self.binding_of(target.value)
        loops = binding.loops if binding is not None else self._loops_of_root(target.value)
        path = path_of(target.value)
        kept = self.keep(target, path or ast.unparse(target), value_node, content, "store", loops)
        if path is not None:
            grown = Value(Kind.CONTAINER, content.graph, base.origins | content.origins | kept)
            self.assign(target.value, grown, binding.statement if binding else None, loops)

    def _augmented(self, node: ast.AugAssign) -> None:
        value = self.evaluate(node.value)
        old = self.evaluate(node.target)
        binding = self.binding_of(node.target)
        path = path_of(node.target)
        known = binding is not None or isinstance(node.target, ast.Subscript) or path is None or "." in path
        loops = self._age(node.target, binding)
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            content = flatten(old)
            value = replace(content, divisors=content.divisors | {ast.unparse(node.value)})
            self.assign(node.target, value, node, loops)
            return
        kept: frozenset[int] = frozenset()
        entry_of_array = isinstance(node.target, ast.Subscript) and self._is_array(node.target)
        if isinstance(node.op, ast.Add | ast.Sub) and known and not entry_of_array:
            if value.kind in (Kind.SEQUENCE, Kind.CONTAINER):
                kept = self.keep(node.target, path or ast.unparse(node.target), node.value, value, "store", loops)
            else:
                kept = self.keep(node.target, path or ast.unparse(node.target), node.value, value, "add", loops)
        result = combine([old, value])
        if old.kind is Kind.CONTAINER:
            result = Value(Kind.CONTAINER, result.graph, result.origins)
        if kept or result.graph:
            result = Value(
                result.kind,
                result.graph,
                result.origins | kept,
                divisors=old.divisors | value.divisors,
                carried_from=result.carried_from,
            )
        if path is not None:
            self.assign(node.target, result, binding.statement if binding else node, loops)
        elif isinstance(node.target, ast.Subscript) and result.graph:
            self._grow_root(node.target, result)

    def _is_array(self, target: ast.Subscript) -> bool:
        """An entry of a NumPy array holds a number, whatever is added to it."""
        root: ast.expr = target
        while isinstance(root, ast.Subscript):
            root = root.value
        return self.evaluate(root).kind is Kind.NUMBER

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            path = path_of(target)
            if path is not None and self.frame.state is not None:
                self.state.names.forget(path)

    def _return(self, node: ast.Return) -> None:
        value = Value(Kind.NUMBER, constant=None) if node.value is None else self.evaluate(node.value)
        self.frame.returns.append(value)
        self.frame.exits.append(self.state)
        self.frame.state = None

    def _raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.evaluate(node.exc)
        self.frame.state = None

    def _leave_round(self, node: ast.stmt) -> None:
        if self._rounds:
            self._rounds[-1].append(self.state)
        self.frame.state = None

    def _assert(self, node: ast.Assert) -> None:
        self.evaluate(node.test)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        starred = node.names[0].name == "*"
        for name, qualified in imported(node):
            if starred and name in USUAL_NAMES and self.lookup(name) is not None:
                continue
            self.bind(name, Value(Kind.EXTERNAL, ref=_canonical(qualified)), (), node)

    def _global(self, node: ast.Global) -> None:
        self.frame.globals.update(node.names)

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        self.frame.outer.update(node.names)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bind(node.name, Value(Kind.FUNCTION, ref=(self._function_from(node, None), None)), self.loops, node)

    def _function_from(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Class | None) -> Function:
        existing = self._defined.get(id(node))
        if existing is not None:
            existing.closure = self.frame
            return existing
        effects = []
        for decorator in node.decorator_list:
            value = self.evaluate(decorator)
            if value.kind is Kind.EXTERNAL and str(value.ref).rsplit(".", 1)[-1] in ("no_grad", "inference_mode"):
                value = Value(Kind.CONTEXT, ref=frozenset({"no_grad"}))
            if value.kind is Kind.CONTEXT:
                effects.append(value)
        function = Function(node, node.name, self.frame, owner, effects)
        self.functions.append(function)
        self._defined[id(node)] = function
        return function

    def _class(self, node: ast.ClassDef) -> None:
        bases = [self.evaluate(base) for base in node.bases]
        base_names = [
            str(value.ref) if value.kind is Kind.EXTERNAL else (path_of(base) or "")
            for base, value in zip(node.bases, bases, strict=True)
        ]
        cls = Class(node, node.name, bases, base_names)
        for statement in node.body:
            self.visited.add(id(statement))
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                cls.methods[statement.name] = self._function_from(statement, cls)
            elif isinstance(statement, ast.Assign):
                self.evaluate(statement.value)
        self.bind(node.name, Value(Kind.CLASS, ref=cls), self.loops, node)

    # Branches

    def _if(self, node: ast.If) -> None:
        truth = self.truth(self.evaluate(node.test))
        if _is_main_check(node.test):
            truth = True
        if truth is not None:
            self._block(node.body if truth else node.orelse)
            return
        before = self.state
        narrowing = self._narrowed(node.test)
        test = self._written_out(node.test)
        self.frame.state = before.branch()
        body_end = self._branch(Guard(node, test, True), node.body)
        self.frame.state = before.branch()
        if narrowing is not None:
            self.assign(narrowing, NUMBER, None)
        else_end = self._branch(Guard(node, test, False), node.orelse)
        self.frame.state = before.after([body_end, else_end])
        if self.frame.state is not None and (body_end is None) != (else_end is None):
            self.scopes.append(Guard(node, test, body_end is not None))

    def _match(self, node: ast.Match) -> None:
        """Each case is a way of its own."""
        self.evaluate(node.subject)
        before = self.state
        ends: list[State | None] = []
        for case in node.cases:
            self.frame.state = before.branch()
            for pattern in ast.walk(case.pattern):
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
        """A decision kept in a variable (`update = (i + 1) % k == 0`), as it was written."""
        binding = self.lookup(test.id) if isinstance(test, ast.Name) else None
        statement = binding.statement if binding is not None else None
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Compare | ast.BoolOp):
            return statement.value
        return test

    def _narrowed(self, test: ast.expr) -> ast.expr | None:
        """`if x is not None:` leaves nothing in `x` on the other side."""
        if (
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.IsNot)
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
            and isinstance(test.left, ast.Name)
            and (binding := self.lookup(test.left.id)) is not None
            and binding.value.graph
        ):
            return test.left
        return None

    def _branch(self, guard: Guard, body: list[ast.stmt]) -> State | None:
        self.scopes.append(guard)
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
            value = self._context_of(item.context_expr, self.evaluate(item.context_expr))
            if value.kind is Kind.CONTEXT:
                self.enter_effects(value.ref)
                if item.optional_vars is not None:
                    entered = value.items[0] if value.items else UNKNOWN
                    self.assign(item.optional_vars, entered, node)
            elif item.optional_vars is not None:
                self.assign(item.optional_vars, value, node)
        self._block(node.body)
        self.autocast, self.apex = autocast, apex
        if self.frame.state is not None:
            self.frame.state.grad = grad

    def _context_of(self, node: ast.expr, value: Value) -> Value:
        """A context manager that is made out of sight, or by a generator of the file."""
        if value.kind is Kind.FUNCTION and isinstance(node, ast.Call):
            return value
        if value.kind is Kind.CONTEXT or value.graph:
            return value
        called = node.func if isinstance(node, ast.Call) else node
        path = path_of(called)
        binding = self.lookup(path) if path is not None else None
        function = binding.value.ref[0] if binding is not None and binding.value.kind is Kind.FUNCTION else None
        if isinstance(function, Function):
            effects = self._effects_inside(function)
            return Value(Kind.CONTEXT, ref=effects) if effects else value
        held = held_elsewhere(path) if value.kind is Kind.UNKNOWN else None
        return value if held is None else Value(Kind.CONTEXT, ref=held)

    def _effects_inside(self, function: Function) -> frozenset[str]:
        """What a generator made into a context manager puts around its `yield`."""
        effects: frozenset[str] = frozenset()
        for statement in ast.walk(function.node):
            if isinstance(statement, ast.With) and any(isinstance(node, ast.Yield) for node in ast.walk(statement)):
                for item in statement.items:
                    value = self.evaluate(item.context_expr)
                    if value.kind is Kind.CONTEXT:
                        effects |= value.ref
        return effects

    # Loops

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        literals = is_literal_loop(node.iter)
        source = self.evaluate(node.iter)
        if self.loops and self._is_over_parts(node.iter):
            self.trace.loops_over_parts.add(node)
        if literals is not None:
            self._rounds_over(node, literals)
        else:
            element = self.element(source)
            self._loop(node, lambda: self.assign(node.target, element, node))
        if self.frame.state is not None:
            self._block(node.orelse)

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

    def _rounds_over(self, node: ast.For | ast.AsyncFor, values: list[Value]) -> None:
        """A loop over a few literals (`for phase in ["train", "val"]`) is followed once for each."""
        way = self.way
        for index, value in enumerate(values):
            self.way = (*way, id(node), index)
            literal = value.constant

            def bind(literal: Any = literal) -> None:
                self.assign(node.target, constant(literal), node)

            self._round(node, bind)
            if self.frame.state is None:
                break
        self.way = way

    def _loop(self, node: Loop, start: Callable[[], object]) -> None:
        """Follow a loop once, and a second time where a backward runs in it: what is carried over shows then."""
        backwards, bound = len(self.trace.backwards), len(self.bound)
        before = self.state
        self._round(node, start)
        trains = any(event.site.loop is node for event in self.trace.backwards[backwards:])
        if trains and self.frame.state is not None:
            self._mark_carried(node, self.bound[bound:])
            outer, self.second_round = self.second_round, True
            self._round(node, start)
            self.second_round = outer
        if self.frame.state is None:
            self.frame.state = before

    def _round(self, node: Loop, start: Callable[[], object]) -> None:
        self.scopes.append(node)
        self.loops = (*self.loops, node)
        self.runs = (*self.runs, self.trace.number("run", id(node), self.way))
        self._rounds.append([])
        before = self.state
        start()
        self._block(node.body)
        self.frame.state = before.after([self.frame.state, *self._rounds.pop()])
        self.loops, self.runs = self.loops[:-1], self.runs[:-1]
        self.scopes.pop()

    def _mark_carried(self, node: Loop, bound: list[str | tuple[int, str]]) -> None:
        """Everything the first round leaves with a graph is carried into the second."""
        for key in dict.fromkeys(bound):
            bindings: Any = self.state.names if isinstance(key, str) else self.state.attributes
            binding = bindings.get(key)
            if binding is None or binding.statement is None or not binding.loops or binding.loops[-1] is not node:
                continue
            if flatten(binding.value).graph is Graph.YES:
                number = self.trace.number("carried", id(binding.statement))
                self._carrying[number] = (binding.statement, node)
                bindings[key] = binding._replace(value=_with_carried(binding.value, frozenset({number})))


def _terms(node: ast.expr) -> list[ast.expr]:
    """The terms of a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _terms(node.left) + _terms(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        return _terms(node.left)  # `(mean * n + loss) / (n + 1)`
    return [node]


def _with_carried(value: Value, numbers: frozenset[int]) -> Value:
    if value.items is not None:
        return Value(value.kind, items=tuple(_with_carried(item, numbers) for item in value.items))
    if value.graph is not Graph.YES:
        return value
    return Value(value.kind, value.graph, value.origins, ref=value.ref, divisors=value.divisors, carried_from=numbers)


def _is_main_check(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _canonical(qualified: str) -> str:
    """One name for what torch offers under several: `torch.cuda.amp.autocast_mode.autocast` and the like stay."""
    return "torch.nn.functional" if qualified == "torch.functional" else qualified


_STATEMENTS: dict[type, Callable[[Any, Any], None]] = {
    ast.Expr: Follower._expression,
    ast.Assign: Follower._assign,
    ast.AnnAssign: Follower._annotated,
    ast.AugAssign: Follower._augmented,
    ast.Delete: Follower._delete,
    ast.Return: Follower._return,
    ast.Raise: Follower._raise,
    ast.Break: Follower._leave_round,
    ast.Continue: Follower._leave_round,
    ast.Assert: Follower._assert,
    ast.Import: Follower._import,
    ast.ImportFrom: Follower._import,
    ast.Global: Follower._global,
    ast.Nonlocal: Follower._nonlocal,
    ast.FunctionDef: Follower._define,
    ast.AsyncFunctionDef: Follower._define,
    ast.ClassDef: Follower._class,
    ast.If: Follower._if,
    ast.Match: Follower._match,
    ast.Try: Follower._try,
    ast.With: Follower._with,
    ast.AsyncWith: Follower._with,
    ast.For: Follower._for,
    ast.AsyncFor: Follower._for,
    ast.While: Follower._while,
}
