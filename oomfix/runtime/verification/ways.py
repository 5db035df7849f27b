"""Which way a forward has taken, where it may take another than a check has seen: its graph tells.

A forward may take another branch at any call (mixing the samples of every second batch), or in some micro-batches only
(a term for batches that hold a rare class). Of two networks whose graphs are alike, one is told by its parameters.
Loops over samples, or over what belongs to each, make graphs that differ from micro-batch to micro-batch too; they also
differ between the runs of a check, and in the same places. Micro-batches of which the graphs do not tell enough are
themselves checked.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
    """

    whole: Edges
    varying: frozenset[Edge]
    truths: Truth = ()

    @classmethod
    def of(cls, whole: Edges, parts: Iterable[Edges], truths: Truth) -> "Graphs":
        """The graphs of some rows and of parts of them."""
        return cls(whole, frozenset(edge for part in parts for edge, _ in whole ^ part), truths)


class Ways:
    """The ways that a forward may take in micro-batches."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._together: set[frozenset[object]] = set()
        self._checked: Edges | None = None
        self._varying: frozenset[Edge] = frozenset()
        self._truths: Truth = ()
        self._way: object = None
        self._doubted: frozenset[object] = frozenset()

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

    @property
    def are_decided(self) -> bool:
        """Whether what is true of a micro-batch has to be known to tell its way."""
        return bool(self._truths)

    def begin(self) -> None:
        """The first of some micro-batches is about to run."""
        self._way = None

    def refuses(self, loss: torch.Tensor, shape: int, truths: Truth) -> str | None:
        """Why a micro-batch that follows the last one may compute what no check has seen, or None.

        Args:
            loss: with its graph, or without one where it is a constant.
            shape: of its graph, see `gradients.Reach`.
            truths: what was found to be true of it, if `are_decided`.
        """
        before, self._way = self._way, (self._steady(edges(loss)) if self._varying else shape, truths)
        pair = frozenset({before, self._way} - {None})
        if self._way not in self._known and len(self._known) < _MOST_WAYS and not self._was_checked(loss, truths):
            reason = "it takes a branch that no check has seen yet"
        elif len(pair) > 1 and pair not in self._together and len(self._together) < _MOST_WAYS:
            reason = "some of its micro-batches take a branch that others do not"
        else:
            self._known.add(self._way)
            return None
        self._doubted = pair
        return reason

    def admit(self) -> None:
        """The micro-batches refused last have been checked, and compute what the whole batch does."""
        self._known |= self._doubted
        if len(self._doubted) > 1:
            self._together.add(self._doubted)

    def _was_checked(self, loss: torch.Tensor, truths: Truth) -> bool:
        if self._checked is None:
            return not self._known
        return truths == self._truths and self._steady(edges(loss)) == self._steady(self._checked)

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
