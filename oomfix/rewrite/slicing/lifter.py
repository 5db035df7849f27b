"""Lifting: the slices of a file's backwards become functions, those of one loop together or not at all."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from oomfix.rewrite.dataflow.changes import changed_paths, overlap
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Liveness,
    Scope,
    names_bound,
    names_bound_by_target,
    names_declared,
    names_read,
)
from oomfix.rewrite.dataflow.read_without_graph import is_read_without_graph, makes_constant
from oomfix.rewrite.facts.forward_hooks import ForwardHooks
from oomfix.rewrite.facts.helpers import Helpers
from oomfix.rewrite.facts.left_by_networks import LeftByNetworks
from oomfix.rewrite.facts.lift import CannotLift, JoinedStatements, Lift, OutsideOfBlock, Site
from oomfix.rewrite.facts.may_draw import MayDraw
from oomfix.rewrite.facts.network_use import NetworkUse, ReadsNetwork, RunsForNoLoss, TrainsNetwork, forwards_of
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.sees_mode import SeesMode
from oomfix.rewrite.facts.skipped_batches import SkippedBatches
from oomfix.rewrite.facts.verdict import Attempt, Lifted, Verdict
from oomfix.rewrite.slicing.asked_graphs import check_graphs_not_asked
from oomfix.rewrite.slicing.kept_graphs import check_graphs_end
from oomfix.rewrite.slicing.lifting import Lifting
from oomfix.rewrite.slicing.object_batches import why_perhaps_whole
from oomfix.rewrite.slicing.repeated_output import why_said_again
from oomfix.rewrite.slicing.run_ahead import RunAhead, behind
from oomfix.rewrite.slicing.slices import Slicer, detaches, records_nothing
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.rules.base import Edit
from oomfix.script.facts.trace import Loop
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of, walk


def lift_backwards(reading: Reading, order: list[tuple[Verdict, bool]], manager: str) -> Attempt:
    """An attempt to turn backwards into functions, all those of a loop or none.

    Args:
        reading: a script whose backwards are the manager's.
        order: for each of them, in the order of the text: its loop, and whether to lift it.
        manager: the name of the manager.
    """
    calls = [call for call in reading.calls_to(f"{manager}.backward") if call.args]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    own = calls[-len(order) :] if len(calls) == len(order) else []
    wanted = [(verdict, call) for (verdict, lifted), call in zip(order, own, strict=False) if lifted]
    attempt = Attempt([], [])
    if not wanted:
        return attempt
    lifter = _Lifter(reading, manager)
    calls_of: dict[int, list[ast.Call]] = {}
    for verdict, call in wanted:
        calls_of.setdefault(id(verdict), []).append(call)
    for verdict in {id(verdict): verdict for verdict, _ in wanted}.values():
        of_loop = calls_of[id(verdict)]
        try:
            edits, lifted = lifter.lift(of_loop, "forward_backward" if verdict.handed_to is None else "loss")
        except CannotLift as problem:
            reason = _among_several(str(problem), [call.lineno for call in of_loop])
            edits, lifted = [], Lifted(reason, problem.line if isinstance(problem, JoinedStatements) else None)
        attempt.edits.extend(edits)
        attempt.loops.append((verdict, lifted))
    return attempt


def _among_several(reason: str, lines: list[int]) -> str:
    if len(lines) == 1:
        return reason
    return f"it has {len(lines)} backwards ({', '.join(f'line {line}' for line in sorted(lines))}); {reason}"


class _Lifter:
    """Lifts slices out of a text whose backwards are the manager's."""

    def __init__(self, reading: Reading, manager: str) -> None:
        self._reading, self._script, self._blocks, self._manager = reading, reading.script, reading.blocks, manager
        self._events = reading.events
        tree, nodes = reading.source.tree, reading.script.imports.nodes
        forwards = forwards_of(reading)
        self._functions, self._calls_run = reading.functions, reading.calls_run
        calls_run = reading.calls_run
        of_networks = {forward.node for forward in forwards}
        trained = [forward for forward in forwards if forward.trains]
        self._runs_forward: Callable[[ast.AST], bool] = lambda node: not of_networks.isdisjoint(calls_run.by(node))
        recorded = {forward.node for forward in forwards if forward.may_record_graph}
        self._leaves_graph: Callable[[ast.AST], bool] = lambda node: not recorded.isdisjoint(calls_run.by(node))
        reached = {origin for event in self._events.backwards for origin in event.origins}
        to_loss = {forward.node for forward in trained if forward.origin in reached}
        helpers = Helpers(reading, of_networks)
        networks = NetworkUse(
            runs=self._runs_forward,
            trains=TrainsNetwork(calls_run, trained, self._events.backwards),
            leads_to_loss=lambda node: not to_loss.isdisjoint(calls_run.by(node)),
            takes=self._takes_network,
            reads=ReadsNetwork(calls_run, forwards),
            runs_for_no_loss=RunsForNoLoss(calls_run, forwards, self._events.backwards),
            may_draw=MayDraw(reading, helpers),
            sees_mode=SeesMode(reading, forwards),
        )
        self._slicer = Slicer(tree, helpers, networks, manager)
        names = FreeNames(self._script)
        self._function = names.one_of("forward", "forward_batch")
        self._skipped = SkippedBatches(reading, manager)
        self._hooks = ForwardHooks(nodes)
        self._left = LeftByNetworks(nodes)
        self._lifting = Lifting(reading.layout, manager, names)
        self._ahead = RunAhead(reading)
        self._reached = 0

    def lift(self, calls: list[ast.Call], method: str) -> tuple[list[Edit], Lifted]:
        """The edits that lift the slices of the backwards of one loop, in program order, and what is said of them.

        What runs a network ahead of one backward for a later one stays where it is, and is given to both slices: the
        samples of a generator, of which its discriminator sees copies without their graph first.

        Args:
            calls: the backwards.
            method: of the manager, which runs the functions.

        Raises:
            CannotLift: a slice has to stay where it is, or a backward goes through what an earlier slice computed.
        """
        try:
            return self._lift_all(calls, set(), method)
        except CannotLift as problem:
            if not (run_ahead := self._ahead.of(calls)):
                raise
            reason, reached = problem, self._reached
        try:
            edits, lifted = self._lift_all(calls, run_ahead, method)
        except CannotLift as problem:
            # the attempt that came further than the other, and than the first loss, tells what is in the way
            raise (problem if self._reached >= max(reached, 1) else reason) from None
        # what a loop runs, that loop tells
        lines = sorted(one.lineno for one in run_ahead if not isinstance(one, ast.For | ast.AsyncFor | ast.While))
        whole = [f"line {line} runs its network on whole batches: a later loss needs what it gives" for line in lines]
        return edits, lifted._replace(said=(*lifted.said, *whole), runs_ahead=True)

    def _lift_all(self, calls: list[ast.Call], outside: set[ast.stmt], method: str) -> tuple[list[Edit], Lifted]:
        lifts: list[Lift] = []
        lifted: list[ast.Call] = []
        edits: list[Edit] = []
        for call in calls:
            self._reached = len(lifts)
            site = behind(outside, self._site(call))
            before = [other for other in lifts if not self._blocks.exclude_each_other(call, other.site.statement)]
            for other in before:
                site = self._apart(other, site, before, outside)
            try:
                lift = self._lift(site, self._runs_network_around(call))
            except OutsideOfBlock:
                if lifts and (line := self._ahead.first_line_of(calls)) is not None:
                    raise CannotLift(f"line {line} runs the network of a later loss ahead of an earlier one") from None
                if not lifts or self._events.origins_of(site.statement):
                    raise
                continue  # it trains no network, and stays: a temperature behind the policy
            if shared := [one for other in lifts for one in other.lifted if one in lift.lifted]:
                raise CannotLift(f"line {shared[0].lineno} computes more than one loss")
            self._skipped.check(lift)
            self._hooks.check(lift)
            self._left.check(lift)
            check_graphs_not_asked(lift)
            number = sum(other.site.scope is site.scope for other in before) + 1
            function = self._function if number == 1 else f"{self._function}_{number}"
            edits += self._lifting.edits(lift, function, method)
            lifts.append(lift)
            lifted.append(call)
        for lift, call in zip(lifts, lifted, strict=True):
            self._check_graphs_stay(lift, call)
        state = next((lift.state for lift in lifts if lift.state is not None), None)
        if state is not None and len(lifts) > 1:
            raise CannotLift(f"{state}, which another loss may go through")
        state = state or next((lift.one_sample for lift in lifts if lift.one_sample is not None), None)
        again = why_said_again(lifts, self._functions)
        said = (why_perhaps_whole(lifts) if state is None else None, again)
        if not any(lift.inputs for lift in lifts):
            raise CannotLift("the loss is computed from nothing that could be split")
        told = tuple(one for one in said if one is not None)
        return edits, Lifted(state=state, said=told, says_again=again is not None)

    def _runs_network_around(self, call: ast.Call) -> bool:
        """Whether a network is seen to run in a loop around a backward, perhaps in another function."""
        return not self._loops_of_backward.get(call, set()).isdisjoint(self._loops_of_networks)

    def _takes_network(self, node: ast.AST) -> bool:
        """Whether a node hands something over that is switched to training, or trained, like a network."""
        calls = (child for child in walk(node) if isinstance(child, ast.Call))
        arguments = (one for call in calls for one in arguments_of(call))
        return any(path_of(argument) in self._switched | self._optimized for argument in arguments)

    @cached_property
    def _switched(self) -> set[str | None]:
        methods = (call.func for call in self._script.calls_of_method("train") if not call.args)
        return {path_of(method.value) for method in methods if isinstance(method, ast.Attribute)} - {None, "self"}

    @cached_property
    def _optimized(self) -> set[str | None]:
        """What an optimizer is made for: `dist` in `Adam(dist.parameters())`."""
        made = (call for call in self._script.imports.nodes.of(ast.Call) if self._script.is_optimizer_class(call.func))
        inside = (node for node in walk(*made) if isinstance(node, ast.Call))
        methods = (call.func for call in inside if last_name(call) == "parameters")
        return {path_of(method.value) for method in methods if isinstance(method, ast.Attribute)} - {None, "self"}

    @cached_property
    def _loops_of_backward(self) -> dict[ast.Call, set[Loop]]:
        found: dict[ast.Call, set[Loop]] = {}
        for event in self._events.backwards:
            found.setdefault(event.node, set()).update(event.loops)
        return found

    @cached_property
    def _loops_of_networks(self) -> set[Loop]:
        return {loop for forward in self._events.runs.values() for loop in forward.loops}

    def _apart(self, first: Lift, second: Site, earlier: Sequence[Lift], outside: set[ast.stmt]) -> Site:
        """The site of the second loss, which does not depend on what the first slice gives out without its graph.

        It may take detached values of it, as the loss of a discriminator does, or values whose graph the first backward
        has freed, and its slice then begins behind it. No other network may then run ahead, whose graph it could go
        through, but for those that are given to both.

        Raises:
            CannotLift: a backward goes through what the first slice computed.
        """
        needed = self._names_behind(second, first.site.statement)
        shared = (needed & _bound(first.lifted)) | self._read_on_the_way(first, needed)
        if not shared or not self._reaches(first.site.scope, second.scope):
            return second
        graphs = shared & _bound([one for one in first.lifted if not self._gives_no_graph(one, second)])
        kept = graphs - self._without_graph_behind(first)
        place = self._place_behind(first, second)
        if place is None or not (
            self._reads_detached(graphs, first, second)
            or (self._graph_is_freed(first, second) and self._reads_detached(kept, first, second))
        ):
            made = f"{min(kept or graphs or shared)}, made for the one in line {first.site.statement.lineno}"
            raise CannotLift(f"the one in line {second.statement.lineno} goes through {made}")
        known = {statement for lift in earlier for statement in (*lift.lifted, lift.site.end)} | outside
        others = (one for one in first.site.block[:place] if one not in known and not records_nothing(one))
        if other := next((statement for statement in others if self._leaves_graph(statement)), None):
            raise CannotLift(f"one may go through what line {other.lineno} has computed ahead of another")
        if second.block is not first.site.block:
            return replace(second, stays_inside=True)
        return replace(second, first=max(second.first, place))

    def _reaches(self, scope: Scope, other: Scope) -> bool:
        """Whether a name that one scope binds may mean the same in another: two methods each have their own."""
        declares = bool(names_declared(*scope.body))
        return declares or isinstance(scope, ast.Module) or scope in (other, *self._blocks.ancestors(other))

    def _place_behind(self, first: Lift, second: Site) -> int | None:
        """Where in the block of a loss the next one may begin, the block of an `if` around that included; or None."""
        block = first.site.block
        end = block.index(first.site.end)
        if second.block is block:
            return end + 1
        if second.iteration is not first.site.iteration:
            return None
        around = (one for one in self._with_ancestors(second.end) if one in block)
        place = next((block.index(one) for one in around), 0)
        return place if place > end else None

    def _check_graphs_stay(self, lift: Lift, call: ast.Call) -> None:
        """Whether no other backward is the first to go through what the networks of a slice give.

        `for _ in range(2): fake = netG(noise) ...` for the loss of a discriminator, with that of the generator, on the
        last `fake`, behind the loop; the same by an attribute, `self.fake = fake`, from another method.

        Raises:
            CannotLift: one does, and what the slice gives out has no graph.
        """
        here = set(walk(*lift.lifted))
        # the other sides of its test run the slice for themselves
        apart = {node for side in lift.site.other_sides for node in walk(*side)}
        run = {one for statement in lift.lifted for one in self._calls_run.by(statement)}
        forwards = self._events.runs
        times = Counter(forward.node for forward in forwards.values())
        own = [event.order for event in self._events.backwards if event.node is call]
        for origin, forward in forwards.items():
            # in a function that is called elsewhere too, it may be another run of it
            if forward.node in here or (forward.node in run and times[forward.node] == 1):
                through = [one for one in self._events.backwards if origin in one.origins and one.node not in apart]
                first = min(through, key=lambda event: event.order, default=None)
                if first is not None and first.node is not call and own and min(own) < first.order:
                    made = f"what line {forward.node.lineno} computes"
                    raise CannotLift(f"the backward in line {first.node.lineno} goes through {made}")

    def _reads_detached(self, shared: set[str], first: Lift, second: Site) -> bool:
        """Whether all up to a loss, but for the slice of an earlier one, reads names without their graphs."""
        body = second.block if second.iteration is None else second.iteration.body
        last = (second.end.end_lineno, second.end.end_col_offset)
        own = {id(node) for node in walk(*first.lifted, first.site.end)}
        reads = (
            node
            for node in walk(*body)
            if isinstance(node, ast.Name) and node.id in shared and isinstance(node.ctx, ast.Load)
        )
        return all(
            id(node) in own
            or (node.lineno, node.col_offset) >= last
            or is_read_without_graph(node, self._blocks)
            or self._blocks.exclude_each_other(node, second.end)
            for node in reads
        )

    def _gives_no_graph(self, statement: ast.stmt, second: Site) -> bool:
        """Whether a statement draws noise, or a network's graph was gone at once, as that of a teacher."""
        if makes_constant(statement):
            return True
        run, forwards = set(self._calls_run.by(statement)), self._events.runs
        through = (forwards[origin].node for origin in self._events.origins_of(second.statement) if origin in forwards)
        return (records_nothing(statement) or detaches(statement)) and run.isdisjoint(through)

    def _graph_is_freed(self, first: Lift, second: Site) -> bool:
        """Whether the first backward goes through all networks that its slice runs, and the second through none.

        `loss_of_generator.backward()` ahead of `critic(pool.query(fake))`: it has freed the graph.
        """
        run = {call for statement in first.lifted for call in self._calls_run.by(statement)}
        of_slice = {origin for origin, forward in self._events.runs.items() if forward.node in run}
        through = [self._events.origins_of(site.statement) for site in (first.site, second)]
        return bool(of_slice) and of_slice <= through[0] and through[1].isdisjoint(of_slice)

    def _without_graph_behind(self, lift: Lift) -> set[str]:
        """The names of a slice that no backward can go through behind its own: what networks give out, and constants.

        `bias = offset.view(1, -1)` saves no tensor that a backward could free: another may go through it again.
        """
        made: set[str] = set()
        for statement in lift.lifted:
            if self._runs_forward(statement) or names_read(statement) & made or makes_constant(statement):
                made |= names_bound(statement)
        return made

    def _names_behind(self, site: Site, earlier: ast.stmt) -> set[str]:
        """The names that a loss is computed from, as they are when an earlier statement has run."""
        around = {id(self._blocks.block_of(one)): one for one in self._with_ancestors(earlier)}
        needed, current = names_read(site.root), site.end
        liveness = self._slicer.liveness_of(site.scope)
        while True:
            block = self._blocks.block_of(current)
            start = block.index(around[id(block)]) + 1 if id(block) in around else 0
            needed = _needed_by(needed, liveness, block[start : block.index(current)])
            parent = next(self._blocks.ancestors(current))
            if id(block) in around or not isinstance(parent, ast.stmt) or isinstance(parent, FunctionNode):
                return needed
            if isinstance(parent, ast.For | ast.AsyncFor | ast.While):
                # the round before may have made what this one reads
                needed |= _needed_by(needed, liveness, block)
            if isinstance(parent, ast.For | ast.AsyncFor) and names_bound_by_target(parent.target) & needed:
                needed |= names_read(parent.iter)
            current = parent

    def _read_on_the_way(self, first: Lift, needed: set[str]) -> set[str]:
        """What the networks of a slice give and a line ahead of its backward makes something of that is needed behind.

        `copies = fake.detach()`, ahead of the backward of the generator, for the loss of the discriminator.
        """
        read = _needed_by(needed, self._slicer.liveness_of(first.site.scope), first.after)
        return read & _bound([statement for statement in first.lifted if self._runs_forward(statement)])

    def _with_ancestors(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        yield statement
        for parent in self._blocks.ancestors(statement):
            if isinstance(parent, FunctionNode | ast.ClassDef):
                return
            if isinstance(parent, ast.stmt):
                yield parent

    def _site(self, call: ast.Call) -> Site:
        statement = self._blocks.statement_of(call)
        assert isinstance(statement, ast.Expr)
        scope = self._blocks.scope_of(statement)
        assert scope is not None
        return Site(
            statement,
            self._blocks.block_of(statement),
            self._blocks.header_of(statement),
            scope,
            self._blocks.loop_of(statement),
            call.args[0],
            self._blocks.bound_before(statement),
        )

    def _lift(self, site: Site, network_is_known: bool) -> Lift:
        statement = site.statement
        try:
            return self._slicer.lift(site, network_is_known)
        except OutsideOfBlock:
            branch = self._blocks.branch_of(statement)
            if site.first or site.stays_inside or branch is None:
                raise
            if isinstance(branch, ast.With) and not self._reading.measures(branch):
                raise
            block, header = self._blocks.block_of(branch), self._blocks.header_of(branch)
            bound = self._blocks.bound_before(branch)
            outer = replace(site, block=block, header=header, branch=branch, bound_before=bound)
            lift = self._slicer.lift(outer, network_is_known)
            liveness = self._slicer.liveness_of(site.scope)
            check_graphs_end(lift, liveness, self._blocks, self._runs_forward, self._manager)
            return lift


def _bound(statements: list[ast.stmt]) -> set[str]:
    return names_bound(*statements)


def _needed_by(needed: set[str], liveness: Liveness, statements: list[ast.stmt]) -> set[str]:
    """The names read by what statements do for the names `needed` behind them."""
    for statement in reversed(statements):
        if names_bound(statement) & needed or overlap(changed_paths(statement), needed):
            needed = liveness.before([statement], needed)
    return needed
