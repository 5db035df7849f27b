"""Gradients of a call, apart from those that were there before it, so that a failed call leaves no trace."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from oomfix.runtime.state.kept_tensors import KeptTensors

CHANGES_GRADIENTS = "it changes gradients itself, by a backward or a zero_grad inside of it"


class GradientsAside:
    """Gradients of one call, apart from those that were there before it.

    A leaf that is covered has its gradient taken off, so that a backward which fails half way leaves nothing in
    it; `merge` adds both in the end, `put_back` forgets the call's. A forward of the whole batch finds them where
    they were (`lend`), since a `zero_grad` inside of it means them.

    Attributes:
        held: the gradients that leaves held before the call, by the id of the leaf.
    """

    def __init__(self) -> None:
        self._covered: dict[int, torch.Tensor] = {}
        self._reset: set[int] = set()
        self._lent: KeptTensors | None = None
        self.held: dict[int, torch.Tensor] = {}

    @property
    def leaves(self) -> Iterable[torch.Tensor]:
        """Every leaf covered so far."""
        return self._covered.values()

    def earlier(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that `leaf` held before the call."""
        return self.held.get(id(leaf))

    def cover(self, leaves: Iterable[torch.Tensor], touched: bool = False) -> None:
        """Take the gradients of `leaves` off.

        Args:
            leaves: tensors that backward accumulates into; those covered already are left alone.
            touched: a backward has run since, so what they hold now belongs to this call, and stays there.
        """
        new = [leaf for leaf in leaves if id(leaf) not in self._covered]
        self._covered.update(zip(map(id, new), new, strict=True))
        if touched:
            return
        for leaf in new:
            if leaf.grad is not None:
                self.held[id(leaf)] = leaf.grad
                leaf.grad = None

    def lend(self, copies: bool) -> None:
        """Give leaves their earlier gradients for the time of a forward of the whole batch, which may reset them.

        Args:
            copies: keep in host memory what they hold: the forward may write into them, and fail.
        """
        self._lent = KeptTensors(self.held.values(), largest=sys.maxsize if copies else 0)
        for key, earlier in self.held.items():
            self._covered[key].grad = earlier

    def take_back(self) -> bool:
        """Take the earlier gradients off again. What the forward has reset is gone, as it would be without us.

        Returns:
            Whether the forward has written into some.
        """
        for key, earlier in self.held.items():
            leaf = self._covered[key]
            if leaf.grad is earlier:
                leaf.grad = None
            else:
                self._reset.add(key)
        return self._lent is not None and self._lent.written()

    def drop(self) -> bool:
        """Forget what this call has accumulated so far, reset, and written into earlier gradients.

        Returns:
            Whether the earlier gradients are what they were: False if a copy is missing.
        """
        self._reset.clear()
        for leaf in self.leaves:
            leaf.grad = None
        return self._lent is None or self._lent.restore()

    def put_back(self) -> None:
        """Leave the gradients as they were before the call."""
        if self._lent is not None:
            self._lent.restore()
        for leaf in self.leaves:
            leaf.grad = self.earlier(leaf)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take the gradients of this call off, so that leaves hold what they held before it.

        Returns:
            The leaves that got one, each with its gradient.
        """
        taken = [(leaf, leaf.grad) for leaf in self.leaves if leaf.grad is not None]
        for key, leaf in self._covered.items():
            # what the forward has reset is gone, as it would be without us
            leaf.grad = None if key in self._reset else self.earlier(leaf)
        return taken

    def scale(self, factor: float) -> None:
        """Multiply the gradients of this call."""
        if factor == 1.0:
            return
        _scale([leaf.grad for leaf in self.leaves if leaf.grad is not None], factor)

    def merge(self) -> None:
        """Add the earlier gradients to those of this call."""
        totals, additions = [], []
        for key, earlier in self.held.items():
            if key in self._reset:
                continue
            leaf = self._covered[key]
            if leaf.grad is not None:
                totals.append(earlier)
                additions.append(leaf.grad)
            leaf.grad = earlier
        if totals:
            with torch.no_grad():
                torch._foreach_add_(totals, additions)


class GradientsNoted:
    """The gradients of some leaves before a forward, which are none of its business.

    Args:
        leaves: those that are looked at.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._noted = [(leaf, leaf.grad, 0 if leaf.grad is None else leaf.grad._version) for leaf in leaves]

    def grown(self) -> bool:
        """Whether something has been added to one since, or written into it."""
        now = ((leaf.grad, gradient, version) for leaf, gradient, version in self._noted if leaf.grad is not None)
        return any(grad is not gradient or grad._version != version for grad, gradient, version in now)

    def put_back(self) -> bool:
        """Whether something has changed them since; every leaf has the one again that it had."""
        changed = False
        for leaf, gradient, version in self._noted:
            if leaf.grad is not gradient:
                leaf.grad, changed = gradient, True
            changed = changed or (gradient is not None and gradient._version != version)
        return changed


def _scale(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True)
class Reach:
    """What the backward of a loss comes to.

    Attributes:
        leaves: the tensors it accumulates gradients into: the variables of its AccumulateGrad nodes.
        oldest: the sequence number of the first node of the graph that was made, leaves apart.
        hides_leaves: there are more, behind a reentrant checkpoint, whose backward is one of its own.
        shape: stands for how many nodes of which kind are in the graph, and for the parameters that it reaches; another
            shows another computation.
    """

    leaves: list[torch.Tensor]
    oldest: int
    hides_leaves: bool = False
    shape: int = 0

    def began_before(self, node: int) -> bool:
        """Whether the graph has nodes that were there before the one numbered `node`, see `next_node`."""
        return self.oldest < node


_REENTRANT = CheckpointFunction._backward_cls  # type: ignore[attr-defined]
_LEAF = 2**64 - 1  # the sequence number of all AccumulateGrad nodes


def has_hook(leaf: torch.Tensor) -> bool:
    """Whether something is called with each gradient of `leaf`."""
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))


def next_node() -> int:
    """The sequence number that the next node of a graph will have. Each thread counts its own."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def is_leaf_node(node: Node) -> bool:
    """Whether `node` accumulates into a leaf, rather than belonging to what some call computed."""
    return node._sequence_nr() == _LEAF


def reach(loss: torch.Tensor) -> Reach:
    """What the backward of `loss` comes to.

    The graph's shape outlives a backward that failed, so this works before and after.
    """
    leaves: list[torch.Tensor] = []
    if loss.grad_fn is None:
        return Reach([loss] if loss.requires_grad else [], _LEAF)
    stack, seen, oldest = [loss.grad_fn], {loss.grad_fn}, loss.grad_fn._sequence_nr()
    hides_leaves = False
    while stack:
        last = stack.pop()
        hides_leaves = hides_leaves or isinstance(last, _REENTRANT)
        for node, _ in last.next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if number == _LEAF:
                leaves.append(node.variable)  # type: ignore[attr-defined]
            else:
                stack.append(node)
                oldest = min(oldest, number)
    # the sum of two addresses may be that of two others
    parameters = sum(hash((id(leaf),)) for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
    return Reach(leaves, oldest, hides_leaves, parameters + sum(hash(type(node)) for node in seen))


def reached_leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor that the backward of `loss` accumulates a gradient into."""
    return reach(loss).leaves
