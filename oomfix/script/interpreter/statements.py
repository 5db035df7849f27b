"""Following simple statements: what they bind, add up and define."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.facts.definitions import Class, Function
from oomfix.script.facts.hints import Hints
from oomfix.script.facts.named_like import says_mode
from oomfix.script.facts.trace import Guard, Loop, Manner, Trace
from oomfix.script.facts.values import (
    LITERAL,
    MIXED,
    NONE,
    SLOTS,
    UNKNOWN,
    Graph,
    Kind,
    Value,
    combine,
    flatten,
    holds_called_alone,
    may_take_called,
    with_called,
)
from oomfix.script.interpreter.contexts import context, decorated_elsewhere
from oomfix.script.interpreter.expressions import Expressions
from oomfix.script.interpreter.state import Binding, Frame
from oomfix.script.syntax.adding import added_to, joins_parts
from oomfix.script.syntax.names import USUAL_NAMES, imported, last_of, path_of, without_moves
from oomfix.script.syntax.nodes import names_in, walk
from oomfix.script.syntax.parameters import placed_parameters

_OUT_OF_SIGHT = frozenset({Kind.UNKNOWN, Kind.LOSS})


class Statements(Expressions):
    """One method per kind of statement that has no body to follow."""

    def __init__(self, module_frame: Frame, trace: Trace, hints: Hints) -> None:
        super().__init__(module_frame, trace, hints)
        self._defined: dict[int, Function] = {}
        self.visited: set[int] = set()

    def _expression(self, node: ast.Expr) -> None:
        self.evaluate(node.value)

    def _assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            pairs = _pairs(target, node.value, value)
            if pairs:
                for part, part_value, written in pairs:
                    self._store(part, part_value, node, written)
            else:
                self._store(target, value, node, node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target, self.evaluate(node.value), node, node.value)

    def _store(self, target: ast.expr, value: Value, statement: ast.stmt, value_node: ast.expr) -> None:
        if self._is_setting(target, value, value_node):
            # A literal is a setting somebody will change: both branches of what it decides are followed.
            value = LITERAL
        elif isinstance(target, ast.Attribute) and isinstance(value_node, ast.Constant) and self._is_constructing():
            value = UNKNOWN  # `self.model = None`, which a subclass or a later call fills
        elif isinstance(target, ast.Name) and value.kind is Kind.UNKNOWN and not value.graph:
            value = self._as_named_before(value, value_node)
        path = path_of(target)
        if isinstance(target, ast.Subscript) and path is None:
            self._store_entry(target, value, statement, value_node)
        elif path is not None and (added := added_to(value_node, path)):
            self._accumulate(target, path, value, statement, value_node, added)
        else:
            self.assign(target, value, statement, self._age_of_first_entry(target))
            if not isinstance(value_node, ast.Constant):
                self.note_replaced(target)
            elif isinstance(target, ast.Attribute) and target.attr == "requires_grad" and value_node.value is True:
                self.is_made_leaf(target.value)
            if isinstance(target, ast.Subscript):
                self._put_called(target, value)
                self._fill(target, flatten(value))
            elif isinstance(target, ast.Attribute) and self.evaluate(target.value).kind in _OUT_OF_SIGHT:
                self._leave_on_object(target.value, flatten(value))  # `objective.guess = net(x)`
            if isinstance(target, ast.Tuple):
                self._store_in_parts(target, value, statement, value_node)

    def _as_named_before(self, value: Value, written: ast.expr) -> Value:
        """`core = model`, `core = model.module if wrapped else model`: a network out of sight under another name."""
        paths = [path_of(named) for named in _named_by(written)]
        networks = [path for path in paths if path is not None and self.hints.is_module(path)]
        return Value(Kind.MODULE, ref=networks[0]) if networks and len(networks) == len(paths) else value

    def _is_setting(self, target: ast.expr, value: Value, value_node: ast.expr) -> bool:
        """`mode = "train"`, `mode = TRAIN`; not `TRAIN = "train"`, one of several texts that are told apart."""
        at_module_level = self.frame is self.module_frame
        if isinstance(value_node, ast.Name):
            return at_module_level and value_node.id in self.hints.labels
        label = at_module_level and isinstance(value.constant, str) and path_of(target) in self.hints.labels
        label = label or self._is_mode(target, value)
        return isinstance(value_node, ast.Constant) and value.constant is not None and not label

    def _is_mode(self, target: ast.expr, value: Value) -> bool:
        """`self.training = False` at the head of a test, for what the test calls; not where the object is made."""
        named = isinstance(target, ast.Attribute) and says_mode(target.attr)
        return named and isinstance(value.constant, bool) and not self._is_constructing()

    def _store_in_parts(self, target: ast.Tuple, value: Value, statement: ast.stmt, value_node: ast.expr) -> None:
        """`outputs[name], features = net(x)`: an entry among the targets, with an index that changes."""
        items = value.items if value.items is not None and len(value.items) == len(target.elts) else None
        for index, part in enumerate(target.elts):
            if isinstance(part, ast.Subscript) and path_of(part) is None:
                content = items[index] if items else flatten(value)
                if self.evaluate(part.value).kind is Kind.CONTAINER:
                    self._store_entry(part, content, statement, value_node)
                else:
                    self._fill(part, flatten(content))

    def _fill(self, target: ast.Subscript, content: Value) -> None:
        """`outputs[t], state = net(x, state)`: a tensor made for it carries the graph of what is written into it."""
        target = self.part_of_tensor(target)
        base, binding = self.evaluate(target.value), self.binding_of(target.value)
        if not content.graph or base.kind is not Kind.TENSOR or binding is None:
            return
        if base.is_tensor or not content.origins <= base.origins:
            # what is no tensor is a dict that a network gives: `outputs["mask"] = masks(features)`
            graph = content.graph if base.is_tensor else max(base.graph, content.graph)
            filled = Value(base.kind, graph, base.origins | content.origins, is_tensor=base.is_tensor)
            self.assign(target.value, filled, binding.statement, binding.loops)

    def _is_constructing(self) -> bool:
        return self.frame.function is not None and self.frame.function.name == "__init__"

    def _age_of_first_entry(self, target: ast.expr) -> tuple[Loop, ...] | None:
        """`if key not in log: log[key] = 0`: an entry that stays is as old as what holds it."""
        guard = self.scopes[-1] if self.scopes else None
        if not isinstance(target, ast.Subscript) or not isinstance(guard, Guard) or not guard.value:
            return None
        test, holder = guard.test, self.binding_of(target.value)
        missing = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn)
        if missing and holder is not None and ast.unparse(test) == ast.unparse(_not_in(target)):
            return holder.loops
        return None

    def _accumulate(
        self,
        target: ast.expr,
        path: str,
        value: Value,
        statement: ast.stmt,
        written: ast.expr,
        added: list[ast.expr],
    ) -> None:
        """`total = total + loss`, `kept = [*kept, loss]`, `kept = torch.cat([kept, loss])`."""
        loops = self._age(target, self.binding_of(target))
        values = [(node, self.evaluate(node)) for node in added]
        carrying = [(node, node_value) for node, node_value in values if flatten(node_value).graph]
        kept: frozenset[int] = frozenset()
        if carrying and flatten(value).graph:
            term, term_value = carrying[0]
            alone = len(carrying) == 1
            # a list of sums, written anew item by item, is a sequence that grows no longer
            stored = term_value.kind in (Kind.SEQUENCE, Kind.CONTAINER) or value.kind is Kind.CONTAINER
            stored = stored or joins_parts(written)
            manner: Manner = "store" if stored else "add"
            kept = self.keep(target, path, term, term_value, manner, loops, alone)
        grown = flatten(value)
        grown = grown.with_graph(grown.graph, grown.origins | kept)
        if isinstance(target, ast.Subscript) and path_of(target) is None:
            self._grow_root(target, grown)
        else:
            self.assign(target, grown, statement, loops)

    def _age(self, target: ast.expr, binding: Binding | None) -> tuple[Loop, ...]:
        """The loops around the making of a target; one that the round before has left is as old as the loop."""
        if binding is None:
            return self._loops_of_root(target)
        return binding.loops[:-1] if flatten(binding.value).carried_from else binding.loops

    def _store_entry(self, target: ast.Subscript, value: Value, statement: ast.stmt, value_node: ast.expr) -> None:
        """`kept[i] = loss`, with an index that changes, also of a tensor that was made for it."""
        self.evaluate(target.slice)
        target = self.part_of_tensor(target)
        base = self.evaluate(target.value)
        fresh = base.kind is Kind.TENSOR and base.is_tensor
        content = self.computed(flatten(value)) if fresh else flatten(value)
        if content.divisors and base.graph and (divided := self.binding_of(target.value)) is not None:
            base = base._replace(divisors=base.divisors | content.divisors)
            self.assign(target.value, base, divided.statement, divided.loops)
        if base.kind is Kind.CONTAINER and content.graph and (added := added_to(value_node, ast.unparse(target))):
            self._accumulate(target, ast.unparse(target), value, statement, value_node, added)
            return
        if self._put_called(target, value):
            return
        if not content.graph or not (fresh or base.kind is Kind.CONTAINER):
            self.trace.let_escape(content.origins)
            if content.graph and base.kind is Kind.UNKNOWN and _is_of_tensor(target.slice):
                self.assign(target.value, content.with_graph(Graph.MAYBE), statement)
            elif content.graph and base.kind is Kind.UNKNOWN and _is_entry_of_dict(target):
                self._grow_root(target, content)  # `parts[name]["loss"] = loss`
            return
        binding = self.binding_of(target.value)
        loops = binding.loops if binding is not None else self._loops_of_root(target.value)
        path = path_of(target.value)
        kept: frozenset[int] = frozenset()
        # each entry of `outputs` to itself makes it no larger, and neither do its slots, one for each head or network
        grows = base.ref != SLOTS or self._is_counted(target.slice, loops)
        if grows and not added_to(value_node, ast.unparse(target)):
            kept = self.keep(target, path or ast.unparse(target), value_node, content, "store", loops)
        if path is not None:
            origins = base.origins | content.origins | kept
            grown = Value(base.kind, content.graph, origins, ref=base.ref, divisors=base.divisors, is_tensor=fresh)
            self.assign(target.value, grown, binding.statement if binding else None, loops)

    def _is_counted(self, index: ast.expr, loops: tuple[Loop, ...]) -> bool:
        """Whether it is counted through by the outermost of the loops that were not around when something was made.

        `for i, batch in enumerate(loader)` counts batches; `for i, net in enumerate(networks)` counts a few networks,
        and so may `range(count)`.
        """
        crossed = self.loops[len(loops) :] if self.loops[: len(loops)] == loops else ()
        if not crossed or not isinstance(index, ast.Name) or crossed[0] in self.trace.loops_over_parts:
            return False
        match crossed[0]:
            case ast.For(ast.Tuple([ast.Name(counter), counted]), ast.Call(ast.Name("enumerate"), [_, *_])):
                called = {part for part in walk(crossed[0]) if isinstance(part, ast.Call)}
                return counter == index.id and not any(path_of(part.func) in names_in(counted) for part in called)
        return False

    def _put_called(self, target: ast.Subscript, value: Value) -> bool:
        """`nets[name] = Net()`: what is asked for by any name is one of the networks, where nothing else is held.

        The same holds for functions and criteria.
        """
        held, binding = self.evaluate(target.value), self.binding_of(target.value)
        takes = may_take_called(held, value)
        if binding is None or not (takes or holds_called_alone(held)):
            return False
        listed = held.ref == SLOTS or held.kind is Kind.SEQUENCE
        grown = with_called(held, value, Kind.SEQUENCE if listed else Kind.CONTAINER)
        held = grown if takes else Value(Kind.CONTAINER, ref=MIXED)
        self._change(target.value, held, binding.statement, binding.loops)
        return takes

    def _augmented(self, node: ast.AugAssign) -> None:
        value = self.evaluate(node.value)
        if value.items is None and value.kind is not Kind.CONTAINER:
            value = self.computed(value)
        old = self.evaluate(node.target)
        binding = self.binding_of(node.target)
        path = path_of(node.target)
        known = binding is not None or isinstance(node.target, ast.Subscript) or path is None or "." in path
        loops = self._age(node.target, binding)
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            content = flatten(old)
            value = content._replace(divisors=content.divisors | {ast.unparse(node.value)})
            self.assign(node.target, value, node, loops)
            return
        kept: frozenset[int] = frozenset()
        entry_of_array = isinstance(node.target, ast.Subscript) and self._is_array(node.target)
        if isinstance(node.op, ast.Add | ast.Sub) and known and not entry_of_array:
            if old.kind is Kind.CONTAINER and value.kind is Kind.TENSOR:
                # `tags += net(x)`: a list takes what is in it, of a network that gives lists, since tensors are added
                value = value.perhaps()
            manner: Manner = "store" if value.kind in (Kind.SEQUENCE, Kind.CONTAINER) else "add"
            kept = self.keep(node.target, path or ast.unparse(node.target), node.value, value, manner, loops)
        result = combine([old, value])
        if old.kind is Kind.CONTAINER:
            result = Value(Kind.CONTAINER, result.graph, result.origins)
        if kept or result.graph:
            result = Value(
                result.kind,
                result.graph,
                result.origins | kept,
                divisors=old.divisors | value.divisors,
                may_be_number=result.may_be_number,
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
        value = NONE if node.value is None else self.evaluate(node.value)
        self.frame.returns.append(value)
        self.frame.exits.append(self.state)
        self.frame.state = None

    def _raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.evaluate(node.exc)
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
        decorators = [(decorator, self.evaluate(decorator)) for decorator in node.decorator_list]
        for decorator, value in decorators:
            value = self._effects_of_decorator(decorator, value)
            if value.kind is Kind.EXTERNAL and last_of(value.ref) in ("no_grad", "inference_mode"):
                value = context("no_grad")
            if value.kind is Kind.CONTEXT:
                effects.append(value)
        function = Function(node, node.name, self.frame, owner, effects)
        self.functions.append(function)
        self._defined[id(node)] = function
        for decorator, value in decorators:
            if owner is None:
                self.registered_by(decorator, value, function)
        return function

    def _effects_of_decorator(self, node: ast.expr, value: Value) -> Value:
        """A decorator of the file puts what stands around its call of the function; one out of sight says it."""
        if value.kind is Kind.FUNCTION:
            effects: frozenset[str] | None = self._effects_of_own(value.ref[0])
        elif value.kind in (Kind.UNKNOWN, Kind.EXTERNAL) and not str(value.ref).startswith("torch."):
            effects = decorated_elsewhere(path_of(node.func if isinstance(node, ast.Call) else node))
        else:
            effects = None
        return Value(Kind.CONTEXT, ref=effects) if effects else value

    def _effects_of_own(self, decorator: Function) -> frozenset[str]:
        """What a decorator of the file puts around the function, or hands it to: `return torch.no_grad()(fn)`."""
        parameters = {parameter.arg for parameter in placed_parameters(decorator.node.args)}
        effects = self.effects_around(
            decorator, lambda part: isinstance(part, ast.Call) and path_of(part.func) in parameters
        )
        returned = [node.value for node in decorator.nodes if isinstance(node, ast.Return)]
        for call in returned:
            if isinstance(call, ast.Call) and len(call.args) == 1 and path_of(call.args[0]) in parameters:
                made = self.evaluate(call.func)
                effects |= made.ref if made.kind is Kind.CONTEXT else frozenset()
        return effects

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
                method = self._function_from(statement, cls)
                if not method.sets_property:
                    cls.methods[statement.name] = method
            elif isinstance(statement, ast.Assign):
                self.evaluate(statement.value)
        self.bind(node.name, Value(Kind.CLASS, ref=cls), self.loops, node)


def _named_by(node: ast.expr) -> Iterator[ast.expr]:
    """What an expression only gives another name: `net` in `net.module if wrapped else net.to(device)`."""
    match without_moves(node):
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_named_by(body), *_named_by(orelse))
        case ast.Call(ast.Name("getattr"), [_, ast.Constant(), default]):
            yield from _named_by(default)
        case ast.Attribute(whole, "module" | "forward" | "__call__"):
            yield whole
        case plain:
            yield plain


def _is_entry_of_dict(target: ast.Subscript) -> bool:
    """`parts[name]["loss"]`: only a dict has entries by that name."""
    match target:
        case ast.Subscript(ast.Subscript(), ast.Constant(str())):
            return True
    return False


def _is_of_tensor(index: ast.expr) -> bool:
    """`[:, i]`: several dimensions, some of them whole, as only tensors have, and arrays, which take no graph."""
    return isinstance(index, ast.Tuple) and any(isinstance(part, ast.Slice) for part in index.elts)


def _not_in(entry: ast.Subscript) -> ast.expr:
    """`key not in log` for `log[key]`."""
    return ast.Compare(entry.slice, [ast.NotIn()], [entry.value])


def _pairs(target: ast.expr, written: ast.expr, value: Value) -> list[tuple[ast.expr, Value, ast.expr]]:
    """`a, b = a + x, b + y`, where a part adds to what it held; empty for any other assignment."""
    if not isinstance(target, ast.Tuple) or not isinstance(written, ast.Tuple):
        return []
    items = value.items or ()
    if not len(target.elts) == len(written.elts) == len(items):
        return []
    pairs = list(zip(target.elts, items, written.elts, strict=True))
    adds = any((path := path_of(part)) is not None and added_to(node, path) for part, _, node in pairs)
    return pairs if adds else []


def _canonical(qualified: str) -> str:
    """One name for what torch offers under several: `torch.cuda.amp.autocast_mode.autocast` and the like stay."""
    return "torch.nn.functional" if qualified == "torch.functional" else qualified
