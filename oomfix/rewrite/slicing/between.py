"""What stands between the statements of a slice, or ahead of its backward in a branch: where it goes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Set

from oomfix.rewrite.dataflow.blocks import next_in_chain
from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.effects import only_sets_mode, switches_mode
from oomfix.rewrite.dataflow.leaving import leaves
from oomfix.rewrite.dataflow.liveness import Liveness, Scope, names_bound, names_read
from oomfix.rewrite.dataflow.on_gradients import (
    is_zero_grad,
    keeps_gradients,
    may_reset_gradients,
    only_clips,
    only_tells_of_step,
    trains,
)
from oomfix.rewrite.dataflow.outside_of_functions import OutsideOfFunctions
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.rewrite.facts.network_use import NetworkUse
from oomfix.rewrite.facts.skipped_batches import body_of_skip, skips_if_diverged
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import is_remark

_MADE = frozenset(
    "list dict defaultdict OrderedDict tensor zeros ones empty full zeros_like ones_like empty_like full_like "
    "new_tensor new_zeros new_ones new_empty new_full".split()
)


class Between:
    """Places what is not part of a slice ahead of its function or behind the call.

    Args:
        networks: what statements do with networks.
        helpers: the functions of the file.
        liveness_of: of a function or the module.
        outside: what functions of the file change and read outside of them.
    """

    def __init__(
        self,
        networks: NetworkUse,
        helpers: Helpers,
        liveness_of: Callable[[Scope], Liveness],
        outside: OutsideOfFunctions,
    ) -> None:
        self._networks, self._outside = networks, outside
        self._helpers = helpers
        self._liveness_of = liveness_of

    def place(self, lift: Lift, chosen: list[int], end: int) -> None:
        """Where the statements between the slice's go.

        Args:
            lift: the slice, whose `before` and `after` are filled.
            chosen: the indices of its statements in the block.
            end: the index of the backward.

        Raises:
            CannotLift: one of them can go neither ahead of the slice nor behind it.
        """
        block = lift.site.block
        running = [index for index in chosen if self._networks.runs(block[index])]
        running = running or [index for index in chosen if self._networks.takes(block[index])]
        first_forward = next(iter(running), chosen[-1] if chosen else end)
        for index in range(chosen[0] if chosen else end, end):
            if index in chosen:
                continue
            statement = block[index]
            ahead = [other for other in block[chosen[0] : index] if other not in lift.before]
            behind = [block[other] for other in chosen if other > index]
            resets = self._helpers.only_reset_gradients(statement)
            if resets or only_clips(statement):
                self._check_reset(statement, ahead, lift)
                lift.before.append(statement)
                lift.resets += [statement] if resets else []
            elif is_remark(statement):
                about = next(other for other in block[index:] if not is_remark(other))
                goes_up = about is lift.site.end or self._helpers.only_reset_gradients(about)
                (lift.before if goes_up else lift.after).append(statement)
            elif index < first_forward and lift.state is not None:
                raise CannotLift(f"{lift.state}, and line {statement.lineno} may read it")
            elif self._goes_ahead(statement, ahead, index < first_forward, behind, lift):
                lift.before.append(statement)
            elif statement in lift.rescaled:
                lift.after.append(statement)
            else:
                self._check_behind(statement, behind, [block[other] for other in chosen if other < index], lift)
                lift.after.append(statement)

    def _goes_ahead(
        self, statement: ast.stmt, ahead: list[ast.stmt], of_network: bool, behind: list[ast.stmt], lift: Lift
    ) -> bool:
        """Whether a statement goes ahead of the slice: what stands ahead of its network may go behind it as well.

        Raises:
            CannotLift: it has to, and cannot.
        """
        is_kept = statement in lift.kept
        if not (of_network or is_kept or _is_for_nobody(statement, behind)):
            return False
        try:
            _check_passing(statement, ahead)
            self._check_functions(statement, ahead, lift)
            self._check_values(statement, ahead, [])
        except CannotLift:
            if is_kept or not of_network or self._networks.reads(statement):
                raise
            return False
        return True

    def _check_behind(self, statement: ast.stmt, behind: list[ast.stmt], ahead: list[ast.stmt], lift: Lift) -> None:
        """Whether a statement means the same behind the slice."""
        passed = [*behind, lift.site.root]
        runs_last = self._may_run_last(statement, passed, lift)
        in_turn = runs_last or not any(map(_may_call, passed))
        sets_mode = lift.site.branch is None and only_sets_mode(statement)
        if not sets_mode or not (in_turn or not self._networks.sees_mode(statement, passed)):
            self._check_delay(statement, in_turn=in_turn, runs_last=runs_last)
        branch = lift.site.branch
        others = behind + ([] if branch is None else [branch])
        _check_passing(statement, others, self._of_both(statement, behind, lift))
        self._check_functions(statement, others, lift)
        self._check_values(statement, behind, ahead)
        if branch is not None and trains(branch) and self._networks.reads(statement):
            line = statement.lineno
            raise CannotLift(f"line {line} looks at the network, which line {branch.lineno} trains behind it")

    def _may_run_last(self, statement: ast.stmt, behind: list[ast.AST], lift: Lift) -> bool:
        """Whether a network that no loss needs may run behind the backward: nothing it passes draws, or looks at it.

        It runs on the same weights there, ahead of the step, unless that stands in one branch with the backward.
        """
        if lift.site.branch is not None or not self._networks.runs_for_no_loss(statement):
            return False
        uses = (self._networks.runs, self._networks.reads, self._networks.may_draw)
        return not any(use(one) for use in uses for one in behind)

    def _of_both(self, statement: ast.stmt, behind: list[ast.stmt], lift: Lift) -> set[str]:
        """The names that a statement and lines behind it bind anew, and that nobody else reads: `i` of two loops."""
        site, liveness = lift.site, self._liveness_of(lift.site.scope)
        bound = names_bound(statement) & names_bound(*behind)
        if not bound:
            return bound
        first = liveness.before([statement], set()) | liveness.before(behind, set())
        block = site.block
        between = (one for one in block[block.index(statement) + 1 : block.index(site.end)] if one not in behind)
        later = liveness.after(site.end) | liveness.after(site.statement) | names_read(site.root)
        return bound - first - later - names_read(*between)

    def place_in_branch(self, lift: Lift) -> None:
        """Where the statements ahead of a backward in its `if train:` go; the test is asked before the loss is known.

        Raises:
            CannotLift: one of them, or the test, has to stay where it is.
        """
        branch = lift.site.branch
        if branch is None:
            return
        bound = names_bound(*lift.lifted)
        test = branch if isinstance(branch, ast.If) else None
        while test is not None:
            if bound & names_read(test.test):
                raise CannotLift(f"the test in line {test.lineno} depends on the loss")
            test = next_in_chain(test)
        ahead = lift.site.side[: lift.site.side.index(lift.site.statement)]
        first = next((index for index, one in enumerate(ahead) if _touches(one, bound)), len(ahead))
        lift.reading = ahead[first:]
        for statement in ahead[:first]:
            # it ran behind the network, and will run ahead of it
            if is_zero_grad(statement):
                self._check_reset(statement, lift.lifted, lift)
            else:
                self._check_delay(statement)
                _check_passing(statement, lift.lifted)
                self._check_functions(statement, lift.lifted, lift)
        for statement in lift.reading:
            self._check_delay(statement)
            _check_passing(statement, lift.lifted, reading_is_fine=True)

    def _check_functions(self, statement: ast.stmt, others: list[ast.stmt], lift: Lift) -> None:
        """Whether functions that a statement calls change nothing that others read, and read nothing that they change.

        `update_state(loss.item())`, which sets the global `active` that `if active: loss.backward()` asks for.
        """
        scope, line = lift.site.scope, statement.lineno
        changed, read = self._outside.changed(statement, scope), self._outside.read(statement, scope)
        given = self._outside.given_to_parts(statement)
        for other in others:
            asked = paths_read(other) | self._outside.read(other, scope)
            if overlap(changed, asked) or any(not given.isdisjoint(path.split(".")[1:]) for path in asked):
                raise CannotLift(f"line {line} calls what may change what the loss is computed from")
            made = names_bound(other) | changed_paths(other) | self._outside.changed(other, scope)
            if overlap(made, read):
                raise CannotLift(f"line {line} calls what may read names that the loss is computed with")

    def _check_values(self, statement: ast.stmt, others: list[ast.stmt], ahead: list[ast.stmt]) -> None:
        """Whether a statement reads the same values on the other side of others: `loss = one` ahead, `loss += two`."""
        for name in sorted(names_read(statement)):
            if self._helpers.change_in_place({name}, others, ahead):
                raise CannotLift(f"line {statement.lineno} reads {name}, which is changed in place behind it")

    def _check_reset(self, reset: ast.stmt, ahead: list[ast.stmt], lift: Lift) -> None:
        """Whether a reset of gradients means the same ahead of the statements that it stood behind."""
        liveness = self._liveness_of(lift.site.scope)
        made = names_bound(*ahead)
        if liveness.before([reset], set()) & made or names_bound(reset) & liveness.before(ahead, set()):
            raise CannotLift(f"line {reset.lineno} changes gradients, and shares names with lines ahead of it")

    def _check_delay(self, statement: ast.stmt, *, in_turn: bool = False, runs_last: bool = False) -> None:
        """Whether a statement may run once the gradients are there.

        Args:
            statement: the statement.
            in_turn: whether nothing that stood behind it draws random numbers: a backward draws none.
            runs_last: whether a network that it runs may run there.

        Raises:
            CannotLift: it may not.
        """
        line = statement.lineno
        if skips_if_diverged(statement):
            # what the gradients of such a batch become is looked at when all is placed
            for other in body_of_skip(statement):
                self._check_delay(other, in_turn=in_turn, runs_last=runs_last)
            return
        if (keyword := leaves(statement)) is not None:
            raise CannotLift(f"`{keyword}` in line {line} stands between forward and backward")
        if switches_mode(statement):
            raise CannotLift(f"line {line} switches layers or gradients between forward and backward")
        if not in_turn and self._helpers.draw_random_numbers(statement):
            raise CannotLift(f"line {line} draws random numbers between forward and backward")
        if may_reset_gradients(statement):
            raise CannotLift(f"line {line}, between forward and backward, may reset gradients or change the model")
        if self._helpers.read_gradients(statement) or keeps_gradients(statement):
            raise CannotLift(f"line {line} asks for gradients between forward and backward")
        if self._networks.runs(statement) and not runs_last:
            raise CannotLift(f"line {line} runs a forward that this loss does not depend on")
        for call in calls_in(statement):
            path = (path_of(call.func) or "").lower()
            name = last_name(call)
            if only_tells_of_step(call):
                continue
            if (name in ("step", "grad") or "backward" in name.split("_")) and "sched" not in path:
                raise CannotLift(f"line {line} runs `{path or 'a step'}` between forward and backward")


def _touches(statement: ast.stmt, bound: set[str]) -> bool:
    """Whether a statement of a branch needs what the slice makes, or may leave before its backward."""
    if is_zero_grad(statement):
        return False
    others = names_bound(statement) | names_read(statement)
    return bool(others & bound) or leaves(statement) is not None


def stays_the_same_ahead_of(statement: ast.stmt, others: list[ast.stmt]) -> bool:
    """Whether a statement behind others means the same ahead of them."""
    try:
        _check_passing(statement, others)
    except CannotLift:
        return False
    return True


def _check_passing(
    statement: ast.stmt, others: list[ast.stmt], own: Set[str] = frozenset(), reading_is_fine: bool = False
) -> None:
    """Whether a statement means the same on the other side of others; it may come behind what it reads.

    Args:
        statement: the statement.
        others: those that it changes places with.
        own: names that they bind anew, each for itself.
        reading_is_fine: it comes behind them, and reads what they have bound.

    Raises:
        CannotLift: it may mean something else.
    """
    bound, read = names_bound(statement) - own, names_read(statement) - own
    changed, paths = changed_paths(statement), paths_read(statement)
    for other in others:
        if bound & (names_bound(other) | names_read(other)) or (read & names_bound(other) and not reading_is_fine):
            raise CannotLift(f"line {statement.lineno} has to stay where it is, between lines that compute the loss")
        if overlap(changed, paths_read(other)) or overlap(changed_paths(other), paths):
            raise CannotLift(f"line {statement.lineno} may change what the loss is computed from")


def _may_call(node: ast.AST) -> bool:
    """Whether a network may run or random numbers be drawn: by anything that is called."""
    return any(calls_in(node))


def _is_for_nobody(statement: ast.stmt, behind: list[ast.stmt]) -> bool:
    """Whether a statement starts a name that the slice binds anew: `loss = 0.0` between encoder and decoder."""
    return is_start(statement) and bool(names_bound(statement) & names_bound(*behind))


def is_start(statement: ast.stmt) -> bool:
    """`loss = 0`, `a, b = [], {}`, `loss = torch.zeros(1, device=device)`, `out = torch.zeros_like(x)`."""
    if not isinstance(statement, ast.Assign):
        return False
    calls = list(calls_in(statement.value))
    passing = ("to", "cuda", "float", "Variable", "is_available", "len", "size")
    if not all(last_name(call) in (*_MADE, *passing) for call in calls):
        return False
    return any(last_name(call) in _MADE for call in calls) or not names_read(statement.value)
