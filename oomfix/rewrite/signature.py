"""The inputs and outputs of a slice that becomes a function."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable

from oomfix.rewrite import effects
from oomfix.rewrite.lift import CannotLift, Lift, Site
from oomfix.rewrite.liveness import (
    FunctionNode,
    Liveness,
    Scope,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.script.hints import looks_like_module
from oomfix.script.nodes import children, walk

_COUNTER = re.compile(
    r"^(i|j|k|n|t|it|idx|ii|step\w*|epoch\w*|iter\w*|iteration|batch_idx|batch_i|i_batch|\w*_idx|device)$"
)
_NOT_DATA = re.compile(
    r"(^|_)(model|net|network|encoder|decoder|criterion|criteria|loss_fn|loss_func|loss_function|loss_fct|optim\w*|"
    r"sched\w*|scaler|args|cfg|config|conf|opt|opts|hparams|params|device|logger|writer|epoch|epochs|loader|dataloader|"
    r"self|lr|gpu|tokenizer|vocab)$",
    re.IGNORECASE,
)


_FLAG = re.compile(r"^(train|training|is_\w+|use_\w+|phase|mode|verbose|debug)$")
_NUMBER_METHODS = ("item", "size", "time", "perf_counter", "get_lr", "dim", "numel")


class Signature:
    """Finds what a slice takes and gives.

    Args:
        liveness: of the scope it stands in.
        tree: the module.
        runs_forward: whether a statement runs a network.
    """

    def __init__(self, liveness: Liveness, tree: ast.Module, runs_forward: Callable[[ast.AST], bool]) -> None:
        self._liveness = liveness
        self._tree = tree
        self._runs_forward = runs_forward

    def find_outputs(self, lift: Lift) -> None:
        """Set the outputs: what the slice binds and something reads later.

        Raises:
            CannotLift: an output may have no value.
        """
        live = set(self._liveness.after(lift.site.statement))
        if lift.site.branch is not None:
            live |= self._liveness.before(lift.site.branch.orelse, self._liveness.after(lift.site.branch))
        while lift.after and lift.after[-1] in lift.rescaled and not names_bound(lift.after[-1]) & live:
            lift.after.pop()
        live = self._liveness.before(lift.after, live) if lift.after else live
        bound = _in_order(lift.lifted)
        if lift.all_names_are_read:
            live |= set(bound)
        live |= self._find_deletes(lift, set(bound) - live)
        lift.bound_with_network = _bound_by_the_networks_loop(lift, self._runs_forward)
        certain = definitely_bound(lift.lifted) | lift.bound_with_network
        others = self._liveness.always | _read_outside(lift)
        given = self._bound_ahead_of(lift)
        for name in bound:
            if name not in live:
                continue
            if name not in certain | given:
                if name not in others and self._bound_where_read(name, lift.lifted):
                    lift.own.add(name)
                    continue
                raise CannotLift(f"{name} is read later, and only bound on some ways through the slice")
            if name == lift.loss:
                lift.loss_is_read = True
            else:
                lift.outputs.append(name)
        if lift.loss in self._liveness.always & set(bound):
            lift.loss_is_read = True

    def _find_deletes(self, lift: Lift, unread: set[str]) -> set[str]:
        """Note the `del` of names that nothing else reads; returns the names that have to stay for their `del`."""
        loop, scope = lift.site.iteration, lift.site.scope
        inside = {id(node) for statement in (loop or scope).body for node in nodes_of_scope(statement)}
        moved = {id(node) for statement in (*lift.lifted, *lift.after) for node in nodes_of_scope(statement)}
        rebound = {
            node.id
            for statement in (loop or scope).body
            for node in nodes_of_scope(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in moved
        }
        kept: set[str] = set()
        for node in nodes_of_scope_body(scope):
            if isinstance(node, ast.Delete):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)} & unread
                if id(node) in inside and id(node) not in moved:
                    kept |= names & rebound
                    lift.deletes[node] = names - rebound
                else:
                    kept |= names - self._bound_ahead(node, scope)
        for statement, names in lift.deletes.items():
            lift.deletes[statement] = names - kept
        return kept

    def _bound_ahead(self, statement: ast.Delete, scope: Scope) -> set[str]:
        """The names that are bound anew in a `del`'s own block ahead of it."""
        for node in [scope, *nodes_of_scope_body(scope)]:
            for block in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None)):
                if isinstance(block, list) and statement in block:
                    return definitely_bound(block[: block.index(statement)])
        return set()

    def _bound_where_read(self, name: str, statements: list[ast.stmt]) -> bool:
        """Whether a name is read only under a test that also stood over its binding in an earlier statement.

        `if teacher is not None: soft = ...` and, further down, `if teacher is not None: loss = ... soft ...`.
        """
        tests: set[str] = set()
        tested: set[str] = set()
        for statement in statements:
            if name in names_bound(statement) or name in names_read(statement):
                if not isinstance(statement, ast.If) or (tests and ast.unparse(statement.test) not in tests):
                    return False
                if not tests and name not in definitely_bound(statement.body) - self._liveness.before(
                    statement.body, set()
                ):
                    return False
                if name in names_read(statement.test) or any(name in names_read(child) for child in statement.orelse):
                    return False
                tests.add(ast.unparse(statement.test))
                tested |= names_read(statement.test)
        return not tested & {bound for statement in statements for bound in names_bound(statement)}

    def find_inputs(self, lift: Lift) -> None:
        """Set the parameters: the parts of the batch, and what the slice reads before it binds it.

        Numbers are no part of a batch: the slice sees them from where it stands.

        Raises:
            CannotLift: a parameter may have no value yet.
        """
        read = self._liveness.before(
            lift.lifted, names_read(lift.site.root) | set(lift.outputs) - lift.bound_with_network
        )
        rebound = {name for statement in lift.lifted for name in names_bound(statement)}
        candidates, called = _bound_by_iteration(lift.site), _called_names(lift)
        outside: set[str] = set()
        data = {name for name in read & candidates if name not in called and not self._is_number(name, lift.site)}
        given = _given_to_calls(lift)
        if not data & given:
            others = {n for n in given & read - called if not _NOT_DATA.search(n) and not self._is_number(n, lift.site)}
            outside = self._bound_outside(lift)
            data |= others & (_bound_anywhere(lift.site.scope) | outside)
        bound = self._bound_ahead_of(lift) | outside
        if unsure := (read & rebound) - lift.own - bound:
            raise CannotLift(f"{sorted(unsure)[0]} may have no value yet where the slice reads it")
        # what is passed is read at once, even where the slice would not have come to it
        wanted = ((data & bound) | (read & rebound)) - lift.own
        lift.inputs = [name for name in _reading_order(lift) if name in wanted]

    def _bound_outside(self, lift: Lift) -> set[str]:
        """Variables of the module and of functions around that the slice reads whenever it runs."""
        scope = lift.site.scope
        if isinstance(scope, ast.Module):
            return set()
        variables = {name for outer in _scopes_around(scope, self._tree) for name in _assigned(outer)}
        certain = set(names_read(lift.site.root))
        for statement in lift.lifted:
            certain |= names_read(statement) if isinstance(statement, ast.Assign | ast.Expr) else set()
        return variables.intersection(certain) - _bound_anywhere(scope)

    def _bound_ahead_of(self, lift: Lift) -> frozenset[str]:
        """The names that are bound whenever the slice is entered."""
        first = lift.site.block.index(lift.lifted[0] if lift.lifted else lift.site.end)
        bound = definitely_bound([*lift.site.block[:first], *lift.before])
        return lift.site.bound_before | bound

    def _is_number(self, name: str, site: Site) -> bool:
        """Whether all that the iteration binds to a name are counters and numbers."""
        if _COUNTER.match(name) or _FLAG.match(name):
            return True
        loop = site.iteration
        if loop is None and _NOT_DATA.search(name):
            return True
        nodes = list(nodes_of_scope_body(site.scope))
        stores = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)]
        values = [node.value for node in nodes if isinstance(node, ast.Assign) and _binds_alone(node, name)]
        return bool(values) and len(values) == len(stores) and all(_is_scalar(value) for value in values)

    def copy_sizes(self, lift: Lift, first: int) -> None:
        """Sizes of the batch that the slice reads are asked again inside, of the part that is there."""
        read = self._liveness.before(lift.lifted, names_read(lift.site.root))
        for statement in [*_sizes_asked_outside(lift.site), *lift.site.block[:first]]:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                names = names_bound_by_target(statement.targets[0])
                owner = _sized(statement.value)
                if names & read and owner in lift.inputs and not names & set(lift.inputs):
                    lift.copied.append(statement)
                elif owner in names and owner in lift.inputs:
                    lift.copied.clear()


def _bound_by_the_networks_loop(lift: Lift, runs_forward: Callable[[ast.AST], bool]) -> set[str]:
    """What each round of the one `for` binds that runs the network: without a round there is nothing to backpropagate.

    `for t in range(length): out, hidden = rnn(x[:, t], hidden)`, with `out` read behind the backward.
    """
    running = [statement for statement in lift.lifted if runs_forward(statement)]
    if len(running) != 1 or not isinstance(running[0], ast.For) or runs_forward(lift.site.root):
        return set()
    loop = running[0]
    first = itertools.takewhile(lambda statement: not _may_end_round(statement), loop.body)
    return names_bound_by_target(loop.target) | definitely_bound(first)


def _may_end_round(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in nodes_of_scope(statement))


def _scopes_around(function: FunctionNode, tree: ast.Module) -> list[Scope]:
    functions = (node for node in walk(tree) if isinstance(node, FunctionNode) and node is not function)
    return [tree, *(f for f in functions if f.lineno <= function.lineno <= (f.end_lineno or 0))]


def _assigned(scope: Scope) -> set[str]:
    """The names that a scope gives values to, other than by a definition or an import."""
    found: set[str] = set()
    for node in nodes_of_scope_body(scope):
        if isinstance(node, ast.Assign):
            found |= {name for target in node.targets for name in names_bound_by_target(target)}
        elif isinstance(node, ast.AnnAssign | ast.For):
            found |= names_bound_by_target(node.target)
    return found


def _sizes_asked_outside(site: Site) -> list[ast.stmt]:
    """Sizes asked for in the blocks around a slice, of what is not bound again: `n = len(x)` ahead of a loop."""
    found: list[ast.stmt] = []
    inside = {id(statement) for statement in site.block}
    nodes = list(nodes_of_scope_body(site.scope))
    for node in nodes:
        if not isinstance(node, ast.Assign) or id(node) in inside or len(node.targets) != 1:
            continue
        owner, target = _sized(node.value), node.targets[0]
        if owner is None or not isinstance(target, ast.Name) or target.id not in site.bound_before:
            continue
        stores = [n for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        later = any(store.id == owner and store.lineno >= node.lineno for store in stores)
        if not later and sum(store.id == target.id for store in stores) == 1:
            found.append(node)
    return found


def _binds_alone(node: ast.Assign, name: str) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name


def _read_outside(lift: Lift) -> set[str]:
    """The names that the scope reads outside of the slice."""
    inside = {id(statement) for statement in lift.lifted}
    found: set[str] = set()
    stack: list[ast.AST] = list(lift.site.scope.body)
    while stack:
        node = stack.pop()
        if id(node) in inside or node is lift.site.statement:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found.add(node.id)
        stack += children(node)
    return found


def _in_order(statements: list[ast.stmt]) -> list[str]:
    """The names that statements bind, by the place of their first binding."""
    places: dict[str, tuple[int, int]] = {}
    for statement in statements:
        bound = names_bound(statement)
        for node in nodes_of_scope(statement):
            name = node.id if isinstance(node, ast.Name) else getattr(node, "name", None)
            if (
                name in bound
                and isinstance(node, ast.Name | ast.stmt)
                and not isinstance(getattr(node, "ctx", None), ast.Load)
            ):
                place = (node.lineno, node.col_offset)
                places[name] = min(places.get(name, place), place)
    return sorted(places, key=places.__getitem__)


def _reading_order(lift: Lift) -> list[str]:
    places: dict[str, tuple[int, int]] = {}
    for part in (*lift.lifted, lift.site.root):
        for node in walk(part):
            if isinstance(node, ast.Name):
                places.setdefault(node.id, (node.lineno, node.col_offset))
                places[node.id] = min(places[node.id], (node.lineno, node.col_offset))
    return sorted(places, key=places.__getitem__)


def _bound_by_iteration(site: Site) -> set[str]:
    loop = site.iteration
    if loop is not None:
        target = names_bound_by_target(loop.target) if not isinstance(loop, ast.While) else set()
        return target.union(*(names_bound(statement) for statement in loop.body))
    scope = site.scope
    if isinstance(scope, ast.Module):
        return set()
    arguments = scope.args
    parameters = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return parameters.union(*(names_bound(statement) for statement in scope.body))


def _bound_anywhere(scope: Scope) -> set[str]:
    bound = {name for statement in scope.body for name in names_bound(statement)}
    if isinstance(scope, ast.Module):
        return bound
    return bound | {argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}


def _called_names(lift: Lift) -> set[str]:
    """Names that the slice calls, and those of functions and classes: no data."""
    found: set[str] = set()
    for part in (*lift.lifted, lift.site.root):
        for node in walk(part):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    found.add(node.func.id)
                elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    if _NOT_DATA.search(node.func.value.id) or looks_like_module(node.func.value.id):
                        found.add(node.func.value.id)
    return found


def _given_to_calls(lift: Lift) -> set[str]:
    """Names given as they are, or as a part, to what the slice calls."""
    found: set[str] = set()
    for part in (*lift.lifted, lift.site.root):
        for call in (node for node in walk(part) if isinstance(node, ast.Call)):
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                found |= names_read(argument)
    return found


def _is_scalar(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.Call):
        numbers = ("len", "int", "float") if isinstance(value.func, ast.Name) else _NUMBER_METHODS
        return effects.last_name(value) in numbers
    if isinstance(value, ast.BinOp):
        return _is_scalar(value.left) and _is_scalar(value.right)
    return _sized(value) is not None


def _sized(value: ast.expr) -> str | None:
    """The name whose size an expression asks for: `len(x)`, `x.size(0)`, `x.shape[0]`, `x.shape`."""
    if isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name):
        return value.value.id
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id == "len" and len(value.args) == 1:
            return value.args[0].id if isinstance(value.args[0], ast.Name) else None
        if (
            isinstance(value.func, ast.Attribute)
            and value.func.attr == "size"
            and isinstance(value.func.value, ast.Name)
        ):
            return value.func.value.id
    return None
