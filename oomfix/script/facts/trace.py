"""What happened while a script was followed: forwards, backwards, steps, and what was kept."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from oomfix.script.facts.values import Graph
from oomfix.script.syntax.names import undistributed
from oomfix.script.syntax.pieces import Pieces

if TYPE_CHECKING:
    from oomfix.script.facts.definitions import Function

Loop = ast.For | ast.AsyncFor | ast.While
Autocast = Literal["float16", "bfloat16", "unknown", "held"]
"""The dtype of autocast; "held" for a context made out of sight that is only named like autocast."""

Manner = Literal["add", "store", "meter"]
"""How a value is kept: added to a total, put into a container or an attribute, or handed to a meter that does so."""


class Guard(NamedTuple):
    """A condition on the way to an event: `statement` decides, the event lies on the side where the test is `value`."""

    statement: ast.stmt | ast.Call
    test: ast.expr
    value: bool


def exclude_each_other(first: tuple[Guard, ...], second: tuple[Guard, ...]) -> bool:
    """Whether two ways take the two sides of one condition."""
    sides = {id(guard.statement): guard.value for guard in first}
    return any(sides.get(id(guard.statement), guard.value) is not guard.value for guard in second)


class Site(NamedTuple):
    """Where and under what an event happens, on one way through the script."""

    functions: tuple[Function, ...]
    """The functions around it, innermost first: its own, and those that called it."""
    loops: tuple[Loop, ...]
    """The loops around it, outermost first, through the calls that led here."""
    runs: tuple[int, ...]
    """For each of these loops, the number of its run: one loop reached on two ways has two runs."""
    scopes: tuple[Loop | Guard, ...]
    """The loops and conditions around it, outermost first, through the calls that led here."""
    grad: Graph
    """Whether gradients are recorded here: YES, NO, or MAYBE where a flag decides."""
    autocast: Autocast | None
    apex: bool
    handling_exception: bool
    rounds: tuple[int, ...]
    """For each of these loops, the number of its round: some are followed twice."""
    way: tuple[Hashable, ...]
    """The calls (and rounds of loops over literals) that led here: two calls of one helper are two ways."""

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions between the innermost loop (or the start) and the event."""
        return self.guards_within(self.loop)

    def guards_within(self, loop: Loop | None) -> tuple[Guard, ...]:
        """The conditions between a loop (or the start) and the event, through loops inside of it."""
        start = self.scopes.index(loop) + 1 if loop in self.scopes else 0
        return tuple(scope for scope in self.scopes[start:] if isinstance(scope, Guard))

    @property
    def function(self) -> Function | None:
        """The function it is written in; None at module level."""
        return self.functions[0] if self.functions else None

    @property
    def within_evaluation(self) -> bool:
        """Whether its function, or one that called it, says by its name that it evaluates."""
        return any(function.evaluates for function in self.functions)

    @property
    def loop(self) -> Loop | None:
        """The innermost loop, or None."""
        return self.loops[-1] if self.loops else None

    def shares_round(self, other: Site) -> bool:
        """Whether both happen in the same round of every loop around both."""
        return all(mine == theirs for mine, theirs in zip(self.rounds, other.rounds, strict=False))

    def run_of(self, loop: Loop) -> int | None:
        """The run of a loop that this happens in."""
        return self.runs[self.loops.index(loop)] if loop in self.loops else None


@dataclass(slots=True, eq=False)
class Event:
    """A call that matters, on one way through the script."""

    node: ast.Call
    site: Site
    order: int


@dataclass(slots=True, eq=False)
class Forward(Event):
    """A call of a network."""

    origin: int
    path: str | None
    given: tuple[ast.expr, ...]
    """What is passed to it."""
    evaluating: bool
    """The module was switched to `eval()` before."""
    training: bool
    """The module was switched to `train()` before."""
    made_for_evaluation: bool
    """The constructor of an object that never trains switched it to `eval()`."""
    carried: frozenset[int]
    """Assignments of the previous iteration whose graph goes into this forward."""
    direct: bool
    """`model(x)`, `model.forward(x)` or `model.encoder(x)`, not another method of the module."""
    graphless: bool = False
    """Nothing is recorded for it: gradients are off, or the network is frozen and so is what goes in."""
    discarded: bool = False
    """Nothing takes its result."""
    stored: bool = False
    """Its graph is stored on an object, from where another method may backpropagate it."""
    escaped: bool = False
    """Its result went where it cannot be followed."""
    code: Function | None = None
    """The network's own code that runs, where that is in the file."""
    taken_off: bool = False
    """What a method drew of a network is taken off its graph, so that it has one."""
    differentiates: bool = False
    """The network's own code runs a backward, for which gradients have to be on."""

    @property
    def method(self) -> Hashable:
        """What is called, as it is written, and the class of its `self`, also in a function within a method.

        `net.module.encode` of what distributes a network is `net.encode`.
        """
        path = undistributed(self.path or ast.unparse(self.node.func))
        owners = (function.owner for function in self.site.functions if function.owner is not None)
        return path, next(owners, None) if path.startswith("self.") else None

    @property
    def records_graph(self) -> bool:
        """Whether autograd saves its activations, for certain."""
        return self.site.grad is Graph.YES and not self.graphless

    @property
    def may_record_graph(self) -> bool:
        """Whether autograd saves its activations, for all that is known."""
        return self.site.grad is not Graph.NO and not self.graphless


@dataclass(eq=False)
class Handed:
    """An object that was handed a function of the file: `Engine(validate)` calls it wherever the engine runs."""

    forwards: tuple[Forward, ...]
    """Those of the function that record a graph, as far as is known where the object is made."""
    runs: set[Graph] = field(default_factory=set)
    """Whether gradients are recorded, where it runs."""

    def run(self, grad: Graph) -> None:
        """It runs, with gradients recorded or not: they are not where it never runs with them."""
        self.runs.add(grad)
        for forward in self.forwards:
            forward.graphless = self.runs == {Graph.NO}


@dataclass(slots=True, eq=False)
class Backward(Event):
    """A backward pass: `loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`."""

    origins: frozenset[int]
    divisors: frozenset[str]
    scaled: bool
    carried: frozenset[int]
    unseen: frozenset[int]
    """Graphs made out of sight that it goes through as well."""
    retains: bool = False
    """`retain_graph=True`, literally."""
    framework: str | None = None
    made_here: bool = True
    """What is differentiated was made in the same function."""
    by_an_object: bool = False
    """`optim.backward(loss)`: an object out of sight runs it on the loss that it is given, and may scale that."""
    is_grad_call: bool = False
    """`torch.autograd.grad`, which differentiates without filling `.grad`."""


@dataclass(slots=True, eq=False)
class Step(Event):
    """An optimizer step, by the optimizer's path."""

    optimizer: str
    scaled: bool


@dataclass(slots=True, eq=False)
class Clip(Event):
    """A gradient clipping call, with what is known of the gradients it clips."""

    gradients: frozenset[str]


@dataclass(slots=True, eq=False)
class Keep:
    """A value is added to, or put into, something that was there before."""

    node: ast.expr
    site: Site
    target: str
    value: ast.expr
    manner: Manner
    certain: bool
    detachable: ast.expr | None
    """What `.detach()` would do on: the value where it is one tensor, or what the call of a meter hands over."""
    shared: bool
    """Another target is given the same value, and may need its graph: `kept[i] = loss = ...`."""
    crossed: tuple[Loop, ...]
    """The loops whose iterations the target outlives; none where it outlives the call of a method."""
    origins: frozenset[int]
    statement: ast.stmt | None
    returned: bool = False
    """Its target is returned to a caller out of sight, which may backpropagate it."""


@dataclass(slots=True, eq=False)
class ModuleAttribute:
    """A module's forward stores a value with its graph on the module: one graph lives until the next forward."""

    node: ast.expr
    name: str
    detachable: ast.expr | None
    """The value, where it is one tensor and nothing else is given it."""
    shared: bool
    """Another target is given the same value, and may need its graph."""


class Carry(NamedTuple):
    """An assignment whose value goes, graph and all, into a forward of the next iteration of a loop."""

    statement: ast.stmt
    loop: Loop
    forward: int
    """The origin of that forward."""


@dataclass(eq=False)
class Trace:
    """Everything that happened, over all ways through the script."""

    forwards: dict[int, Forward] = field(default_factory=dict)
    keeps: dict[int, Keep] = field(default_factory=dict)
    backwards: list[Backward] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    fits: list[Event] = field(default_factory=list)
    """Where a framework's trainer runs the training loop, out of sight."""
    followed: set[ast.Call] = field(default_factory=set)
    """Calls of functions of the file."""
    left_open: set[ast.Call] = field(default_factory=set)
    """Those of methods that say nothing: classes of other files fill them."""
    given_back: dict[int, frozenset[int]] = field(default_factory=dict)
    """By the id of such a call, the origins of what it returns with a graph."""
    calls: dict[str, list[Event]] = field(default_factory=dict)
    """Calls of functions of interest by their qualified name, such as `torch.cuda.empty_cache`."""
    backpropagated: set[int] = field(default_factory=set)
    """Forwards and keeps that a backward went through."""
    judged: set[frozenset[int]] = field(default_factory=set)
    """What makes a term of a loss, by its origins: what each use of a criterion of torch, which hides no network, was
    given with a graph, and what is summed into something that a backward runs on."""
    read_by_numpy: set[int] = field(default_factory=set)
    """Origins of what is handed to numpy, which refuses tensors that require gradients: they are numbers."""
    handed_on: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    """What carries a graph and was handed to something out of sight, in program order."""
    read_in: dict[ast.AST, set[int]] = field(default_factory=dict)
    """By the loop or function, the origins of the graphs that are read in it while gradients are recorded."""
    unseen: set[int] = field(default_factory=set)
    """Origins that stand for a forward out of sight: a backward runs on the name that holds its result."""
    module_level: list[ast.AST] = field(default_factory=list)
    """The nodes of the file that stand in no function."""
    freed: set[int] = field(default_factory=set)
    """Forwards that a backward went through without retaining the graph: their activations are gone."""
    carries: dict[int, Carry] = field(default_factory=dict)
    """By the number that the carried value has in `Value.carried_from`."""
    module_attributes: dict[ast.expr, ModuleAttribute] = field(default_factory=dict)
    framework_loops: dict[Loop, int] = field(default_factory=dict)
    """Loops that a framework runs around a step of the file, with their run; they stand in no file."""
    loops_over_parts: set[Loop] = field(default_factory=set)
    """Loops over what the iteration around them has made: losses, scales, crops."""
    loops_over_graphs: set[Loop] = field(default_factory=set)
    """Loops over what carries a graph: the rows of an output."""
    loops_over_pieces: dict[Loop, Pieces] = field(default_factory=dict)
    """Loops over the pieces of one tensor, cut up by hand."""
    pieces_of_batches: set[Loop] = field(default_factory=set)
    """Those of them that cut what the iteration around them was given: a batch."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _rounds: int = 0

    def number(self, *key: Hashable) -> int:
        """A number for a node on one way, the same each time."""
        return self._numbers.setdefault(key, len(self._numbers))

    def next_round(self) -> int:
        """A number for a round of a loop."""
        self._rounds += 1
        return self._rounds

    def let_escape(self, origins: frozenset[int]) -> None:
        """What the forwards among a value's origins gave goes where it cannot be followed."""
        for forward in self.forwards_of(origins):
            forward.escaped = True

    def frees(self, keep: Keep) -> bool:
        """Whether a backward frees the activations of what is kept, so that only graph nodes stay alive."""
        forwards = [origin for origin in keep.origins if origin in self.forwards or origin in self.unseen]
        return bool(forwards) and all(origin in self.freed for origin in forwards)

    def next_order(self) -> int:
        """The position of the next event in program order."""
        events = (self.backwards, self.forwards, self.steps, self.clips, self.keeps, self.fits)
        return sum(map(len, events))

    def forwards_of(self, origins: frozenset[int]) -> Iterator[Forward]:
        """The forwards among a value's origins."""
        return (self.forwards[origin] for origin in origins if origin in self.forwards)
