"""What a training script is: its loops, forwards and backwards, and which values carry an autograd graph.

`Script.read(source)` follows the file once, the way Python would run it: from the first line, into the functions it
calls with the arguments it calls them with, and then into every function that nothing in the file calls. What is met on
the way (a forward with gradients off, a loss that is kept) is written down as events; rules are questions about them.

One class follows, built in layers that each know one thing more; a file stands for each: `core` (names, and where an
event happens), `functions` (calls into the file), `training` (forwards, backwards, steps), `containers` (what is kept),
`calls` (what is called), `expressions`, `statements`, `flow` (branches, contexts, loops) and `follow` (the whole file).
`values` and `state` are what they pass on, `trace` is what comes out, `loops` and `evaluation` sort it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from oomfix.script.edits import Edit, remove_statement
from oomfix.script.evaluation import find_evaluation_forwards
from oomfix.script.follow import Follower
from oomfix.script.hints import looks_like_forward
from oomfix.script.imports import Imports
from oomfix.script.loops import TrainingLoop, find_training_loops
from oomfix.script.names import path_of
from oomfix.script.nodes import Scope, collect
from oomfix.script.trace import Backward, Event, Forward, Keep, Loop, ModuleAttribute, Trace
from oomfix.script.windows import loses_tail

if TYPE_CHECKING:
    from oomfix.source import Source

__all__ = ["Event", "Forward", "Keep", "Place", "Script", "TrainingLoop"]

_CUDA = re.compile(r"cuda|\bgpu|accelerat|fabric", re.IGNORECASE)
_DEVICE = re.compile(r"\.to\((?!(dtype=)?torch\.\w+\))|device", re.IGNORECASE)
_OTHER_DEVICE = re.compile(r"^\s*\w*device\w*\s*=\s*(torch\.device\()?[\"'](cpu|mps)[\"']|torch_xla", re.MULTILINE)
_HALF = re.compile(
    r"\bmodel\w*\.to\((dtype=)?torch\.(bfloat16|float16|half)\)|torch_dtype=torch\.(bfloat16|float16|half)"
)
_DIVIDING_GRADIENTS = (".grad.div_", ".grad.mul_", ".grad.data.div_", ".grad.data.mul_")
_COMPUTING = frozenset("softmax log_softmax exp sigmoid tanh relu matmul mm bmm normalize sqrt pow mean sum".split())
_ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
_DEVICE_CHECK = re.compile(r"cuda|gpu|device", re.IGNORECASE)
_STATE_NAME = re.compile(
    r"(^|_)(h|c|hx|cx|hn|cn|h_?[0tn]|c_?[0tn]|hc|hidden\w*|state\w*|hiddens|states|memory|mems?|past\w*|cache)(_|\d|$)",
    re.IGNORECASE,
)

AnyEvent = TypeVar("AnyEvent", bound=Event)


class Place(NamedTuple):
    """A span of the source: 1-based lines and columns in characters, end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


class CarriedState(NamedTuple):
    """A recurrent state that is carried into the next iteration with its graph."""

    statement: ast.stmt
    name: str
    trains: bool
    """A backward runs in each iteration."""


@dataclass
class Script:
    """A training script, read.

    `target_torch` is the version the script is meant for, as (major, minor); None when nothing says it.
    """

    source: Source
    target_torch: tuple[int, int] | None = None

    @classmethod
    def read(cls, source: Source, target_torch: tuple[int, int] | None = None) -> Script:
        """The script of a source. Nothing is followed until a question asks for it.

        A question raises RecursionError where the source is nested absurdly.
        """
        return cls(source, target_torch)

    @cached_property
    def trace(self) -> Trace:
        """Everything that happens in the script."""
        return Follower(self.source.tree, self._nodes).follow()

    @cached_property
    def imports(self) -> Imports:
        """What the names of the file refer to."""
        return Imports(self.source.tree, [node for node, _ in self._nodes])

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, Scope]]:
        return collect(self.source.tree)

    # Places

    def place(self, node: ast.expr | ast.stmt) -> Place:
        """Where a node stands."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Place(
            node.lineno,
            self._column(node.lineno, node.col_offset),
            node.end_lineno,
            self._column(node.end_lineno, node.end_col_offset),
        )

    def header(self, statement: ast.If) -> Place:
        """The test of an `if`, with its keyword."""
        test = self.place(statement.test)
        return Place(
            statement.lineno, self._column(statement.lineno, statement.col_offset), test.end_line, test.end_column
        )

    def _column(self, line: int, utf8_column: int) -> int:
        return self.source.offset(line, utf8_column) - self.source.line_starts[line - 1] + 1

    # The words that rules are written in

    @cached_property
    def loops(self) -> list[TrainingLoop]:
        """Every training loop, by line."""
        return find_training_loops(self.trace)

    @cached_property
    def _training_runs(self) -> set[int]:
        return {run for loop in self.loops for run in loop.runs} | set(self.trace.framework_loops.values())

    @cached_property
    def evaluation_forwards(self) -> list[Forward]:
        """Every forward of an evaluation pass, with gradients on or off, on each way that leads to it."""
        return find_evaluation_forwards(self.trace, self._training_runs)

    def loses_tail(self, loop: TrainingLoop) -> bool:
        """Whether the last incomplete accumulation window of an epoch is never stepped."""
        return loses_tail(loop, self._nodes)

    @property
    def backwards(self) -> list[Backward]:
        """Every backward, in program order."""
        return self.trace.backwards

    @cached_property
    def may_use_cuda(self) -> bool:
        """Whether the script may run on a GPU: it names one, or a device that is not said to be another."""
        text = self.source.text
        return bool(_CUDA.search(text)) or (bool(_DEVICE.search(text)) and not _OTHER_DEVICE.search(text))

    @cached_property
    def trains_in_half(self) -> bool:
        """Whether the model itself is in 16 bits, so that autocast has nothing to do."""
        return bool(_HALF.search(self.source.text))

    @cached_property
    def uses_apex(self) -> bool:
        """Whether NVIDIA's apex does the mixed precision."""
        return any(True for _ in self.imports.calls("apex.amp.initialize", "apex.amp.scale_loss"))

    @cached_property
    def is_test_module(self) -> bool:
        """Whether the file holds unit tests."""
        return any(
            qualified.split(".")[0] in ("pytest", "unittest")
            for names in self.imports.names.values()
            for qualified in names
        )

    @cached_property
    def uses_gradient_scaler(self) -> bool:
        """Whether gradients are scaled anywhere in the file, by whatever object."""
        return any(event.scaled for event in self.trace.backwards) or "scaler" in self.source.text.lower()

    @cached_property
    def autocasts_out_of_sight(self) -> bool:
        """Whether FSDP's MixedPrecision decides, or gradients are scaled with no autocast in sight to need it."""
        scaled = any(event.scaled for event in self.trace.backwards)
        return "MixedPrecision" in self.source.text or (scaled and "autocast" not in self.source.text)

    def distinct(self, events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
        """The first event at each node: what happens on several ways is one occurrence."""
        seen: set[ast.expr] = set()
        for event in events:
            if event.node not in seen:
                seen.add(event.node)
                yield event

    def calls_to(self, name: str) -> list[Event]:
        """Every call of a function that is followed by name (see `Calls.note_call`)."""
        return self.trace.calls.get(name, [])

    def calls_of_method(self, name: str) -> Iterator[ast.Call]:
        """Every call of a method of this name, whatever the object."""
        for node in self.imports.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                yield node

    def gradients_zeroed_by_hand(self) -> Iterator[ast.Call]:
        """`p.grad.zero_()` on each of several parameters, in a loop."""
        for loop in self.imports.nodes:
            if not isinstance(loop, ast.For):
                continue
            for target in ast.walk(loop.target):
                if isinstance(target, ast.Name):
                    yield from self._zeroed_gradients_of(target.id, loop)

    def _zeroed_gradients_of(self, parameter: str, loop: ast.For) -> Iterator[ast.Call]:
        paths = (f"{parameter}.grad.zero_", f"{parameter}.grad.data.zero_")
        for statement in loop.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and path_of(node.func) in paths:
                    yield node

    def kept_graphs(self) -> Iterator[Keep]:
        """Everything that is kept with its graph beyond an iteration and never backpropagated."""
        keeps = self.trace.keeps
        # What is backpropagated on any way is a term of a loss, not a log.
        seen = {keep.node for number, keep in keeps.items() if number in self.trace.backpropagated}
        for keep in keeps.values():
            if not keep.certain or keep.node in seen:
                continue
            if self._grows_by_iteration(keep):
                seen.add(keep.node)
                yield keep

    def _grows_by_iteration(self, keep: Keep) -> bool:
        """Each round of the outermost loop that the target outlives makes a graph of its own.

        What is collected within a training iteration (samples, time steps, scales) goes with the iteration.
        """
        outside = len(keep.site.loops) - len(keep.crossed)
        if any(run in self._training_runs for run in keep.site.runs[:outside]):
            return False
        if any(_resets(other, keep.target) for other in keep.crossed[0].body if other is not keep.statement):
            return False
        forwards = list(self.trace.forwards_of(keep.origins))
        if not forwards:
            return any(run in self._training_runs for run in keep.site.runs[outside:])
        if keep.returned and not any(run in self._training_runs for run in keep.site.runs[outside:]):
            function = keep.site.function
            evaluating = any(forward.evaluating for forward in forwards)
            if not evaluating and not (function is not None and function.evaluates):
                return False
        return any(keep.crossed[0] in forward.site.loops for forward in forwards)

    def attention_maps_kept(self) -> list[ModuleAttribute]:
        """Attention maps that a module's forward leaves on the module with their graph."""
        return [kept for kept in self.trace.module_attributes.values() if _ATTENTION_NAME.search(kept.name)]

    def reads_attribute(self, name: str) -> bool:
        """Whether an attribute of this name is read anywhere in the file, so that a loss may be made of it."""
        return any(
            isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
            for node in self.imports.nodes
        )

    def carried_states(self) -> Iterator[CarriedState]:
        """States that go, graph and all, into a forward of the next iteration.

        The loop calls backward in each iteration, or the forward is of an evaluation and nothing is backpropagated.
        """
        retaining = {event.site.loop for event in self.trace.backwards if event.retains}
        training = {event.site.loop for event in self.trace.backwards}
        evaluating = {forward.origin for forward in self.evaluation_forwards if forward.records_graph}
        for statement, loop, origin in self.trace.carries.values():
            trains = loop in training
            if not isinstance(statement, ast.Assign) or not (trains or origin in evaluating):
                continue
            if _is_layer_of(loop, self.trace.forwards[origin].path):
                continue
            names = [path_of(name) or "" for target in statement.targets for name in _flat(target)]
            states = [name for name in names if _STATE_NAME.search(name.rsplit(".", 1)[-1])]
            if states or loop in retaining:
                yield CarriedState(statement, (states or names)[-1], trains)

    def is_needed_later(self, backward: Backward) -> bool:
        """Whether a later backward (or an unseen one) may go through the graph of this one again."""
        if backward.carried or not backward.made_here or backward.node.args:
            return True
        forwards = list(self.trace.forwards_of(backward.origins))
        loop = backward.site.loop
        if loop is not None and forwards and all(loop not in forward.site.loops for forward in forwards):
            return True
        if any(order > backward.order and origins & backward.origins for order, origins in self.trace.handed_on):
            return True
        if loop is not None and (_carries_over(loop) or self._uses_older_tensors(loop)):
            return True
        sharing = [other for origin in backward.origins for other in self._backwards_through.get(origin, ())]
        unseen = [other for other in self.trace.backwards if not (other.origins and backward.origins)]
        return any(self._goes_through_again(other, backward) for other in [*sharing, *unseen])

    @cached_property
    def _backwards_through(self) -> dict[int, list[Backward]]:
        through: dict[int, list[Backward]] = {}
        for backward in self.trace.backwards:
            for origin in backward.origins:
                through.setdefault(origin, []).append(backward)
        return through

    def _uses_older_tensors(self, loop: Loop) -> bool:
        """Whether the loop reads something computed before it (`weights = alpha.softmax(0)`), graph and all."""
        inside = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
        computed = {
            path_of(target)
            for node in self.imports.nodes
            if isinstance(node, ast.Assign) and node.lineno not in inside and _computes(node.value)
            for target in node.targets
        }
        return any(isinstance(node, ast.Name) and node.id in computed for node in ast.walk(loop))

    def _goes_through_again(self, other: Backward, backward: Backward) -> bool:
        """Whether a backward of the same round comes later and may go through the same graph."""
        if other.order <= backward.order or other.site.second_round is not backward.site.second_round:
            return False
        if (other.node is backward.node and other.site.way == backward.site.way) or _exclude_each_other(
            other, backward
        ):
            return False
        unseen = not (other.origins and backward.origins) and other.site.function is backward.site.function
        return bool(other.origins & backward.origins) or (unseen and other.node is not backward.node)

    def is_forward_of_network(self, forward: Forward) -> bool:
        """Whether a call runs the network itself: the module, or a method that is named like a part of its forward."""
        method = (forward.path or "").rsplit(".", 1)[-1]
        return forward.direct or looks_like_forward(method)

    def has_autocast_alternative(self, forward: Forward) -> bool:
        """The other branch of a flag runs the forward under autocast: this one is the fp32 choice."""
        return any((id(guard.statement), not guard.value) in self._autocast_sides for guard in forward.site.guards)

    @cached_property
    def _autocast_sides(self) -> set[tuple[int, bool]]:
        """The sides of conditions on which a forward runs under autocast."""
        return {
            (id(guard.statement), guard.value)
            for forward in self.trace.forwards.values()
            if forward.site.autocast is not None
            for guard in forward.site.guards
        }

    def is_in_batch_loop(self, event: Event) -> bool:
        """Whether an event is in a loop over batches: one that trains, or the innermost around a forward."""
        loop = event.site.loop
        if loop is None:
            return False
        return loop in self._batch_loops

    @cached_property
    def _batch_loops(self) -> set[Loop]:
        innermost = {forward.site.loops[-1] for forward in self.trace.forwards.values() if forward.site.loops}
        outer = {loop for forward in self.trace.forwards.values() for loop in forward.site.loops[:-1]}
        return (innermost - outer) | {training.node for training in self.loops}

    def runs_every_iteration(self, event: Event) -> bool:
        """Whether nothing but a check for the device stands between the loop and the event."""
        return not event.site.handling_exception and all(
            guard.value and _DEVICE_CHECK.search(ast.unparse(guard.test)) for guard in event.site.guards
        )

    def trains_in(self, node: ast.AST) -> bool:
        """Whether a backward runs in a loop or function, or in what it calls in this file."""
        return node in self._training_nodes

    @cached_property
    def _training_nodes(self) -> set[ast.AST]:
        nodes: set[ast.AST] = set()
        for event in self.trace.backwards:
            nodes.update(event.site.loops)
            nodes.update(function.node for function in event.site.functions)
        return nodes

    @cached_property
    def nodes_trained_through(self) -> set[ast.AST]:
        """The functions in which, or in what they call, a forward is backpropagated."""
        return {
            function.node
            for forward in self.trace.forwards.values()
            if forward.origin in self.trace.backpropagated
            for function in forward.site.functions
        }

    def only_loads_state(self, call: ast.Call) -> bool:
        """Whether what a call gives goes into `load_state_dict`, which copies it to where the parameters are."""
        if any(call in ast.walk(load) for load in self.calls_of_method("load_state_dict")):
            return True
        names = {
            path_of(statement.targets[0])
            for statement in self.imports.nodes
            if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1
        }
        return any(
            path_of(node) in names
            for load in self.calls_of_method("load_state_dict")
            for argument in load.args
            for node in ast.walk(argument)
            if isinstance(node, ast.Name | ast.Attribute)
        )

    @cached_property
    def defines_zero_grad(self) -> bool:
        """Whether a class of the file has a `zero_grad` of its own, which may take no argument."""
        return any(isinstance(node, ast.FunctionDef) and node.name == "zero_grad" for node in self.imports.nodes)

    @cached_property
    def divides_gradients(self) -> bool:
        """Whether gradients are divided by hand before the step: `p.grad /= k`, `p.grad.div_(k)`."""
        for node in self.imports.nodes:
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
                if (path_of(node.target) or "").endswith((".grad", ".grad.data")):
                    return True
            elif isinstance(node, ast.Call):
                if (path_of(node.func) or "").endswith(_DIVIDING_GRADIENTS):
                    return True
        return False

    def removal_of(self, call: ast.expr) -> tuple[Edit, ...]:
        """The edit that takes a call out which is a statement of its own; empty for any other."""
        found = self._call_statements.get(call)
        return () if found is None else remove_statement(self.source, *found)

    @cached_property
    def _call_statements(self) -> dict[ast.expr, tuple[ast.stmt, list[ast.stmt]]]:
        """Calls that are statements of their own, with the statement and its block."""
        found: dict[ast.expr, tuple[ast.stmt, list[ast.stmt]]] = {}
        for node in self.imports.nodes:
            for name in ("body", "orelse", "finalbody"):
                block: list[ast.stmt] = getattr(node, name, None) or []
                for statement in block if isinstance(block, list) else ():
                    if isinstance(statement, ast.Expr):
                        found[statement.value] = statement, block
        return found


def _exclude_each_other(first: Event, second: Event) -> bool:
    """Whether two events are on the two sides of one condition."""
    sides = {id(guard.statement): guard.value for guard in first.site.guards}
    return any(sides.get(id(guard.statement), guard.value) is not guard.value for guard in second.site.guards)


def _carries_over(loop: Loop) -> bool:
    """Whether a round reads a name that a later line of the round before has bound (`prev = out`)."""
    bound = {
        name.id: node.lineno
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno < bound.get(node.id, 0)
        for node in ast.walk(loop)
    )


def _computes(node: ast.expr) -> bool:
    """Whether an expression is arithmetic on tensors, by the function it calls."""
    if not isinstance(node, ast.Call):
        return False
    path = path_of(node.func) or ""
    return path.startswith(("F.", "nn.functional.")) or path.rsplit(".", 1)[-1] in _COMPUTING


def _is_layer_of(loop: Loop, path: str | None) -> bool:
    """`for layer in layers: h = layer(h)`: what is handed on is an activation, not a state."""
    if path is None or isinstance(loop, ast.While):
        return False
    return path in {path_of(target) for target in _flat(loop.target)}


def _resets(statement: ast.stmt, path: str) -> bool:
    """Whether a statement sets a path anew, and not from what it held."""
    if not isinstance(statement, ast.Assign) or path not in map(path_of, statement.targets):
        return False
    return all(path_of(node) != path for node in ast.walk(statement.value) if isinstance(node, ast.expr))


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _flat(element)
    elif isinstance(target, ast.Starred):
        yield target.value
    else:
        yield target
