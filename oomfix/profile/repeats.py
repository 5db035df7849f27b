"""Forward passes that repeat earlier ones: a few of hundreds of evaluation or accumulation batches say it all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules_of_torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from oomfix.profile.boundary import CUDA, CardTrace
from oomfix.profile.compat import Structure
from oomfix.profile.identities import PLAIN, Identities
from oomfix.profile.patches import Patches
from oomfix.profile.trace import Storage

_ROUNDS = 2
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS if name != "_backward_pre_hooks")


class Repeats:
    """Answers forwards of whole models that were seen twice since the last optimizer step, in the same circumstances.

    The same are forwards of one model, with arguments of the same shapes and the same attributes on all modules, that
    find every block of the card's memory where it was, take as many allocations, and leave the same behind. A third one
    would do so again: what it leaves is put in place, and nothing in between. Its backward frees that and ends, since
    the gradients are there. Whatever might differ all the same runs: where something hangs on hooks, on numbers that
    came from the host, or on gradients of the input, and where the script asks `torch.autograd.grad`.

    Args:
        patches: where torch is patched.
        trace: whose forwards are answered; told what was assumed.
    """

    def __init__(self, patches: Patches, trace: CardTrace) -> None:
        self._trace = trace
        self._rounds: dict[Any, tuple[_Outcome, int]] = {}
        self._identities = Identities()
        self._step = 0
        self._differentiates = False
        differentiate = torch.autograd.grad

        def grad(*args: Any, **kwargs: Any) -> Any:
            self._differentiates = True
            return differentiate(*args, **kwargs)

        # the 16-bit copies of weights that autocast keeps until it is left
        self._of_autocast: list[_Kept] = []
        clear = torch.clear_autocast_cache

        def clear_cache() -> None:
            clear()
            while self._of_autocast:
                self._of_autocast.pop().free()

        patches.set(torch.autograd, grad=grad)
        patches.set(torch, clear_autocast_cache=clear_cache)
        trace.run_forward = self.run

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of `call(module, *args, **kwargs)`, or one like it."""
        trace = self._trace
        if self._step != len(trace.steps):
            self._step = len(trace.steps)
            self._rounds.clear()
        key = None if self._differentiates else self._key(module, args, kwargs)
        if key is None:
            return call(module, *args, **kwargs)
        outcome, rounds = self._rounds.get(key, (None, 0))
        if outcome is not None and rounds >= _ROUNDS:
            left = self._put_in_place(outcome.left)
            if left is not None:
                trace.assume("a forward pass needs what the same one needed twice before")
                return outcome.again(module, trace, left, self._of_autocast)
        events, storages, read = len(trace.events), len(trace.storages), trace.values_read
        result = call(module, *args, **kwargs)
        now = _outcome(trace, result, events, storages) if read == trace.values_read else None
        if now is None:
            self._rounds.pop(key, None)
        else:
            self._rounds[key] = now, rounds + 1 if now == outcome else 1
        return result

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What tells a forward from others; None where it may differ from one with the same."""
        if isinstance(module, DistributedDataParallel) or any(
            getattr(modules_of_torch, name) for name in _GLOBAL_HOOKS
        ):
            return None
        leaves, structure = tree_flatten((args, kwargs))
        grad = torch.is_grad_enabled()
        told = [_told(leaf, grad) for leaf in leaves]
        if None in told or any(_has_hooks(part, grad) for part in nn.Module.modules(module)):
            return None
        modes = grad, torch.is_inference_mode_enabled(), torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        attributes = [self._identities.told(vars(part)) for part in nn.Module.modules(module)]
        if None in attributes:
            return None
        of_module = self._identities.of(module)
        return of_module, modes, Structure(structure), tuple(told), tuple(attributes), self._trace.allocator.layout()

    def _put_in_place(self, left: "Sequence[_Left]") -> list[int] | None:
        """The numbers of storages like those that were left, where they were; None where there is no room."""
        indices: list[int] = []
        for one in left:
            index = self._trace.add_again(one.storage, one.address, one.small)
            if index is None:
                _free(self._trace, indices)
                return None
            indices.append(index)
        return indices


@dataclass(frozen=True)
class _Left:
    """A storage that a forward left on the card, and where."""

    address: int
    nbytes: int
    small: bool
    storage: Storage = field(compare=False)


@dataclass(frozen=True)
class _Tensor:
    """A tensor among the results: how it lies in a storage, that of this number among those that were left."""

    left: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Plain:
    """A result that is no tensor."""

    value: Any


@dataclass(frozen=True)
class _Outcome:
    """What a forward returned and left on the card, and how many allocations and frees it took."""

    leaves: tuple[_Tensor | _Plain, ...]
    structure: TreeSpec
    left: tuple[_Left, ...]
    events: int

    def again(self, module: nn.Module, trace: CardTrace, indices: list[int], of_autocast: "list[_Kept]") -> Any:
        """Results like those before, in storages of the trace that are in place.

        What is left besides is freed by a backward through the results, or joins what autocast keeps.
        """
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, _Tensor)]
        of_results = {tensor.left for tensor in tensors}
        kept = _Kept(trace, [index for number, index in enumerate(indices) if number not in of_results])

        def made() -> list[torch.Tensor]:
            return [self._made(tensor, trace, indices[tensor.left]) for tensor in tensors]

        if any(tensor.requires_grad for tensor in tensors):
            anchor = next(parameter for parameter in module.parameters() if parameter.requires_grad)
            fixed = [not tensor.requires_grad for tensor in tensors]
            results = iter(_Again.apply(anchor, made, fixed, kept))  # type: ignore[no-untyped-call]
        else:
            of_autocast.append(kept)
            results = iter(made())
        leaves = [next(results) if isinstance(leaf, _Tensor) else leaf.value for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def _made(self, tensor: _Tensor, trace: CardTrace, index: int) -> torch.Tensor:
        elements = trace.storages[index].requested_bytes // tensor.dtype.itemsize
        trace.recording = False
        try:
            memory = torch.empty(elements, dtype=tensor.dtype, device=CUDA)
        finally:
            trace.recording = True
        trace.bind(memory, index)
        return memory.as_strided(tensor.shape, tensor.stride, tensor.offset)


class _Kept:
    """What a forward left besides its results: freed when it is told to, or with what holds this."""

    def __init__(self, trace: CardTrace, indices: list[int]) -> None:
        self._trace, self._indices = trace, indices

    def free(self) -> None:
        """Once."""
        _free(self._trace, self._indices)
        self._indices = []

    def __del__(self) -> None:
        self.free()


class _Again(torch.autograd.Function):
    """Results that have a graph, in which nothing is left to do."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, make: Callable[[], list[torch.Tensor]], fixed: list[bool], kept: _Kept
    ) -> tuple[torch.Tensor, ...]:
        # a result that no loss uses would get zeros as its gradient, in the memory of the host
        ctx.set_materialize_grads(False)
        ctx.kept = kept
        results = make()
        ctx.mark_non_differentiable(*(result for result, is_fixed in zip(results, fixed, strict=True) if is_fixed))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.kept.free()
        return None, None, None, None


def _free(trace: CardTrace, indices: Iterable[int]) -> None:
    for index in indices:
        trace.remove(index)


def _told(leaf: Any, grad: bool) -> Any:
    """What tells an argument from others; None where it may be another in the same clothes."""
    if type(leaf) is FakeTensor:
        if grad and leaf.requires_grad:
            return None
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.storage_offset()
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _outcome(trace: CardTrace, result: Any, first_event: int, first_storage: int) -> _Outcome | None:
    """What a forward came to; None where it freed what was there before, or returned what cannot be made again."""
    events = trace.events[first_event:]
    if any(event < 0 and ~event < first_storage for event in events):
        return None
    left: list[_Left] = []
    number: dict[int, int] = {}
    for index in range(first_storage, len(trace.storages)):
        storage = trace.storages[index]
        if storage.block is not None:
            number[index] = len(left)
            left.append(_Left(storage.block.address, storage.nbytes, storage.block.small, storage))
    leaves, structure = tree_flatten(result)
    made = (_described(leaf, trace, number) for leaf in leaves)
    described = [leaf for leaf in made if leaf is not None]
    numbers = [leaf.left for leaf in described if isinstance(leaf, _Tensor)]
    # with a graph, or under autocast, a forward may leave more than its results
    more = torch.is_autocast_enabled() or any(leaf.requires_grad for leaf in described if isinstance(leaf, _Tensor))
    if len(described) < len(leaves) or len(set(numbers)) < len(numbers) or (len(numbers) < len(left) and not more):
        return None
    return _Outcome(tuple(described), structure, tuple(left), len(events))


def _described(leaf: Any, trace: CardTrace, number: dict[int, int]) -> _Tensor | _Plain | None:
    """A result as something that can be made again; None where it cannot."""
    if type(leaf) is not FakeTensor:
        return _Plain(leaf) if isinstance(leaf, PLAIN) else None
    index = trace.index_of(leaf)
    if index is None or index not in number or (leaf.requires_grad and leaf.is_leaf):
        return None
    shape, stride = tuple(leaf.shape), leaf.stride()
    return _Tensor(number[index], shape, stride, int(leaf.storage_offset()), leaf.dtype, leaf.requires_grad)


def _has_hooks(module: nn.Module, grad: bool) -> bool:
    if any(getattr(module, name) for name in _HOOKS):
        return True
    return grad and any(
        parameter is not None and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
        for parameter in module._parameters.values()
    )
