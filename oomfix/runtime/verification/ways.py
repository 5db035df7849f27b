"""Which way a forward has taken, where it may take another than a check has seen: its graph tells.

A forward may take another branch at any call (mixing the samples of every second batch), or in some micro-batches only
(a term for batches that hold a rare class). Of two networks whose graphs are alike, one is told by its parameters.
Loops over samples, or over what belongs to each, make graphs that differ from micro-batch to micro-batch too; they also
differ between the runs of a check, and in the same places. Where each sample added as many nodes there, one that adds
none shows: it has no box, and the loss may be a mean over those that have. Micro-batches of which the graphs do not
tell enough are themselves checked.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

Edge = tuple[str, str | int]  # the kinds of a node and of one behind it; or a parameter, by its id
Edges = frozenset[tuple[Edge, int]]  # and how many there are
Truth = tuple[bool, ...]

_MOST_WAYS = 8  # that a forward may take before its way is one that changes from batch to batch
# what half precision and dropout put between two nodes, of which the runs of a check have neither
_IN_BETWEEN = {"ToCopyBackward0", "NativeDropoutBackward0", "MulBackward0"}
# one layer, computed in several ways: half precision takes another, and so does a layer that a check has frozen
_ALIKE = ("BatchNorm", "ScaledDotProduct")
# an input with a graph is a leaf, of which a micro-batch is a slice, and the few rows of a check are not
_ROWS = {"IndexBackward0", "SliceBackward0"}


@dataclass(frozen=True)
class Graphs:
    """What the graphs of a check were like.

    Attributes:
        whole: all edges of that of a few rows.
        varying: those of which two parts of the rows have more or fewer.
        truths: what was found to be true of these rows, see `truths`.
        per_row: of the edges that vary those that each row adds as many of, and how many.
    """

    whole: Edges
    varying: frozenset[Edge]
    truths: Truth = ()
    per_row: frozenset[tuple[Edge, Fraction]] = frozenset()

    @classmethod
    def of(cls, whole: Edges, parts: Sequence[Edges], rows: Sequence[int], truths: Truth) -> "Graphs":
        """The graphs of some rows and of parts of them, which are so many."""
        varying = frozenset(edge for part in parts for edge, _ in whole ^ part)
        by_rows = _per_row(whole, sum(rows)).intersection(*map(_per_row, parts, rows))
        return cls(whole, varying, truths, frozenset(pair for pair in by_rows if pair[0] in varying))


def _per_row(found: Edges, rows: int) -> frozenset[tuple[Edge, Fraction]]:
    return frozenset((edge, Fraction(count, rows)) for edge, count in found)


@dataclass(frozen=True)
class _Way:
    """One way that a forward may take.

    Attributes:
        steady: what tells it whatever the rows are.
        odd: edges of which its rows have more or fewer than those of a check.
        truths: what was found to be true of it.
    """

    steady: object
    odd: frozenset[Edge]
    truths: Truth


class Ways:
    """The ways that a forward may take in micro-batches."""

    def __init__(self) -> None:
        self._known: set[_Way] = set()
        self._together: set[frozenset[_Way]] = set()
        self._checked: Edges | None = None
        self._varying: frozenset[Edge] = frozenset()
        self._per_row: dict[Edge, Fraction] | None = None
        self._truths: Truth = ()
        self._way: _Way | None = None
        self._doubted: frozenset[_Way] = frozenset()

    def learn(self, graphs: Graphs | None) -> None:
        """Remember the graphs of a check that allowed a split; None: it does not know them."""
        self._checked = None if graphs is None else graphs.whole
        self._truths = () if graphs is None else graphs.truths
        if graphs is not None and not graphs.varying <= self._varying:
            self._varying |= graphs.varying
            # these were told apart by more than what counts from now on
            self._known.clear()
            self._together.clear()
            self._doubted = frozenset()
        if graphs is not None:
            self._keep_per_row(graphs)

    def _keep_per_row(self, graphs: Graphs) -> None:
        """Remember what each row adds; of which other rows have shown more or fewer tells no ways apart any more."""
        before = graphs.per_row if self._per_row is None else frozenset(self._per_row.items())
        self._per_row = dict(before & graphs.per_row)
        self._known = set(map(self._among_these, self._known))
        self._together = {frozenset(map(self._among_these, pair)) for pair in self._together}
        self._doubted = frozenset(map(self._among_these, self._doubted))

    def _among_these(self, way: _Way) -> _Way:
        return replace(way, odd=way.odd.intersection(self._per_row or ()))

    @property
    def are_decided(self) -> bool:
        """Whether what is true of a micro-batch has to be known to tell its way."""
        return bool(self._truths)

    def begin(self) -> None:
        """The first of some micro-batches is about to run."""
        self._way = None

    def refuses(self, loss: torch.Tensor, shape: int, truths: Truth, rows: int) -> str | None:
        """Why a micro-batch that follows the last one may compute what no check has seen, or None.

        Args:
            loss: with its graph, or without one where it is a constant.
            shape: of its graph, see `gradients.Reach`.
            truths: what was found to be true of it, if `are_decided`.
            rows: samples in it.
        """
        before, way = self._way, self._way_of(loss, shape, truths, rows)
        self._way = way
        pair = frozenset({way} if before is None else {before, way})
        if way not in self._known and len(self._known) < _MOST_WAYS and not self._was_checked(loss, way):
            reason = "it takes a branch that no check has seen yet"
        elif len(pair) > 1 and pair not in self._together and len(self._together) < _MOST_WAYS:
            reason = "some of its micro-batches take a branch that others do not"
        else:
            self._known.add(way)
            return None
        self._doubted = pair
        return reason

    def _way_of(self, loss: torch.Tensor, shape: int, truths: Truth, rows: int) -> _Way:
        if not self._varying:
            return _Way(shape, frozenset(), truths)
        found, per_row = edges(loss), self._per_row or {}
        counts = dict(found)
        odd = frozenset(edge for edge, number in per_row.items() if counts.get(edge, 0) != number * rows)
        return _Way(self._steady(found), odd, truths)

    def admit(self) -> None:
        """The micro-batches refused last have been checked, and compute what the whole batch does."""
        self._known |= self._doubted
        if len(self._doubted) > 1:
            self._together.add(self._doubted)

    def _was_checked(self, loss: torch.Tensor, way: _Way) -> bool:
        if self._checked is None:
            return not self._known
        steady = way.steady if self._varying else self._steady(edges(loss))
        return not way.odd and way.truths == self._truths and steady == self._steady(self._checked)

    def _steady(self, found: Edges) -> Edges:
        """The edges of which there are as many in each part of a batch."""
        return frozenset((edge, count) for edge, count in found if edge not in self._varying)


def edges(loss: torch.Tensor) -> Edges:
    """How often nodes of one kind are behind nodes of another in the graph of `loss`, and its parameters."""
    found: Counter[Edge] = Counter()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(stack)
    while stack:
        last = stack.pop()
        kind = _kind(last)
        for following, _ in last.next_functions:
            node = _behind(following)
            if node is None:
                continue
            found[kind, _kind(node)] += 1
            if node not in seen:
                seen.add(node)
                stack.append(node)
    # each once, however often a loop over samples uses it; other leaves, as inputs are, are new in each batch
    leaves = (getattr(node, "variable", None) for node in seen)
    # few nodes have one, and asking whether something is a parameter is slow
    found.update(("reaches", id(leaf)) for leaf in leaves if leaf is not None and isinstance(leaf, torch.nn.Parameter))
    return frozenset(found.items())


def _kind(node: torch.autograd.graph.Node) -> str:
    name = type(node).__name__
    if name in _ROWS and {type(behind).__name__ for behind, _ in node.next_functions} == {"AccumulateGrad"}:
        return "rows"
    return _kind_named(name)


@functools.lru_cache(maxsize=4096)
def _kind_named(name: str) -> str:
    return next((kind for kind in _ALIKE if kind in name), name)


def _behind(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    """`node`, or what is behind it where the runs of a check may have none of its kind."""
    while node is not None and type(node).__name__ in _IN_BETWEEN:
        inputs = [following for following, _ in node.next_functions if following is not None]
        if len(inputs) != 1:
            break
        node = inputs[0]
    return node
