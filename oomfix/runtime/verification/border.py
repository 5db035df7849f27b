"""Graphs made before a call, behind tensors that its forward is given or finds: only one backward can pass them.

The parts of a batch each run a backward. Leaves stand in for those tensors, so that each of these ends there, and what
the leaves have got in the end is passed on into the graphs at once. An argument is known beforehand. What a forward
finds by itself (the temperature of a policy, learned in another step) is seen as it is put into a function of torch.
Only what has a row for each sample is left as it is: every part would compute all of it anew. The backward of a whole
batch passes such graphs itself, and may start again as long as it has not come to them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from oomfix.runtime import trees
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.state.gradients import is_leaf_node, next_node, reached_leaves
from oomfix.runtime.state.held_objects import MOST_ENTRIES
from oomfix.runtime.state.referenced import references

_PLAIN = frozenset({type(None), bool, int, float, str, slice, torch.dtype, torch.device})  # hold no tensor

_checked: list[tuple["Border", int]] = []


class Border:
    """Tensors with a graph from before a call, behind which its forward shall not run backward piece by piece.

    Args:
        tensors: what is passed to the forward and has a graph.

    Attributes:
        has_inputs: there are such.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._first_node = next_node()
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in tensors:
            self._leaf_for(tensor)
        self._inputs = len(self._leaves)
        self.has_inputs = self._inputs > 0

    def inside(self, batch: Batch) -> Batch:
        """The batch with leaves in place of those inputs."""
        return batch.mapped(lambda leaf: self._leaves[id(leaf)][1] if id(leaf) in self._leaves else leaf)

    def closed(self, samples: int) -> "Closed":
        """Context around a forward of rows of a batch of so many that uses leaves in place of what it finds."""
        return Closed(self, samples)

    @contextmanager
    def checked(self, samples: int) -> Iterator[None]:
        """Context around a check of a batch of so many, each of whose forwards uses leaves."""
        _checked.append((self, samples))
        try:
            yield
        finally:
            _checked.pop()

    def leaves_behind(self) -> list[torch.Tensor]:
        """What the graphs behind accumulate into."""
        return [leaf for tensor, _ in self._leaves.values() for leaf in reached_leaves(tensor)]

    def flow_on(self) -> None:
        """Pass the gradients of the leaves on into the graphs behind, once."""
        pairs = [(tensor, leaf.grad) for tensor, leaf in self._leaves.values() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    @property
    def has_found_more(self) -> bool:
        """Whether something stands in that is no input."""
        return len(self._leaves) > self._inputs

    def leaves(self) -> list[torch.Tensor]:
        """What stands in so far."""
        return [leaf for _, leaf in self._leaves.values()]

    def passed(self, value: Any, samples: int) -> Any:
        """`value`, or the leaf in its place."""
        return self._leaf_for(value) if isinstance(value, torch.Tensor) and self._stops(value, samples) else value

    def stops_some(self, values: Iterable[Any], samples: int) -> bool:
        """Whether a leaf would take the place of anything in these, or in what they hold."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None and self._stops(value, samples):
                    return True
            elif type(value) not in _PLAIN:
                inner = trees.children(value)
                if inner and self.stops_some([child for _, child in inner], samples):
                    return True
        return False

    def _stops(self, tensor: torch.Tensor, samples: int) -> bool:
        node = tensor.grad_fn
        if node is None or node._sequence_nr() >= self._first_node:
            return False
        return not (tensor.dim() and len(tensor) == samples)

    def met_by(self, forward: Callable[..., Any]) -> str:
        """Why `forward` cannot be run in parts: what it passes, though the border was closed, if that can be seen."""
        found = [(name, value) for name, value in references(forward) if _may_be_tensors(value)]
        with_graph = {name: list(filter(_has_graph, trees.tensors(value))) for name, value in found}
        named = [name for name, tensors in with_graph.items() if tensors]
        named.sort(key=lambda name: all(id(tensor) in self._leaves for tensor in with_graph[name]))
        what = repr(named[0]) if named else "a tensor made before"
        return f"it uses {what}, which has a graph of its own that only one backward can pass (give it as argument)"

    def _leaf_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._leaves:
            leaf = tensor.detach()
            leaf.requires_grad = True  # inside of a transform of torch.func the method is refused
            self._leaves[id(tensor)] = tensor, leaf
        return self._leaves[id(tensor)][1]


class Passing:
    """Watches whether a backward comes to a graph from before a call.

    A backward takes what was computed last first, so one that fails has often left such a graph as it was, and can be
    tried again.

    Args:
        loss: with its graph.
        first_node: of the call, see `next_node`.

    Attributes:
        has_come: it has, and none may pass that graph again.
    """

    def __init__(self, loss: torch.Tensor, first_node: int) -> None:
        self.has_come = False
        self._watched = [node.register_prehook(self._comes) for node in _first_from_before(loss, first_node)]

    def end(self) -> None:
        """The backward is over; the graph may live on."""
        for handle in self._watched:
            handle.remove()

    def _comes(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self.has_come = True


def _first_from_before(loss: torch.Tensor, first_node: int) -> list[Node]:
    """The nodes of graphs from before the node numbered `first_node` that a backward of `loss` comes to first."""
    waiting, seen, found = [loss.grad_fn], {loss.grad_fn, None}, []
    while waiting:
        node = waiting.pop()
        if node is None or is_leaf_node(node):
            continue
        if node._sequence_nr() < first_node:
            found.append(node)
            continue
        following = {following for following, _ in node.next_functions} - seen
        seen |= following
        waiting += following
    return found


class Closed(TorchFunctionMode):
    """Context around a forward of rows of a batch, in which leaves take the place of what a border stops.

    Args:
        border: makes the leaves.
        samples: of the batch; what has a row for each of them is not stopped.
    """

    def __init__(self, border: Border, samples: int) -> None:
        super().__init__()
        self._border = border
        self._samples = samples

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.replaced(args, kwargs or {})
        return func(*args, **kwargs)

    def replaced(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call as it is made inside."""
        # what is looked at here is nothing that the program does, as a watch around this would take it
        with torch._C.DisableTorchFunction():
            # hardly any call is given something to be replaced, for which its arguments are made anew
            if self._border.stops_some((*args, *kwargs.values()) if kwargs else args, self._samples):
                args, kwargs = trees.map_leaves(partial(self._border.passed, samples=self._samples), (args, kwargs))
        return args, kwargs


def around_checked() -> Closed | None:
    """What a forward runs in that is checked now."""
    border, samples = _checked[-1] if _checked else (None, 0)
    return None if border is None else border.closed(samples)


def leaves_in_checked() -> list[torch.Tensor]:
    """What stands in for graphs from before, in the forward that is checked now."""
    return [leaf for border, _ in _checked for leaf in border.leaves()]


def _may_be_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple | dict) and len(value) <= MOST_ENTRIES)


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
