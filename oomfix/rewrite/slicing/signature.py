"""The inputs and outputs of a slice that becomes a function."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from oomfix.rewrite.dataflow.blocks import Loop
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import (
    Liveness,
    Scope,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.rewrite.facts.lift import CannotLift, Lift, Site
from oomfix.rewrite.slicing.batch_names import (
    MADE_BY_SIZE,
    BatchNames,
    asks_first_size,
    bound_anywhere,
    bound_by_iteration,
)
from oomfix.rewrite.slicing.bound_on_some_ways import (
    bound_by_its_rounds,
    bound_by_the_networks_loop,
    bound_by_the_networks_ways,
    bound_with_the_loss,
    loss_of_some_ways,
    missed_otherwise,
)
from oomfix.rewrite.slicing.bound_under_a_test import asks_for_rows, test_of_binding
from oomfix.rewrite.slicing.constant_tests import ConstantTests
from oomfix.rewrite.slicing.own_closures import of_own_closures
from oomfix.rewrite.slicing.plain_numbers import size_of
from oomfix.rewrite.slicing.unsure_inputs import read_at_once, tests_of
from oomfix.script.syntax.names import last_name, root_of
from oomfix.script.syntax.nodes import blocks, children, walk


class Signature:
    """Finds what one slice takes and gives.

    Args:
        liveness: of the scope it stands in.
        batch_names: of the module.
        runs_forward: whether a statement runs a network.
        tests: what is known of the tests of the module.
    """

    def __init__(
        self,
        liveness: Liveness,
        batch_names: BatchNames,
        runs_forward: Callable[[ast.AST], bool],
        tests: ConstantTests,
    ) -> None:
        self._liveness = liveness
        self._batch_names = batch_names
        self._runs_forward = runs_forward
        self._tests = tests
        self._bound_with_network: set[str] = set()
        """Names that each round of the loop around the network binds."""
        self._bound_with_loss: set[str] = set()
        """Names that are bound on every way on which the loss is."""
        self._own: set[str] = set()
        """Names bound only on some ways through the slice, and read on the same ones, or where all others fail."""
        self._not_given: set[str] = set()
        """Names of the slice whose values are never those from before."""

    def find_outputs(self, lift: Lift) -> None:
        """Set the outputs: what the slice binds and something reads later.

        Raises:
            CannotLift: an output may have no value.
        """
        live = self._live_behind(lift)
        lift.underscore_is_taken = "_" in live or _underscore_is_from_outside(lift.site.scope)
        bound = _in_order(lift.lifted)
        if lift.all_names_are_read:
            live |= set(bound)
        live |= self._find_deletes(lift, set(bound) - live)
        self._bound_with_network = bound_by_the_networks_loop(lift, self._runs_forward)
        self._bound_with_loss = bound_with_the_loss(lift)
        self._own |= bound_by_the_networks_ways(lift, self._runs_forward)
        self._own |= bound_by_its_rounds(lift, self._runs_forward, self._liveness)
        self._own |= missed_otherwise(lift) | loss_of_some_ways(lift)
        others = self._liveness.always | _read_outside(lift)
        outside = others | names_read(lift.site.root) | (set(bound) if lift.all_names_are_read else set())
        kept = self._tests.own_names(lift, outside)
        self._own |= kept | self._read_behind_in_any_case(lift)
        certain = definitely_bound(lift.lifted) | self._bound_with_network | self._bound_with_loss | self._own
        given = self._bound_ahead_of(lift)
        for name in bound:
            if name not in live or name in kept:
                continue
            if name not in certain | given:
                if name not in others and self._bound_where_read(name, lift.lifted):
                    self._own.add(name)
                    continue
                if name != lift.loss and self._is_bound_under_a_test(name, lift):
                    lift.outputs.append(name)
                    continue
                if name in _bound_in_expressions(lift.lifted):
                    raise CannotLift(f"{name} is read later, and bound within an expression")
                raise CannotLift(f"{name} is read later, and only bound on some ways through the slice")
            if name == lift.loss:
                lift.loss_is_read = True
            else:
                lift.outputs.append(name)
        if lift.loss in self._liveness.always & set(bound):
            lift.loss_is_read = True

    def _live_behind(self, lift: Lift) -> set[str]:
        """The names that are read behind the backward; what is only done again there, and read by nothing, goes."""
        live = set(self._liveness.after(lift.site.statement))
        for side in lift.site.other_sides:
            live |= self._liveness.before(side, self._liveness.after(lift.site.end))
        while lift.after and lift.after[-1] in lift.rescaled and not names_bound(lift.after[-1]) & live:
            lift.after.pop()
        live = self._liveness.before(lift.after, live) if lift.after else live
        return live - of_own_closures(lift, self._liveness)

    def _is_bound_under_a_test(self, name: str, lift: Lift) -> bool:
        """Note the test under which a slice binds a name, if there is one."""
        test = None if name in self._liveness.always or lift.all_names_are_read else test_of_binding(name, lift)
        if test is None:
            return False
        lift.bound_if[name] = test
        if name not in names_read(lift.site.root) and self._bound_where_read(name, lift.lifted):
            self._own.add(name)
        return True

    def _read_behind_in_any_case(self, lift: Lift) -> set[str]:
        """The names that a slice binds under tests of settings, and that are read behind its backward in any case.

        `if args.aux: aux = ...` and, behind the backward, `total += aux.item()`: without, the first iteration fails.
        """
        site = lift.site
        if site.branch is not None:
            return set()
        behind = itertools.takewhile(lambda one: not leaves(one), site.block[site.block.index(site.end) + 1 :])
        simple = (ast.Expr, ast.Assign, ast.AugAssign)
        read = read_at_once([one for one in (*lift.after, *behind) if isinstance(one, simple)]) - self._liveness.always
        return self._tests.own_names(lift, _read_outside(lift) - read) & read

    def _find_deletes(self, lift: Lift, unread: set[str]) -> set[str]:
        """Note the `del` of names that nothing else reads; returns the names that have to stay for their `del`.

        One between the slice and its backward goes where all that it deletes lives in the function now.
        """
        loop, scope = lift.site.iteration, lift.site.scope
        inside = {id(node) for node in nodes_of_scope(*(loop or scope).body)}
        moved = {id(node) for node in nodes_of_scope(*lift.lifted, *lift.after)}
        rebound = {
            node.id
            for node in nodes_of_scope(*(loop or scope).body)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in moved
        }
        kept: set[str] = set()
        gone = _always_deleted(loop) if loop is not None else set()
        own = {id(node) for node in nodes_of_scope(*lift.lifted)}
        for node in nodes_of_scope_body(scope):
            if isinstance(node, ast.Delete) and id(node) not in own:
                names = {target.id for target in node.targets if isinstance(target, ast.Name)} & unread
                if node in lift.after and len(names - rebound) == len(node.targets):
                    lift.after.remove(node)
                elif id(node) in moved:
                    kept |= names
                elif id(node) in inside:
                    kept |= names & rebound
                    lift.deletes[node] = names - rebound
                else:
                    kept |= names - _bound_ahead(node, scope) - gone
        still_there = self._bound_ahead_of(lift)
        for statement, names in lift.deletes.items():
            lift.deletes[statement] = names - kept - still_there
        return kept - still_there

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
                if name in names_read(statement.test) or name in names_read(*statement.orelse):
                    return False
                tests.add(ast.unparse(statement.test))
                tested |= names_read(statement.test)
        return not tested & names_bound(*statements)

    def find_inputs(self, lift: Lift) -> None:
        """Set the parameters: the parts of the batch, and what the slice reads before it binds it.

        Raises:
            CannotLift: a parameter may have no value yet.
        """
        returned = names_read(lift.site.root) | set(lift.outputs) - self._bound_with_network - lift.bound_if.keys()
        read = self._liveness.before(lift.lifted, returned - self._bound_with_loss)
        rebound = names_bound(*lift.lifted)
        data = self._batch_names.of(lift, read) | {name for one in lift.kept for name in _made_or_filled(one)} & read
        bound = self._bound_ahead_of(lift) | (data - bound_anywhere(lift.site.scope)) | _read_in_any_case(lift)
        self._not_given = self._own | self._tests.never_from_before(lift) - bound
        if unsure := (read & rebound) - self._not_given - bound:
            raise CannotLift(f"{sorted(unsure)[0]} may have no value yet where the slice reads it")
        # what is passed is read at once, even where the slice would not have come to it
        lift.given_if = tests_of(data - bound - returned - self._not_given, self._ahead_of(lift), lift.lifted)
        wanted = ((data & bound) | (read & rebound) | lift.given_if.keys()) - self._not_given
        # an output that nothing in the slice reads may have its value from before
        lift.inputs = [name for name in dict.fromkeys([*_reading_order(lift), *lift.outputs]) if name in wanted]
        if rows := [name for name, test in lift.bound_if.items() if asks_for_rows(test, lift)]:
            raise CannotLift(f"{rows[0]} is read later, and only bound where rows of the batch say so")

    def check_deletes(self, lift: Lift) -> None:
        """Whether what the slice deletes is its own by then: `with autocast(): out = model(x); del x; loss = ...`.

        Raises:
            CannotLift: it is not, or is to be gone outside as well.
        """
        nodes = list(nodes_of_scope(*lift.lifted))
        made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own = {*lift.inputs, *made} - set(lift.outputs)
        for node in (node for node in nodes if isinstance(node, ast.Delete)):
            if lift.all_names_are_read or not names_read(node) <= own:
                raise CannotLift(f"line {node.lineno} holds `delete` on the way to the loss")

    def _bound_ahead_of(self, lift: Lift) -> frozenset[str]:
        """The names that are bound whenever the slice is entered."""
        return lift.site.bound_before | definitely_bound(self._ahead_of(lift))

    def _ahead_of(self, lift: Lift) -> list[ast.stmt]:
        first = lift.site.block.index(lift.lifted[0] if lift.lifted else lift.site.end)
        return [*lift.site.block[:first], *lift.before]

    def copy_sizes(self, lift: Lift, first: int) -> None:
        """Sizes of the batch that the slice reads are asked again inside, of the part that is there."""
        read = self._liveness.before(lift.lifted, names_read(lift.site.root))
        for statement in [*_sizes_asked_outside(lift.site), *lift.site.block[:first], *lift.before]:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                names = names_bound_by_target(statement.targets[0])
                owner = size_of(statement.value)
                if names & read and owner in lift.inputs and not names & set(lift.inputs):
                    lift.copied.append(statement)
                elif owner in names and owner in lift.inputs:
                    lift.copied.clear()
                elif (
                    owner is not None and lift.inputs and names & read and self._makes_rows_like(owner, statement, lift)
                ):
                    lift.inputs.append(owner)
                    lift.copied.append(statement)
        ahead = (statement for statement in lift.copied if statement not in lift.before)
        lift.moved = [statement for statement in ahead if self._is_read_inside_alone(statement, lift)]

    def _makes_rows_like(self, owner: str, statement: ast.Assign, lift: Lift) -> bool:
        """Whether a slice makes as many rows as a part of the batch has that it reads nothing of.

        `n = x.size(0)` ahead of `loss = criterion(critic(fake), torch.zeros(n, 1))`.
        """
        block, names = lift.site.block, names_bound(statement)
        if statement not in block or not asks_first_size(statement.value) or owner not in self._bound_ahead_of(lift):
            return False
        last = block.index(lift.lifted[0] if lift.lifted else lift.site.end)
        again = block[block.index(statement) + 1 : last]
        if owner not in bound_by_iteration(lift) or names_bound(*again) & {owner, *names}:
            return False
        calls = calls_in(*lift.lifted, lift.site.root)
        made = (call.args[0] for call in calls if last_name(call) in MADE_BY_SIZE and call.args)
        return any(isinstance(first, ast.Name) and first.id in names for first in made)

    def _is_read_inside_alone(self, statement: ast.stmt, lift: Lift) -> bool:
        """Whether nothing but a slice reads what a statement of its block binds, which is not the first one there."""
        if lift.all_names_are_read or statement not in lift.site.block[1:]:
            return False
        return names_bound(statement).isdisjoint(_read_outside(lift) | self._liveness.always)


def _made_or_filled(statement: ast.stmt) -> set[str]:
    """`old` of `old = pool.query(fake)`, `label` of `label.fill_(1)`."""
    return names_bound(statement).union(map(root_of, changed_paths(statement)))


def _always_deleted(loop: Loop) -> set[str]:
    """The names that no iteration leaves bound: a `del` in its own block takes them, and nothing leaves it before."""
    gone: set[str] = set()
    for statement in loop.body:
        if isinstance(statement, ast.Delete):
            gone |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        else:
            gone -= names_bound(statement)
    return set() if any(map(leaves, loop.body)) else gone


def _bound_ahead(statement: ast.Delete, scope: Scope) -> set[str]:
    """The names that are bound anew in a `del`'s own block ahead of it."""
    block = next(block for block in blocks(walk(scope)) if statement in block)
    return definitely_bound(block[: block.index(statement)])


def _bound_in_expressions(statements: list[ast.stmt]) -> set[str]:
    """The names that `:=` binds."""
    named = (node for node in nodes_of_scope(*statements) if isinstance(node, ast.NamedExpr))
    return {name for node in named for name in names_bound_by_target(node.target)}


def _read_in_any_case(lift: Lift) -> set[str]:
    """What the slice reads whatever happens; where it is the loss alone, that is read at once."""
    return read_at_once(lift.lifted or [ast.Expr(lift.site.root)])


def _sizes_asked_outside(site: Site) -> list[ast.stmt]:
    """Sizes asked for in the blocks around a slice, of what is not bound again: `n = len(x)` ahead of a loop."""
    found: list[ast.stmt] = []
    inside = {id(statement) for statement in site.block}
    nodes = list(nodes_of_scope_body(site.scope))
    for node in nodes:
        if not isinstance(node, ast.Assign) or id(node) in inside or len(node.targets) != 1:
            continue
        owner, target = size_of(node.value), node.targets[0]
        if owner is None or not isinstance(target, ast.Name) or target.id not in site.bound_before:
            continue
        stores = [n for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        later = any(store.id == owner and store.lineno >= node.lineno for store in stores)
        if not later and sum(store.id == target.id for store in stores) == 1:
            found.append(node)
    return found


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
        changed = {id(node.target) for node in walk(part) if isinstance(node, ast.AugAssign)}
        for node in walk(part):
            if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Load) or id(node) in changed):
                places.setdefault(node.id, (node.lineno, node.col_offset))
                places[node.id] = min(places[node.id], (node.lineno, node.col_offset))
    return sorted(places, key=places.__getitem__)


def _underscore_is_from_outside(scope: Scope) -> bool:
    """Whether a scope reads a `_` that something around it binds: bound here, it would be a name of the scope."""
    return "_" in names_read(*scope.body) and "_" not in names_bound(*scope.body)
