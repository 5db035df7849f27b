"""`memory.prepare(model)` where a model that a rewritten loop trains is in scope: ahead of its optimizer."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.changes import is_within, paths_read
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.layout import Layout
from oomfix.script import Script
from oomfix.script.facts.named_like import looks_like_optimizer
from oomfix.script.facts.trace import Forward
from oomfix.script.syntax.edits import Edit, bounds, line_start
from oomfix.script.syntax.names import last_name, owner_of, path_of, root_of
from oomfix.script.syntax.nodes import Nodes, arguments_of, children, walk
from oomfix.script.syntax.parameters import names_of_parameters

_MOST_CALLS = 5
_MOST_ASSIGNMENTS = 2
_MOVES = frozenset({"to", "cuda"})
_OF_MODULES = frozenset({"parameters", "named_parameters", "modules", "state_dict", "load_state_dict"})
_COLLECTING = frozenset({"list", "tuple", "dict", "filter", "map", "sorted", "zip"})

_OWN_NAMES = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda

Owner = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Place(NamedTuple):
    """An access path in the function, class (`self.model`) or module that it means something in."""

    owner: Owner
    path: str


class Made(NamedTuple):
    """A statement that makes an optimizer of what the path gives parameters of."""

    statement: ast.stmt
    place: Place


def prepare_edits(reading: Reading, manager: str, trained: list[Forward]) -> list[Edit]:
    """`memory.prepare(model)` ahead of the statement that gives a model's parameters to an optimizer.

    Args:
        reading: the script.
        manager: the name of the manager.
        trained: the forwards of rewritten loops.
    """
    script, blocks = reading.script, reading.blocks
    models = _Models(blocks, reading.functions, script.imports.nodes)
    made = sorted(_optimizers_made(script, blocks, models), key=lambda one: one.statement.lineno)
    places = models.places_of(trained)
    chosen: dict[Place, list[ast.stmt]] = {}
    holders = set(models.holders_among(trained))
    for statement, given in made:
        place = _trained_place(given, places)
        if place is not None:
            chosen.setdefault(given if place in holders else place, []).append(statement)
    # where no call leads from the optimizer to the loop, the same name in both means the same model
    met = {forward.path for forward in trained if _is_among(models.places_of([forward]), made)}
    paths = {forward.path for forward in trained} - met - {place.path for place in chosen}
    for statement, given in made:
        if given.path in paths:
            chosen.setdefault(given, []).append(statement)
    makers = {statement for statement, _ in made}
    calls: dict[ast.stmt, list[str]] = {}
    for place, statements in chosen.items():
        for made_of_it in _ahead_of(place, statements, blocks, reading.functions):
            statement = _first_of_makers(made_of_it, place, makers, blocks)
            calls.setdefault(statement, []).append(f"{manager}.prepare({place.path})")
    return [
        edit
        for statement, ahead in calls.items()
        for edit in _ahead_of_line(reading.layout, blocks.block_of(statement), statement, ahead)
    ]


def _ahead_of_line(layout: Layout, block: list[ast.stmt], statement: ast.stmt, calls: list[str]) -> Iterator[Edit]:
    """The edit that runs calls ahead of a statement, which begins a line of its own then; none on that of an `if`."""
    source, first = layout.source, block.index(statement)
    while first and block[first - 1].end_lineno == block[first].lineno:
        first -= 1
    margin, start = layout.margin(block[first]), bounds(source, block[first])[0]
    if source.text[line_start(source, start) : start].strip():
        return
    if block[first] is statement:
        here = layout.above_comments(statement)
        gap = layout.newline if layout.heads_paragraph(here) else ""
        yield Edit(here, here, "".join(f"{margin}{call}{layout.newline}" for call in calls) + gap)
        return
    here = bounds(source, statement)[0]
    if here - line_start(source, here) + len(calls[0]) <= layout.longest_line:
        yield Edit(here, here, "".join(f"{call}{layout.newline}{margin}" for call in calls))


def _trained_place(given: Place, places: set[Place]) -> Place | None:
    """The model that a path stands for or belongs to, where a loop trains it."""
    shorter = {
        min(place, given, key=lambda one: len(one.path))
        for place in places
        if _is_part(given, place) or _is_part(place, given)
    }
    found = min(shorter, key=lambda one: len(one.path), default=None)
    return None if found is None or (found.path == "self" and given.path != "self") else found


def _is_among(places: set[Place], made: list[Made]) -> bool:
    """Whether an optimizer is made of one of the places where a model goes by its name."""
    return any(_trained_place(given, places) is not None for _, given in made)


def _is_part(part: Place, whole: Place) -> bool:
    return part.owner is whole.owner and is_within(part.path, whole.path)


def _ahead_of(place: Place, statements: list[ast.stmt], blocks: Blocks, functions: FunctionsCalled) -> list[ast.stmt]:
    """The first statement; where branches of an `if` each have one: the `if`, or all, if they make the model too."""
    first = statements[0]
    others = [other for other in statements if blocks.exclude_each_other(first, other)]
    ahead = first
    apart = False
    for condition in blocks.conditions_of(first):
        # the others in an `if` that is to be preceded have their model from around it
        others = [other for other in others if ahead not in blocks.conditions_of(other)]
        together = [other for other in others if condition in blocks.conditions_of(other)]
        apart |= any(blocks.are_apart_in(condition, first, other) for other in together)
        if blocks.is_elif(condition):
            continue  # nothing stands between it and the `if` that it belongs to
        if together and _may_make(place.path, condition, functions):
            return list(dict.fromkeys([ahead, *others]))
        if apart:
            ahead, apart = condition, False
    return [ahead]


def _may_make(path: str, statement: ast.stmt, functions: FunctionsCalled) -> bool:
    """Whether a statement may bind what a path goes through, or a function that it runs an attribute or item of it."""
    if root_of(path) in names_bound(statement):
        return True
    nodes = [*nodes_of_scope(statement), *(node for one in functions.run_by(statement) for node in walk(one))]
    places = (one for one in nodes if isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store))
    return any(stored is not None and is_within(path, stored) for stored in map(path_of, places))


def _first_of_makers(statement: ast.stmt, place: Place, makers: set[ast.stmt], blocks: Blocks) -> ast.stmt:
    """The first of the statements in a row that make optimizers, so that those stay together."""
    block = blocks.block_of(statement)
    ahead = itertools.takewhile(
        lambda other: other in makers and root_of(place.path) not in names_bound(other),
        reversed(block[: block.index(statement)]),
    )
    return [statement, *ahead][-1]


def _optimizers_made(script: Script, blocks: Blocks, models: _Models) -> Iterator[Made]:
    for node in script.imports.nodes.of(ast.Call):
        statement = blocks.statement_of(node)
        targets = statement.targets if isinstance(statement, ast.Assign) and statement.value is node else []
        named = last_name(node) not in _COLLECTING and any(looks_like_optimizer(path_of(one) or "") for one in targets)
        if not named and not script.is_optimizer_class(node.func):
            continue
        scope = blocks.scope_of(statement)
        if scope is None:
            continue
        arguments = arguments_of(node)
        given = [path for argument in arguments for path in _parameters_of(argument, statement, scope, blocks)]
        given = [path for path in given if _has_value(path, node, statement, scope, blocks)]
        if named:
            given += [path for argument in arguments if (path := path_of(argument)) is not None]
            given += [path for path in [_asked_for_optimizer(node)] if path is not None]
        for path in dict.fromkeys(given):
            yield Made(statement, models.place(path, statement))


def _asked_for_optimizer(call: ast.Call) -> str | None:
    """The model in `model.configure_optimizers(learning_rate)`."""
    is_asked = isinstance(call.func, ast.Attribute) and "optim" in call.func.attr.lower()
    return path_of(call.func.value) if is_asked and isinstance(call.func, ast.Attribute) else None


def _has_value(
    path: str, call: ast.Call, statement: ast.stmt, scope: ast.Module | FunctionNode, blocks: Blocks
) -> bool:
    """Whether a path means something ahead of a statement that makes an optimizer of its parameters.

    The statement asks for it whenever it runs, or it is bound on every way there, or outside of the scope.
    """
    root = root_of(path)
    inside = list(itertools.takewhile(lambda parent: parent is not statement, blocks.ancestors(call)))
    if root in names_read(call) and not any(isinstance(parent, _OWN_NAMES | ast.IfExp) for parent in inside):
        return True
    if root in {name for parent in inside for name in _bound_within(parent)}:
        return False
    block = blocks.block_of(statement)
    bound = blocks.bound_before(statement) | definitely_bound(block[: block.index(statement)])
    return root in bound or root not in names_bound(*scope.body)


def _bound_within(node: ast.AST) -> set[str]:
    """The names that belong to a comprehension or lambda."""
    if isinstance(node, ast.Lambda):
        return names_of_parameters(node.args)
    return {name for one in getattr(node, "generators", ()) for name in names_bound_by_target(one.target)}


def _parameters_of(
    node: ast.expr, user: ast.stmt, scope: ast.Module | FunctionNode, blocks: Blocks, depth: int = _MOST_ASSIGNMENTS
) -> Iterator[str]:
    """The paths whose parameters an expression holds, through names that its scope binds ahead of it.

    Without those that it, or an `if`, asks for first: `head.parameters() if head is not None else []`.
    """
    names: set[str] = set()
    for child in _without_next(node):
        if isinstance(child, ast.Call) and last_name(child) in ("parameters", "named_parameters"):
            path = owner_of(child)
            if path is not None and not any(_asks_for(path, test) for test in _tests_around(child, blocks)):
                yield path
        elif isinstance(child, ast.Name):
            names.add(child.id)
    if not depth or not names:
        return
    for statement in nodes_of_scope_body(scope):
        if isinstance(statement, ast.Assign) and statement.lineno < user.lineno and names_bound(statement) & names:
            tests = [one.test for one in blocks.conditions_of(statement) if one not in blocks.conditions_of(user)]
            for path in _parameters_of(statement.value, statement, scope, blocks, depth - 1):
                if not any(_asks_for(path, test) for test in tests):
                    yield path


def _tests_around(node: ast.expr, blocks: Blocks) -> Iterator[ast.expr]:
    """What the expressions around one ask before it is evaluated."""
    inner: ast.AST = node
    for parent in blocks.ancestors(node):
        if isinstance(parent, ast.IfExp) and inner is not parent.test:
            yield parent.test
        elif isinstance(parent, ast.BoolOp):
            yield from (value for value in parent.values if value is not inner)
        inner = parent


def _asks_for(path: str, test: ast.expr) -> bool:
    """Whether a test may ask what a path is: `head is not None`, `head.trains()`, but not `hasattr(head, "module")`."""
    if isinstance(test, ast.Call) and path_of(test.func) == "hasattr":
        return False
    return any(read == path or read.startswith(f"{path}.") for read in paths_read(test))


def _without_next(node: ast.expr) -> Iterator[ast.AST]:
    """The nodes under a node, but for `next(model.parameters())`, which asks for a device."""
    if isinstance(node, ast.Call) and last_name(node) == "next":
        return
    yield node
    for child in children(node):
        if isinstance(child, ast.expr):
            yield from _without_next(child)
        else:
            yield from walk(child)


def _is_of_network(forward: Forward) -> bool:
    """Whether a forward stands in a method of a network, and is one of a part of it."""
    function = forward.site.function
    return function is not None and function.owner is not None and function.owner.is_module


class _Models:
    """Finds what a model of a loop is called in the functions that lead to the loop."""

    def __init__(self, blocks: Blocks, functions: FunctionsCalled, nodes: Nodes) -> None:
        self._blocks, self._functions, self._nodes = blocks, functions, nodes
        self._known: dict[Place, list[Place]] = {}

    def place(self, path: str, node: ast.AST) -> Place:
        """A path as it stands at a node: attributes of `self` belong to the class."""
        scope = self._blocks.scope_of(node)
        assert scope is not None
        owner: Owner = scope
        if path.startswith("self."):
            owner = next(
                (parent for parent in self._blocks.ancestors(scope) if isinstance(parent, ast.ClassDef)), scope
            )
        return Place(owner, path)

    def places_of(self, forwards: Iterable[Forward]) -> set[Place]:
        """What the models of forwards are called where they are run, and in the callers."""
        layer = {place for forward in forwards for place in self._run_as(forward)}
        found: set[Place] = set()
        for _ in range(_MOST_CALLS):
            found |= layer
            layer = {origin for place in layer for origin in self._origins_of(place)} - found
        return found

    def holders_among(self, forwards: Iterable[Forward]) -> Iterator[Place]:
        """What may be no model, but an object that holds one: only its `forward` is asked for, whose code is unseen."""
        for forward in forwards:
            if forward.code is None and last_name(forward.node) == "forward":
                places = self.places_of([forward])
                if not any(f"{place.path}.{name}" in self._called for place in places for name in _OF_MODULES):
                    yield from places

    @cached_property
    def _called(self) -> set[str | None]:
        return {path_of(call.func) for call in self._nodes.of(ast.Call)}

    def _run_as(self, forward: Forward) -> Iterator[Place]:
        """What a forward's model is called where it is run."""
        if forward.path is None or self._blocks.scope_of(forward.node) is None:
            return
        yield self._own(self.place(forward.path, forward.node), forward.node)
        if forward.path.startswith("self.") and _is_of_network(forward):
            yield self.place("self", forward.node)

    def _own(self, place: Place, node: ast.AST) -> Place:
        """The network itself, where the path is one of its methods."""
        methods = [one.name for one in place.owner.body if isinstance(one, FunctionNode)]
        called = isinstance(place.owner, ast.ClassDef) and place.path.removeprefix("self.") in methods
        return self.place("self", node) if called else place

    def _origins_of(self, place: Place) -> list[Place]:
        """What a model is called where it comes from: found out once, for all loops that use it."""
        if place not in self._known:
            self._known[place] = list(dict.fromkeys(self._origins(place)))
        return self._known[place]

    def _origins(self, place: Place) -> Iterator[Place]:
        owner, path = place
        root, _, rest = path.partition(".")
        if isinstance(owner, ast.ClassDef):
            yield from self._assigned_in(owner, path)
        elif isinstance(owner, FunctionNode):
            if root in names_of_parameters(owner.args):
                for call in self._functions.calls_of(owner):
                    given = self._given(call, owner, root)
                    if given is not None and self._blocks.scope_of(call) is not None:
                        yield self.place(f"{given}.{rest}" if rest else given, call)
            elif root not in names_bound(*owner.body):
                outer = self._blocks.scope_of(owner)
                if outer is not None:
                    yield Place(outer, path)

    def _given(self, call: ast.Call, function: FunctionNode, name: str) -> str | None:
        """The path that a call gives as a parameter."""
        bound = self._functions.bound(call, function)
        if bound.of_object is not None and bound.of_object.arg == name:
            return owner_of(call)
        return next(map(path_of, bound.arguments(name)), None)

    def _assigned_in(self, owner: ast.ClassDef, path: str) -> Iterator[Place]:
        """What `self.model = model` takes its value from."""
        for method in owner.body:
            for node in nodes_of_scope_body(method) if isinstance(method, FunctionNode) else ():
                if isinstance(node, ast.Assign) and path in map(path_of, node.targets):
                    value = node.value
                    while isinstance(value, ast.Call) and last_name(value) in _MOVES:
                        if not isinstance(value.func, ast.Attribute):
                            break
                        value = value.func.value
                    given = path_of(value)
                    if given is not None and self._blocks.scope_of(node) is not None:
                        yield self.place(given, node)
