"""What a value of a training script is, as far as memory is concerned."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

from oomfix.script.syntax.parameters import Bound, bind


class Kind(Enum):
    """The roles a value plays in training."""

    UNKNOWN = "unknown"
    TENSOR = "tensor"
    NUMBER = "number"
    """Anything that can hold no autograd graph: numbers, strings, NumPy arrays, None."""
    MODULE = "module"
    LOSS = "loss"
    """A criterion: a callable whose result carries the graph of its arguments."""
    OPTIMIZER = "optimizer"
    SCALER = "scaler"
    ACCELERATOR = "accelerator"
    """An object of a framework that owns autocast and backward (Accelerate, Fabric, DeepSpeed)."""
    TRAINER = "trainer"
    """An object of a framework that runs the training loop out of sight (Lightning, transformers)."""
    MEMORY = "memory"
    """The manager of `oomfix.runtime`."""
    SEQUENCE = "sequence"
    """A tuple or list of known items."""
    CONTAINER = "container"
    """A list, dict or set that grows; its graph is that of what was put in."""
    CONTEXT = "context"
    FUNCTION = "function"
    CLASS = "class"
    INSTANCE = "instance"
    EXTERNAL = "external"
    """Something imported, known by its qualified name."""


class Graph(IntEnum):
    """Whether a value carries an autograd graph."""

    NO = 0
    MAYBE = 1
    YES = 2


class _Missing(Enum):
    MISSING = 0


MISSING = _Missing.MISSING
SLOTS = "slots"
"""The `ref` of a list that is made as long as it will be, `[0] * 5`: what is written into it makes it no longer."""
MIXED = "mixed"
"""The `ref` of a list or dict into which something else was put than what it held."""
NO_ORIGINS: frozenset[int] = frozenset()


class Value(NamedTuple):
    """An abstract value.

    `origins` are the forwards and keep-sites (`Trace` numbers) whose graph the value carries. `ref` identifies what
    stands behind it: a definition, an instance, a module's creation, a qualified name, a context's effects.
    `constant` is only known where control flow is decided by it: arguments and loops over literals.
    """

    kind: Kind = Kind.UNKNOWN
    graph: Graph = Graph.NO
    origins: frozenset[int] = NO_ORIGINS
    items: tuple[Value, ...] | None = None
    ref: Any = None
    constant: Any = MISSING
    divisors: frozenset[str] = frozenset()
    """What it was divided by after it was made, as written: accumulation asks a loss for the window's size.

    `SUMMED` (`torch_facts`) stands here too, of a criterion or a loss: sums over the samples need no division.
    """
    is_tensor: bool = False
    """Certainly one tensor, and no tuple, dict or output object that holds some."""
    may_be_number: bool = False
    """A number on another way: `penalty = 0.0`, and a tensor where a flag says so."""
    scaled: bool = False
    """Went through `GradScaler.scale`."""
    alternatives: tuple[Value, ...] = ()
    """The other functions that a name may stand for: `update = amp_update if amp else plain_update`.

    Of a network, the other ones that it may be. Of an unknown value, all that it may be, where some is imported:
    `cast = torch.autocast if amp else nullcontext`.
    """
    carried_from: frozenset[int] = NO_ORIGINS
    """Assignments of the previous iteration that this value was carried over from, graph and all."""
    entries: tuple[tuple[str, Value], ...] = ()
    """What a dict was written with, key by key: `{"loss": loss, "correct": correct}`, until something changes it."""

    rows: tuple[Value, ...] = ()
    """What a list holds of which each entry is a tuple of one length, item by item: `batches.append((x, chances))`."""
    before: Beforehand | None = None
    """What a function is given before it is called: `partial(step, model)`."""

    def with_graph(self, graph: Graph, origins: frozenset[int] | None = None) -> Value:
        """The same value with another graph state (and origins)."""
        return self._replace(graph=graph, origins=self.origins if origins is None else origins, entries=(), rows=())

    def perhaps(self) -> Value:
        """The same value, whose graph, if it has any, is not certain."""
        return self.with_graph(min(self.graph, Graph.MAYBE))


class Given(NamedTuple):
    """What a call is given, evaluated.

    Attributes:
        positional: the arguments without a name, in order.
        keywords: those with one; what `**` unpacks stands under "**".
        starred: which of the positional ones is the first that `*` unpacks; None where their number is known.
        ahead: how many of the positional ones were given before the call.
    """

    positional: Sequence[Value] = ()
    keywords: Mapping[str, Value] = MappingProxyType({})
    starred: int | None = None
    ahead: int = 0

    @property
    def all(self) -> list[Value]:
        """Every argument, with a name or without."""
        return [*self.positional, *self.keywords.values()]

    @property
    def rest(self) -> Given:
        """What is left for the function that the first argument is."""
        return Given(self.positional[1:], self.keywords, self.starred and self.starred - 1)

    def after(self, earlier: Given) -> Given:
        """The same, behind what was given earlier."""
        count = len(earlier.positional)
        starred = None if self.starred is None else self.starred + count
        positional, keywords = [*earlier.positional, *self.positional], {**earlier.keywords, **self.keywords}
        return Given(positional, keywords, starred, ahead=count + self.ahead)

    def of_kinds(self, kinds: Sequence[Kind]) -> Given:
        """The same, where nothing is known of what is none of these, and more may be given."""

        def known(value: Value) -> Value:
            return value if value.kind in kinds else UNKNOWN

        keywords = {name: known(value) for name, value in self.keywords.items()} | {"**": UNKNOWN}
        return Given([known(value) for value in self.positional], keywords, self.starred)

    def to(self, parameters: ast.arguments, receivers: Sequence[Value] = ()) -> Bound[Value]:
        """Which parameters of a function take what; first the object, where it is a method of one."""
        named = ((None if name == "**" else name, value) for name, value in self.keywords.items())
        starred = None if self.starred is None else self.starred + len(receivers)
        return bind(parameters, [*receivers, *self.positional], named, starred=starred)

    def argument(self, name: str) -> Value:
        """The first argument without a name, or else the one of this name."""
        return self.positional[0] if self.positional else self.keywords.get(name, UNKNOWN)


@dataclass(frozen=True, eq=False)
class Beforehand:
    """What a function is given before it is called."""

    given: Given


_MOST_ALTERNATIVES = 3
_NAMED = (Kind.EXTERNAL, Kind.CLASS, Kind.INSTANCE)
_CALLED = (Kind.MODULE, Kind.FUNCTION, Kind.LOSS)

_MOST_CALLED = 16
"""Of longer lists it is only known what each of them is."""

UNKNOWN = Value()
LOADED = Value(ref="loaded")
"""What `torch.load` gives: whatever was saved."""
NUMBER = Value(Kind.NUMBER)
NONE = Value(Kind.NUMBER, constant=None)
LITERAL = Value(Kind.NUMBER, ref="literal")
"""A number that is written down: `loss = 0.0`, until something else is known."""
PLAIN_TENSOR = Value(Kind.TENSOR)
FRESH_TENSOR = Value(Kind.TENSOR, is_tensor=True)
"""A tensor of floats that holds no graph yet; a value written into it in place brings its own along."""


def constant(value: Any) -> Value:
    """A number, string, bool or None whose value is known."""
    return Value(Kind.NUMBER, constant=value)


def flatten(value: Value) -> Value:
    """A sequence as one value: the graph and origins of all its items."""
    if value.items is None:
        return value
    items = [flatten(item) for item in value.items]
    return combine(items)._replace(divisors=divided_alike(items))


def divided_alike(values: Sequence[Value]) -> frozenset[str]:
    """What all values that carry a graph were divided by, and so is their sum."""
    divisors = [flatten(value).divisors for value in values if flatten(value).graph]
    return frozenset.intersection(*divisors) if divisors else frozenset()


def combine(values: Sequence[Value]) -> Value:
    """What an operation on several values gives: it carries every graph that goes in."""
    graph, origins, carried = Graph.NO, NO_ORIGINS, NO_ORIGINS
    numbers = known = may_be_number = True
    for value in values:
        if value.items is not None:
            value = flatten(value)
        if value.kind is not Kind.NUMBER:
            numbers = False
            known = known and value.kind is Kind.TENSOR
        if value.graph:
            graph = max(graph, value.graph)
            origins |= value.origins
            carried |= value.carried_from
            may_be_number = may_be_number and value.may_be_number
    if graph is Graph.NO:
        return NUMBER if numbers else (PLAIN_TENSOR if known else UNKNOWN)
    return Value(Kind.TENSOR, graph, origins, may_be_number=may_be_number, carried_from=carried)


def join(first: Value, second: Value) -> Value:
    """What a name holds after two branches: certain only where both agree."""
    if first is second or first == second:
        return first
    if first.kind is Kind.CONTEXT and second.kind is Kind.CONTEXT:
        return Value(Kind.CONTEXT, ref=first.ref | second.ref)
    if first.items is not None and second.items is not None and len(first.items) == len(second.items):
        items = tuple(join(one, other) for one, other in zip(first.items, second.items, strict=True))
        return Value(first.kind if first.kind is second.kind else Kind.SEQUENCE, items=items)
    # A name that is None, or not yet set, on one side is what it is on the other.
    if first.kind is Kind.NUMBER and second.kind not in (Kind.NUMBER, Kind.TENSOR, Kind.UNKNOWN):
        return second
    if second.kind is Kind.NUMBER and first.kind not in (Kind.NUMBER, Kind.TENSOR, Kind.UNKNOWN):
        return first
    # `agent = torch.load(path) if resumed else Agent()`: what was saved is what the other side makes.
    for loaded, made in ((first, second), (second, first)):
        if loaded == LOADED and made.kind in (Kind.MODULE, Kind.INSTANCE):
            return made
    if first.kind is Kind.FUNCTION and second.kind is Kind.FUNCTION:
        others = (*first.alternatives, second._replace(alternatives=()), *second.alternatives)
        return first._replace(alternatives=tuple(dict.fromkeys(others))[:_MOST_ALTERNATIVES])
    if candidates := _candidates(first, second):
        return Value(alternatives=candidates)
    if first.kind is second.kind and first.ref != second.ref and first.kind in _NAMED:
        return UNKNOWN
    one, other = flatten(first), flatten(second)
    for number, value in ((first, other), (second, one)):
        if _is_written_number(number) and value.graph is Graph.YES:
            return value._replace(is_tensor=False, may_be_number=True)  # where there is anything, it is the graph
    graph = one.graph if one.graph == other.graph else Graph.MAYBE
    same_kind = one.kind is other.kind
    return Value(
        kind=one.kind if same_kind else (Kind.TENSOR if Kind.TENSOR in (one.kind, other.kind) else Kind.UNKNOWN),
        graph=graph,
        origins=one.origins | other.origins,
        ref=one.ref if one.ref == other.ref else (one.ref if same_kind and one.kind is Kind.MODULE else None),
        divisors=one.divisors | other.divisors,
        is_tensor=one.is_tensor and other.is_tensor,
        scaled=one.scaled or other.scaled,
        carried_from=one.carried_from & other.carried_from,
        rows=_rows_of_either(one, other),
        alternatives=_networks_of_either(first, second),
    )


def each_of(held: Value) -> Value:
    """What each item of a list is, or what stands behind each key of a dict, as far as that is alike."""
    return reduce(join, held.items or (UNKNOWN,))


def entry_of(held: Value, key: Value) -> Value:
    """What a dict gives for a key: that entry where it is written down, or one of them."""
    return dict(held.entries).get(key.constant) or each_of(held)


def are_called_alike(values: Sequence[Value]) -> bool:
    """Whether all values are networks, or all are functions of the file, or all criteria, and there is one."""
    return bool(values) and values[0].kind in _CALLED and len({value.kind for value in values}) == 1


def holds_called_alone(held: Value) -> bool:
    """Whether all that is in a list or dict are networks, functions or criteria, and something is."""
    return are_called_alike(held.items or ())


def may_take_called(held: Value, added: Value) -> bool:
    """Whether what is put into a list or dict is a network, function or criterion, and nothing else is in there."""
    empty = held in (Value(Kind.CONTAINER), Value(Kind.CONTAINER, ref=SLOTS))
    return are_called_alike([added, *(held.items or ())]) and (empty or bool(held.items))


def with_called(held: Value, added: Value, kind: Kind) -> Value:
    """A list (SEQUENCE) or dict (CONTAINER) of what is called, into which one more was put."""
    called = (*(held.items or ()), added)
    return Value(kind, items=called if len(called) <= _MOST_CALLED else (reduce(join, called),))


def _networks_of_either(first: Value, second: Value) -> tuple[Value, ...]:
    """The other networks that a name may stand for: `net = Plain() if simple else Recurrent()`."""
    if not (first.kind is second.kind is Kind.MODULE):
        return ()
    others = () if first.ref == second.ref else (second._replace(alternatives=()),)
    return tuple(dict.fromkeys((*first.alternatives, *others, *second.alternatives)))[:_MOST_ALTERNATIVES]


def _rows_of_either(first: Value, second: Value) -> tuple[Value, ...]:
    """The rows of two lists, either of which may have none yet."""
    if not (first.kind is second.kind is Kind.CONTAINER):
        return ()
    if not first.graph or not second.graph:
        return first.rows or second.rows
    if len(first.rows) != len(second.rows):
        return ()
    return tuple(join(one, other) for one, other in zip(first.rows, second.rows, strict=True))


def with_row(held: Value, row: Value, kept: frozenset[int]) -> tuple[Value, ...]:
    """The rows of a list into which a tuple is put, which `kept` stands for; none where its length is another."""
    items = []
    for item in map(flatten, row.items or ()):
        plain = NUMBER if item.kind is Kind.NUMBER else item  # what is known of one entry says nothing of the others
        items.append(item.with_graph(item.graph, item.origins | kept) if item.graph else plain)
    return _rows_of_either(held, Value(Kind.CONTAINER, Graph.YES, rows=tuple(items)))


def _candidates(first: Value, second: Value) -> tuple[Value, ...]:
    """All that a name may be, where some of it is imported; nothing where one side is a tensor."""
    if any(flatten(value).graph or value.kind is Kind.TENSOR for value in (first, second)):
        return ()
    candidates = [
        one
        for value in (first, second)
        for one in (value._replace(alternatives=()), *value.alternatives)
        if one.kind is not Kind.UNKNOWN or not value.alternatives
    ]
    return tuple(dict.fromkeys(candidates)) if any(one.kind is Kind.EXTERNAL for one in candidates) else ()


def _is_written_number(value: Value) -> bool:
    """`0.0`, assigned or returned where there is no loss."""
    constant = value.constant
    return value == LITERAL or (isinstance(constant, int | float) and not isinstance(constant, bool))
