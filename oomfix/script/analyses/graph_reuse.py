"""Whether a graph is needed again after a backward: what `retain_graph=True` is for."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Sequence
from functools import cached_property

from oomfix.script.analyses.carried_leaves import carried_from_leaves
from oomfix.script.analyses.rounds import carries_over, fed_back, feeds_itself, read_first
from oomfix.script.analyses.windows import is_window_test
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.leaves import leaves_of
from oomfix.script.facts.named_like import looks_like_state
from oomfix.script.facts.trace import Backward, Forward, Loop, Trace, exclude_each_other
from oomfix.script.syntax.names import last_of, path_of, unpacked
from oomfix.script.syntax.nodes import Scope, encloses, walk

_COMPUTING = frozenset("softmax log_softmax exp sigmoid tanh relu matmul mm bmm normalize sqrt pow mean sum".split())


class GraphReuse:
    """The backwards of a script, asked which graphs they share.

    Args:
        trace: what happens in the script.
        nodes: all nodes of the file, each with the function it is in.
    """

    def __init__(self, trace: Trace, nodes: Sequence[tuple[ast.AST, Scope]]) -> None:
        self._trace = trace
        self._nodes = nodes

    def is_needed_later(self, backward: Backward) -> bool:
        """Whether a later backward (or an unseen one) may go through the graph of this one again."""
        if backward.carried or not backward.made_here or backward.node.args:
            return True
        forwards = list(self._trace.forwards_of(backward.origins))
        loop = backward.site.loop
        # A network that runs in the loop as well is most often a frozen one, whose targets were made before.
        running = {forward.path for forward in forwards if loop in forward.site.loops} - {None}
        if loop is not None and any(
            loop not in forward.site.loops and forward.path not in running for forward in forwards
        ):
            return True
        over_graphs = self._trace.loops_over_parts | self._trace.loops_over_graphs
        if loop is not None and not forwards and (loop in over_graphs or feeds_itself(loop) or _cuts_older(loop)):
            return True
        if self._is_called_back_on_older(backward):
            return True
        if backward.node in self._in_comprehensions:  # `[loss.backward(retain_graph=True) for loss in losses]`
            return True
        if any(order > backward.order and origins & backward.origins for order, origins in self._trace.handed_on):
            return True
        if loop is not None and (
            carries_over(loop, self._read)
            or self._uses_older_tensors(loop)
            or self._adds_older_attribute(loop)
            or carried_from_leaves(loop, self._nodes_beside(loop))
            or _is_cut_off_at_times(backward, loop)
            or self._begins_with_a_state(loop, forwards)
        ):
            return True
        sharing = [other for origin in backward.origins for other in self._backwards_through.get(origin, ())]
        unseen = [other for other in self._trace.backwards if not (other.origins and backward.origins)]
        beside = [other for other in self._trace.backwards if other.unseen & backward.unseen]
        return any(self._goes_through_again(other, backward) for other in [*sharing, *unseen, *beside])

    def _nodes_beside(self, loop: Loop) -> list[ast.AST]:
        """The nodes of the function that a loop stands in."""
        return [node for node, scope in self._nodes if scope is self._scope_of[loop]]

    def _begins_with_a_state(self, loop: Loop, forwards: Sequence[Forward]) -> bool:
        """`net.hidden = zeros` or `net.reset_states()` ahead of a loop that does neither.

        The code of the network is out of sight, and may hand its state on from round to round.
        """
        networks = {forward.path for forward in forwards if forward.code is None} - {None}
        begun = [node for node, _ in self._nodes if isinstance(node, ast.stmt) and _sets_a_state(node, networks)]
        return bool(begun) and not any(encloses(loop, node) for node in begun)

    def _is_called_back_on_older(self, backward: Backward) -> bool:
        """Whether it runs in what is handed to something out of sight, which may call that again on the same graph.

        `optimizer.step(closure)`, `figure.canvas.mpl_connect("button_press_event", explain)`.
        """
        functions = backward.site.functions
        asked = [self._followed[step] for step in reversed(backward.site.way) if step in self._followed]
        for depth, (call, function) in enumerate(zip(asked, functions, strict=False)):
            if _is_handed(function, call):
                made = list(self._trace.forwards_of(backward.origins))
                return not made or any(functions[depth] not in forward.site.functions for forward in made)
        return False

    @cached_property
    def _followed(self) -> dict[Hashable, ast.Call]:
        return {id(call): call for call in self._trace.followed}

    @cached_property
    def _read(self) -> set[str]:
        """The attributes that something in the file reads, also by their names."""
        nodes = [node for node, _ in self._nodes]
        asked = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        return asked | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}

    @cached_property
    def _backwards_through(self) -> dict[int, list[Backward]]:
        through: dict[int, list[Backward]] = {}
        for backward in self._trace.backwards:
            for origin in backward.origins:
                through.setdefault(origin, []).append(backward)
        return through

    @cached_property
    def _in_comprehensions(self) -> set[ast.AST]:
        comprehensions = (
            node for node, _ in self._nodes if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)
        )
        return set(walk(*comprehensions))

    def _uses_older_tensors(self, loop: Loop) -> bool:
        """Whether a round reads something computed before the loop (`weights = alpha.softmax(0)`), graph and all."""
        older = {
            name
            for name, statement, scope in self._computed
            if not encloses(loop, statement)
            and (scope is None or encloses(scope, loop))
            and not self._comes_after(statement, scope, loop)
        }
        return bool(older) and bool(older & read_first(loop))

    def _comes_after(self, statement: ast.stmt, scope: Scope, loop: Loop) -> bool:
        """Whether a statement of the function that a loop stands in runs only when the loop has ended."""
        if statement.lineno < loop.lineno or scope is not self._scope_of[loop]:
            return False
        return not any(encloses(around, loop) and encloses(around, statement) for around in self._loops)

    @cached_property
    def _scope_of(self) -> dict[ast.AST, Scope]:
        return dict(self._nodes)

    @cached_property
    def _loops(self) -> list[Loop]:
        return [node for node, _ in self._nodes if isinstance(node, Loop)]

    def _adds_older_attribute(self, loop: Loop) -> bool:
        """Whether a round adds what its object has from before the loop: `loss + self.penalty`, summed up once."""
        nodes = list(walk(loop))
        added = {
            path
            for node in nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
            for path in map(path_of, (node.left, node.right))
            if path is not None and path.startswith("self.")
        }
        if not added:
            return False
        called = {path_of(node.func) for node in nodes if isinstance(node, ast.Call)}
        made = {path: makers for path, makers in self._summed_attributes.items() if path in added}
        return any(
            not any(
                encloses(loop, statement) or f"self.{getattr(scope, 'name', '')}" in called
                for statement, scope in makers
            )
            for makers in made.values()
        )

    @cached_property
    def _summed_attributes(self) -> dict[str, list[tuple[ast.stmt, Scope]]]:
        """The attributes of `self` that something is added to, with all statements that bind them or add to them."""
        bound: dict[str, list[tuple[ast.stmt, Scope]]] = {}
        summed = set()
        for node, scope in self._nodes:
            if isinstance(node, ast.Assign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    path = path_of(target)
                    if path is not None and path.startswith("self."):
                        bound.setdefault(path, []).append((node, scope))
                        if isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant):
                            summed.add(path)
        return {path: makers for path, makers in bound.items() if path in summed}

    @cached_property
    def _computed(self) -> list[tuple[str, ast.Assign, Scope]]:
        """The names that hold the result of arithmetic, with the assignment and the function it is in."""
        return [
            (target.id, node, scope)
            for node, scope in self._nodes
            if isinstance(node, ast.Assign) and (_computes(node.value) or self._combines_leaves(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        ]

    def _combines_leaves(self, node: ast.expr) -> bool:
        """Whether an expression is arithmetic with operators on a tensor that requires gradients: `table * 2`."""
        return isinstance(node, ast.BinOp) and any(
            isinstance(part, ast.Name) and part.id in self._leaves for part in walk(node)
        )

    @cached_property
    def _leaves(self) -> set[str]:
        return {leaf for node, _ in self._nodes for leaf in leaves_of(node)}

    def _goes_through_again(self, other: Backward, backward: Backward) -> bool:
        """Whether a backward of the same round comes later and may go through the same graph."""
        if other.order <= backward.order or not other.site.shares_round(backward.site):
            return False
        if other.node is backward.node and other.site.way == backward.site.way:
            return False
        if exclude_each_other(other.site.guards, backward.site.guards):
            return False
        unseen = not (other.origins and backward.origins) and other.site.function is backward.site.function
        shared = other.origins & backward.origins or other.unseen & backward.unseen
        return bool(shared) or (unseen and other.node is not backward.node)


def _is_cut_off_at_times(backward: Backward, loop: Loop) -> bool:
    """`if i % k == 0: state = state.detach()`: between these, each backward goes through the rounds before as well."""
    waited_for = {id(guard.statement) for guard in backward.site.guards}
    rebound = {
        path_of(name)
        for node in walk(loop)
        if isinstance(node, ast.If) and id(node) not in waited_for and is_window_test(node.test)
        for statement in walk(node)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        for name in unpacked(target)
    }
    return bool(rebound) and not rebound.isdisjoint(fed_back(loop))


def _sets_a_state(node: ast.stmt, networks: set[str | None]) -> bool:
    """Whether a statement gives one of some networks a state, or asks it to begin with another one."""
    match node:
        case ast.Assign(targets=[ast.Attribute(network, name)]) | ast.Expr(ast.Call(ast.Attribute(network, name))):
            return path_of(network) in networks and looks_like_state(name) and "dict" not in name
    return False


def _is_handed(function: Function, call: ast.Call) -> bool:
    """Whether a call is given a function, by its name or as it stands there."""
    given = (*call.args, *(keyword.value for keyword in call.keywords))
    return any(argument is function.node or last_of(path_of(argument)) == function.name for argument in given)


def _cuts_older(loop: Loop) -> bool:
    """Whether a round takes a slice of what was there before the loop: `criterion(out[start:end], y[start:end])`."""
    cut = {
        path_of(node.value)
        for node in walk(loop)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
    }
    return not cut.isdisjoint(read_first(loop))


def _computes(node: ast.expr) -> bool:
    """Whether an expression is arithmetic on tensors, by the function it calls."""
    if not isinstance(node, ast.Call):
        return False
    path = path_of(node.func) or ""
    # `(table * 2).tanh()` has no path
    name = node.func.attr if isinstance(node.func, ast.Attribute) else path
    return path.startswith(("F.", "nn.functional.")) or name in _COMPUTING
