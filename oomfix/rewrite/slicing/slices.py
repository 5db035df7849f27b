"""The backward slice of a loss within an iteration, and whether it can become a function of its own."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cached_property

from oomfix.rewrite.dataflow.calls import called_name, calls_in
from oomfix.rewrite.dataflow.changes import changed_paths, function_that_may_change, overlap, paths_read
from oomfix.rewrite.dataflow.effects import switches_mode
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import (
    Liveness,
    Scope,
    definitely_bound,
    names_bound,
    names_bound_by_target,
    names_declared,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.rewrite.dataflow.on_gradients import is_zero_grad, keeps_gradients
from oomfix.rewrite.dataflow.outside_of_functions import OutsideOfFunctions
from oomfix.rewrite.dataflow.shared_tensors import taken_out, with_views
from oomfix.rewrite.facts.diverged import asks_if_not_finite
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.lift import CannotLift, Lift, OutsideOfBlock, Site
from oomfix.rewrite.facts.network_use import PREPARATION, NetworkUse
from oomfix.rewrite.facts.scale import reads_gradients
from oomfix.rewrite.slicing.asked_graphs import with_asserts
from oomfix.rewrite.slicing.batch_names import BatchNames
from oomfix.rewrite.slicing.between import Between, is_start
from oomfix.rewrite.slicing.constant_tests import ConstantTests
from oomfix.rewrite.slicing.empty_starts import with_empty_starts
from oomfix.rewrite.slicing.filled_lists import check_nothing_is_filled
from oomfix.rewrite.slicing.hidden_states import states_made_before
from oomfix.rewrite.slicing.kept_by_number import filled_from_inside, taken_by_number
from oomfix.rewrite.slicing.marked_targets import marked
from oomfix.rewrite.slicing.pools import exchanged
from oomfix.rewrite.slicing.read_between import with_readers
from oomfix.rewrite.slicing.refilled_tensors import refilled
from oomfix.rewrite.slicing.rescaling import without_scaling
from oomfix.rewrite.slicing.rows_by_number import why_by_number
from oomfix.rewrite.slicing.rows_in_turn import why_in_turn
from oomfix.rewrite.slicing.signature import Signature
from oomfix.script.syntax.names import last_name, path_of, root_of
from oomfix.script.syntax.nodes import children, is_remark, walk

_RECORDING = ("enable_grad", "set_grad_enabled")
_MOST_STARTS = 4


class Slicer:
    """Finds what a backward depends on.

    Args:
        tree: the module.
        helpers: its functions.
        networks: what statements do with networks.
        manager: the name of the runtime's manager.
    """

    def __init__(self, tree: ast.Module, helpers: Helpers, networks: NetworkUse, manager: str) -> None:
        self._tree = tree
        self._manager = manager
        self._helpers = helpers
        self._networks, self._runs_forward = networks, networks.runs
        self._between = Between(networks, helpers, self.liveness_of, OutsideOfFunctions(helpers.functions))
        self._batch_names = BatchNames(tree, networks.runs)
        self._tests = ConstantTests(tree)
        self._liveness: dict[int, Liveness] = {}
        self._own_names = names_bound(*tree.body)

    @cached_property
    def _filled(self) -> set[str]:
        return filled_from_inside(self._tree)

    def lift(self, site: Site, network_is_known: bool) -> Lift:
        """The slice of a backward as a function: the longest of those that may be one.

        Args:
            site: where the backward stands.
            network_is_known: whether a network is seen to run in the loop, here or elsewhere.

        Raises:
            CannotLift: moving it might change what the script does; says what stands in the way.
        """
        if bound := names_bound(site.root):
            raise CannotLift(f"line {site.root.lineno} binds {min(bound)} within what is differentiated")
        end = site.block.index(site.end)
        chain = self._dependences(site, end)
        starts = self._starts(site, chain, end, network_is_known)
        if not starts:
            raise OutsideOfBlock("no network is seen to run in the block of its backward")
        lifts: list[Lift] = []
        first_problem: CannotLift | None = None
        for start in starts:
            try:
                lifts.append(self._lift_with_or_without_states(site, self._from(start, site, chain), end))
            except CannotLift as problem:
                if not self._runs_forward(site.block[start]):
                    raise
                first_problem = first_problem or problem
            else:
                if lifts[-1].inputs:
                    return lifts[-1]
        if not lifts and first_problem is not None:
            raise first_problem
        return lifts[0]

    def _lift_with_or_without_states(self, site: Site, chosen: list[int], end: int) -> Lift:
        read = self.liveness_of(site.scope).before([site.block[index] for index in chosen], names_read(site.root))
        if states := states_made_before(site, chosen[0] if chosen else end, read, self._helpers.draw_random_numbers):
            try:
                return self._lift_with_or_without_scaling(site, sorted([*states, *chosen]), end)
            except CannotLift:
                pass  # a state from outside is given whole, and its batches run whole
        return self._lift_with_or_without_scaling(site, chosen, end)

    def _lift_with_or_without_scaling(self, site: Site, chosen: list[int], end: int) -> Lift:
        try:
            return self._lift(site, chosen, end)
        except CannotLift:
            shorter = without_scaling(site, chosen)
            if shorter is None:
                raise
            return self._lift(*shorter[:2], end, shorter[2])

    def _lift(self, site: Site, chosen: list[int], end: int, rescaled: Sequence[ast.stmt] = ()) -> Lift:
        chosen = with_empty_starts(site.block, _with_guards(site.block, chosen))
        chosen = with_readers(site.block, chosen, site.root, self._helpers)
        chosen = with_asserts(site.block, chosen, end)
        kept = taken_by_number(site, chosen, self._runs_forward, lambda: self._filled)
        kept += exchanged(site, [index for index in chosen if index not in kept], self._runs_forward, self._helpers)
        kept += refilled(site, [index for index in chosen if index not in kept], self._helpers)
        kept += marked(site, [index for index in chosen if index not in kept], self._runs_forward, self._helpers)
        chosen = _with_remarks(site.block, [index for index in chosen if index not in kept])
        lifted = [site.block[index] for index in chosen]
        loss = site.root.id if isinstance(site.root, ast.Name) else None
        lift = Lift(site, lifted, loss=loss, rescaled=list(rescaled), kept=[site.block[index] for index in kept])
        lift.all_names_are_read = self._check_frame_readers(lift)
        for statement in lifted:
            self._check_lifted(statement, lift)
        self._check_changes(lift)
        self._between.place_in_branch(lift)
        liveness = self.liveness_of(site.scope)
        signature = Signature(liveness, self._batch_names, self._runs_forward, self._tests)
        self._between.place(lift, chosen, end)
        signature.find_outputs(lift)
        signature.find_inputs(lift)
        signature.check_deletes(lift)
        check_nothing_is_filled(lift, liveness)
        signature.copy_sizes(lift, chosen[0] if chosen else end)
        lift.one_sample = why_in_turn(lift, liveness, self._runs_forward) or why_by_number(lift, self._runs_forward)
        return lift

    # -- which statements --------------------------------------------------------------------------------------

    def _starts(self, site: Site, chain: list[int], end: int, network_is_known: bool) -> list[int]:
        """The indices in the block that the slice may start at, the best first; none where no network runs there.

        A teacher that runs ahead of the network records nothing that the backward would need: it may stay outside. It
        has to where it draws random numbers, as the noise of a target: parts would draw others than the whole. What
        runs the network for a look at it may stay outside as well.
        """
        running = [index for index in chain if self._runs_forward(site.block[index])]
        if running:
            starts = self._starts_of_running(running, site, chain)
            later = [index for index in running if self._networks.leads_to_loss(site.block[index])]
            return list(dict.fromkeys([*starts, *later[:1]]))
        calls = [index for index in chain if self._may_compute(site.block[index])]
        if network_is_known:
            calls = [index for index in calls if self._networks.takes(site.block[index])]
        if calls:
            # it is what the loss is computed from first
            return calls[:_MOST_STARTS]
        return [end] if self._runs_forward(site.root) else []

    def _starts_of_running(self, running: list[int], site: Site, chain: list[int]) -> list[int]:
        trained = [index for index in running if self._trains(site.block[index])]
        if not trained or trained[0] == running[0]:
            later = [index for index in trained if not detaches(site.block[index])]
            return [running[0], *later[:1]]
        ahead = (site.block[index] for index in chain if index < trained[0])
        drawn = any(self._helpers.draw_random_numbers(statement) for statement in ahead)
        return [trained[0], running[0]] if drawn else [running[0], trained[0]]

    def _trains(self, statement: ast.stmt) -> bool:
        return self._networks.trains(statement) and not records_nothing(statement)

    def _from(self, first: int, site: Site, chain: list[int]) -> list[int]:
        """The slice from an index on, and what starts what it goes on with."""
        chosen = [index for index in chain if index >= first]
        while (more := self._started_before(site, chosen, chain)) is not None:
            chosen = sorted([*chosen, more])
        return chosen

    def _dependences(self, site: Site, end: int) -> list[int]:
        names, paths = names_read(site.root), paths_read(site.root)
        liveness = self.liveness_of(site.scope)
        chain = []
        for index in range(end - 1, site.first - 1, -1):
            statement = site.block[index]
            if self._helpers.only_reset_gradients(statement) or _only_switches(statement):
                continue
            # `memory.backward(other)` changes nothing that `with memory.autocast():` reads
            changed = changed_paths(statement, but_for_gradients=True) - {self._manager}
            if not (names_bound(statement) & names or overlap(changed, paths)):
                if not self._changes_under_another_name(statement, names, site.block[:index]):
                    continue
            chain.append(index)
            bound = definitely_bound([statement]) - names_read(statement)
            names = liveness.before([statement], names)
            paths = {path for path in paths if path.split(".")[0] not in bound} | paths_read(statement)
        return sorted(chain)

    def _changes_under_another_name(self, statement: ast.stmt, names: set[str], ahead: list[ast.stmt]) -> bool:
        """Whether a statement behind a network writes to views of what the loss needs: `w = y.view(-1); w[0] = 1`."""
        written = {path for path in changed_paths(statement) if "." not in path} - {self._manager}
        targets = (node.target for node in nodes_of_scope(statement) if isinstance(node, ast.AugAssign))
        written |= {target.id for target in targets if isinstance(target, ast.Name)}
        written -= names
        if not written or not any(map(self._runs_forward, ahead)):
            return False
        return not written.isdisjoint(with_views(names, ahead))

    def _may_compute(self, statement: ast.stmt) -> bool:
        calls_out = any(last_name(call) not in PREPARATION for call in calls_in(statement))
        return calls_out and not self._helpers.fetch(statement)

    def _started_before(self, site: Site, chosen: list[int], chain: list[int]) -> int | None:
        """A statement that starts what the slice goes on with: `loss = 0`, `losses = []`."""
        statements = [site.block[index] for index in chosen]
        changed = {root_of(path) for statement in statements for path in self._helpers.changed_paths(statement)}
        bound = names_bound(*statements)
        wanted = changed | {name for name in bound if _read_before_bound(name, statements)}
        wanted -= definitely_bound(statements) - {n for n in bound if _read_before_bound(n, statements)}
        for index in reversed(chain):
            if index not in chosen and index < (chosen[0] if chosen else 0):
                statement = site.block[index]
                if names_bound(statement) & wanted and is_start(statement):
                    return index
        return None

    # -- may it be lifted --------------------------------------------------------------------------------------

    def _check_lifted(self, statement: ast.stmt, lift: Lift) -> None:
        line = statement.lineno
        if (keyword := leaves(statement)) is not None:
            raise CannotLift(f"`{keyword}` in line {line} leaves the part that the loss is computed in")
        if self._helpers.train(statement):
            raise CannotLift(f"line {line} runs a step or another backward on the way to the loss")
        if self._helpers.reset_gradients(statement) and not any(map(is_zero_grad, lift.site.block)):
            raise CannotLift(f"line {line} resets gradients on the way to the loss, and nothing else does")
        if self._helpers.meet_other_processes(statement):
            raise CannotLift(f"line {line} waits for other processes on the way to the loss")
        if switches_mode(statement, computes=self._networks.leads_to_loss):
            raise CannotLift(f"line {line} switches layers or gradients on the way to the loss")
        if self._helpers.fetch(statement):
            raise CannotLift(f"line {line} fetches a batch on the way to the loss, and would do so for every part")
        if reads_gradients(statement):
            raise CannotLift(f"line {line} reads gradients on the way to the loss, which would be those of parts")
        if keeps_gradients(statement):
            raise CannotLift(f"line {line} keeps a gradient on the way to the loss, which would be one of a part")
        for node in nodes_of_scope(statement):
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.ClassDef):
                raise CannotLift(f"line {node.lineno} holds `{type(node).__name__.lower()}` on the way to the loss")
            if isinstance(node, ast.Call) and path_of(node.func) == "super" and not node.args:
                raise CannotLift(f"`super()` in line {node.lineno} means the method it stands in")
            if isinstance(node, ast.Call) and last_name(node) == "zero_grad":
                raise CannotLift(f"gradients are reset inside of the part that the loss is computed in, line {line}")
        if shared := names_bound(statement) & names_declared(*lift.site.scope.body):
            raise CannotLift(f"line {line} writes {sorted(shared)[0]}, which belongs to a scope around it")
        self._check_effect(statement, lift)

    def _check_effect(self, node: ast.AST, lift: Lift) -> None:
        """What is left behind in attributes, the runtime sees, and runs such batches whole."""
        effect = self._helpers.lasting_effect(node)
        if effect is None:
            return
        if not effect.may_be_put_back:
            raise CannotLift(f"{effect.told}, and would do so for every part of a batch")
        lift.state = effect.told

    def _check_frame_readers(self, lift: Lift) -> bool:
        """Whether the scope reads names that it does not write down: `locals()["loss"]`, but not ahead of all loops."""
        inside = {id(node) for node in walk(*lift.lifted)}
        first = _first_line_again(lift)
        found = False
        for node in nodes_of_scope_body(lift.site.scope):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in self._own_names:
                if node.func.id in ("locals", "vars", "exec", "eval") and not (node.func.id == "vars" and node.args):
                    if id(node) in inside:
                        raise CannotLift(f"`{node.func.id}()` in line {node.lineno} may read any local name")
                    found = found or node.lineno >= first
        return found

    def _check_changes(self, lift: Lift) -> None:
        """Objects may be changed only where the slice itself made them."""
        made: set[str] = set()
        header = lift.site.iteration
        batch = names_bound_by_target(header.target) if isinstance(header, ast.For) else set()
        taken: dict[str, str] = {}
        for statement in lift.lifted:
            taken |= {name: of for name, of in taken_out(statement).items() if of.split(".")[0] not in made | batch}
            for node in nodes_of_scope(statement):
                if isinstance(node, ast.Expr) and (held := _changed_of_another(node, taken)):
                    raise CannotLift(f"line {node.lineno} changes what {held} holds, made outside of the slice")
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                    if node.target.id not in made | _bound_afresh(statement):
                        line, name = node.lineno, node.target.id
                        raise CannotLift(f"line {line} adds to {name}, which was made outside of the slice")
            made |= names_bound(statement)
            for path in sorted(self._helpers.changed_paths(statement)):
                if path.split(".")[0] not in made:
                    change = self._innermost_change(path, statement)
                    raise CannotLift(f"line {change.lineno} {_told_change(path, change)}")
        for name in sorted(self._helpers.records(lift.site.root) - made):
            raise CannotLift(f"line {lift.site.root.lineno} changes {name}, which was made outside of the slice")
        if self._runs_forward(lift.site.root):
            self._check_effect(lift.site.root, lift)

    def _innermost_change(self, path: str, statement: ast.stmt) -> ast.stmt:
        """Where a statement changes something: in a block, the first statement of the block that does."""
        for inner in children(statement):
            if isinstance(inner, ast.stmt) and path in self._helpers.changed_paths(inner):
                return self._innermost_change(path, inner)
        return statement

    def liveness_of(self, scope: Scope) -> Liveness:
        """Which names are read later, in a function or the module."""
        if id(scope) not in self._liveness:
            self._liveness[id(scope)] = Liveness(scope, self._tree)
        return self._liveness[id(scope)]


def records_nothing(statement: ast.stmt) -> bool:
    """`with torch.no_grad(): ...`."""
    contexts = statement.items if isinstance(statement, ast.With) else []
    off = any(called_name(item.context_expr) in ("no_grad", "inference_mode") for item in contexts)
    return off and not any(last_name(call) in _RECORDING for call in calls_in(statement))


def detaches(statement: ast.stmt) -> bool:
    """`fake = generator(noise).detach()`."""
    return isinstance(statement, ast.Assign) and called_name(statement.value) == "detach"


def _changed_of_another(statement: ast.Expr, taken: dict[str, str]) -> str | None:
    """What holds an object that was taken out of it, `scores = log[task]`, and that is changed: `scores.append(1)`."""
    call = statement.value
    if not isinstance(call, ast.Call) or last_name(call).endswith("_"):
        return None
    changed = map(root_of, changed_paths(statement))
    return next((taken[name] for name in changed if name in taken), None)


def _told_change(path: str, statement: ast.stmt) -> str:
    """What is done to something from outside of the slice; which of its arguments a function changes is not known."""
    function = function_that_may_change(path, statement)
    if function:
        return f"calls `{function}`, which may change what it is given"
    return f"changes {path}, which was made outside of the slice"


def _first_line_again(lift: Lift) -> int:
    """The first line of the scope that runs after the slice has: that of the outermost loop around it, or its own."""
    here = lift.lifted[0].lineno if lift.lifted else lift.site.end.lineno
    return min([here, *(loop.lineno for loop in lift.site.loops)])


def _bound_afresh(statement: ast.stmt) -> set[str]:
    """The names that a statement binds other than by changing what they were bound to."""
    found: set[str] = set()
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Assign):
            found |= names_bound_by_target(*node.targets)
        elif isinstance(node, ast.AnnAssign | ast.For | ast.NamedExpr):
            found |= names_bound_by_target(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            found |= names_bound_by_target(node.optional_vars)
    return found


def _with_guards(block: list[ast.stmt], chosen: list[int]) -> list[int]:
    """A slice with the guards in it that end the run where what it has computed so far is not finite.

    They are asked of every part of a batch: all of it is finite where all parts are.
    """
    found = list(chosen)
    for index in range(chosen[0], chosen[-1]) if chosen else ():
        later = {name for other in chosen if other > index for name in names_bound(block[other])}
        if index not in chosen and _ends_if_not_finite(block[index]) and names_read(block[index]) & later:
            found.append(index)
    return sorted(found)


def _with_remarks(block: list[ast.stmt], chosen: list[int]) -> list[int]:
    """A slice with the strings in it that stand above its statements."""
    found = set(chosen)
    for index in reversed(range(chosen[0], chosen[-1]) if chosen else ()):
        if index + 1 in found and is_remark(block[index]):
            found.add(index)
    return sorted(found)


def _ends_if_not_finite(statement: ast.stmt) -> bool:
    """`if torch.isnan(loss): print("diverged"); sys.exit(1)`."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    last = statement.body[-1]
    ends = isinstance(last, ast.Raise) or (
        isinstance(last, ast.Expr) and called_name(last.value) in ("exit", "_exit", "quit")
    )
    return ends and asks_if_not_finite(statement.test)


def _only_switches(statement: ast.stmt) -> bool:
    """`model.train()`, `model = model.train()`, `if fine: fine.train()`."""
    if isinstance(statement, ast.If):
        return all(map(_only_switches, (*statement.body, *statement.orelse))) and not any(calls_in(statement.test))
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call):
        function = statement.value.func
        same = isinstance(function, ast.Attribute) and path_of(function.value) == path_of(statement.targets[0])
        return same and path_of(statement.targets[0]) is not None and switches_mode(statement)
    return isinstance(statement, ast.Expr) and switches_mode(statement)


def _read_before_bound(name: str, statements: list[ast.stmt]) -> bool:
    for statement in statements:
        if name in names_read(statement):
            return True
        if name in definitely_bound([statement]):
            return False
    return False
