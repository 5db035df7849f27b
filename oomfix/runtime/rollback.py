"""Putting back what a failed run changed: random number generators, buffers, gradients."""

import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from oomfix.runtime.batch import Batch


class RandomState:
    """The state of torch's, Python's and NumPy's random number generators when it was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        # asking a GPU before CUDA runs would start it
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        # through the package: numpy 2 imports its generators when they are first used, in the forward perhaps
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)

    def moved_outside_torch(self) -> bool:
        """Whether Python's or NumPy's generator has been drawn from since."""
        if random.getstate() != self._python:
            return True
        if self._numpy is None:
            return False
        now, before = sys.modules["numpy"].random.get_state(legacy=False), self._numpy
        if now["has_gauss"] != before["has_gauss"] or now["state"]["pos"] != before["state"]["pos"]:
            return True
        return bool((now["state"]["key"] != before["state"]["key"]).any())

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Buffers:
    """The buffers of some modules, of which those that forwards change are kept before each run.

    All are kept before the first run; later only running statistics of layers in training mode and those that
    an earlier run was seen to write, so masks and position tables cost nothing.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, bool]] = []
        for module in modules:
            is_norm = isinstance(module, _NormBase)
            # weak, so that what is known about a forward does not keep its model alive
            place = weakref.ref(module)
            self._places += [(place, name, is_norm) for name, value in module._buffers.items() if value is not None]
        self._changing: list[bool] | None = None
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._versions: list[int] = []
        self._store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self) -> None:
        """Remember the contents of all buffers that the coming run may change."""
        if not self._places:
            return
        self._kept = []
        self._versions = []
        copies, originals = [], []
        for index, (place, name, is_norm) in enumerate(self._places):
            module = place()
            buffer = None if module is None else module._buffers[name]
            if module is None or buffer is None:
                self._versions.append(-1)
                continue
            self._versions.append(buffer._version)
            if self._changing is None or self._changing[index] or (is_norm and module.training):
                copy = self._copy_for(index, buffer)
                self._kept.append((index, buffer, copy))
                copies.append(copy)
                originals.append(buffer)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, originals)

    def restore(self) -> None:
        """Put the remembered contents back, into the tensors that held them."""
        with torch.no_grad():
            for index, buffer, copy in self._kept:
                place, name, _ = self._places[index]
                module = place()
                if module is not None:
                    buffer.copy_(copy)
                    module._buffers[name] = buffer

    def ran(self) -> None:
        """To be called after a run that went well: learns which buffers forwards change."""
        if not self._places:
            return
        changed = [
            (module := place()) is not None
            and (buffer := module._buffers[name]) is not None
            and buffer._version != version
            for (place, name, _), version in zip(self._places, self._versions, strict=True)
        ]
        if self._changing is None:
            self._changing = changed
            self._store = {index: pair for index, pair in self._store.items() if changed[index]}
        else:
            self._changing = [old or new for old, new in zip(self._changing, changed, strict=True)]

    def _copy_for(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        known, copy = self._store.get(index, (None, buffer))
        if known is not buffer:
            copy = torch.empty_like(buffer)
            self._store[index] = (buffer, copy)
        return copy


class GradientsAside:
    """Gradients of one call, apart from those that were there before it.

    A leaf that is covered has its gradient taken off, so that a backward which fails half way leaves nothing in
    it; `merge` adds both in the end, `put_back` forgets the call's.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @property
    def leaves(self) -> Iterator[torch.Tensor]:
        """Every leaf covered so far."""
        return (leaf for leaf, _ in self._earlier.values())

    def earlier(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that `leaf` held before the call."""
        return self._earlier[id(leaf)][1]

    def cover(self, leaves: Iterable[torch.Tensor], touched: bool = False) -> None:
        """Take the gradients of `leaves` off.

        Args:
            leaves: tensors that backward accumulates into; those covered already are left alone.
            touched: a backward has run since, so what they hold now belongs to this call.
        """
        for leaf in leaves:
            if id(leaf) not in self._earlier:
                earlier = leaf.grad
                self._earlier[id(leaf)] = (leaf, None if touched else earlier)
                if earlier is not None:
                    leaf.grad = None

    def drop(self) -> None:
        """Forget what this call has accumulated so far."""
        for leaf, _ in self._earlier.values():
            leaf.grad = None

    def put_back(self) -> None:
        """Leave the gradients as they were before the call."""
        for leaf, earlier in self._earlier.values():
            leaf.grad = earlier

    def scale(self, factor: float) -> None:
        """Multiply the gradients of this call."""
        if factor == 1.0:
            return
        _scale([leaf.grad for leaf, _ in self._earlier.values() if leaf.grad is not None], factor)

    def merge(self) -> None:
        """Add the earlier gradients to those of this call."""
        totals, additions = [], []
        for leaf, earlier in self._earlier.values():
            if earlier is None:
                continue
            if leaf.grad is not None:
                totals.append(earlier)
                additions.append(leaf.grad)
            leaf.grad = earlier
        if totals:
            with torch.no_grad():
                torch._foreach_add_(totals, additions)


def _scale(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)


def reached_leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor that the backward of `loss` accumulates a gradient into: its AccumulateGrad nodes' variables.

    The graph's shape outlives a backward that failed, so this works before and after.
    """
    leaves: list[torch.Tensor] = []
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    stack, seen = [loss.grad_fn], {loss.grad_fn}
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.append(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                leaves.append(variable)
    return leaves


class Border:
    """Inputs that have a graph of their own, behind which a forward shall not run backward piece by piece.

    Args:
        tensors: everything that is passed to the forward.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._inputs = {id(tensor): (tensor, tensor.detach().requires_grad_()) for tensor in tensors if tensor.grad_fn}

    def inside(self, batch: Batch) -> Batch:
        """The batch with leaves in place of those inputs."""
        if not self._inputs:
            return batch
        return batch.mapped(lambda leaf: self._inputs[id(leaf)][1] if id(leaf) in self._inputs else leaf)

    def leaves_behind(self) -> list[torch.Tensor]:
        """What the graphs behind the inputs accumulate into."""
        return [leaf for tensor, _ in self._inputs.values() for leaf in reached_leaves(tensor)]

    def flow_on(self) -> None:
        """Pass the gradients of the leaves on into the graph behind the inputs, once."""
        pairs = [(tensor, leaf.grad) for tensor, leaf in self._inputs.values() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
