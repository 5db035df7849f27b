"""Calls of torch that draw random numbers, seen while a forward runs, and made again at another size.

Seen are the calls whose numbers do not depend on values: `randn`, `rand`, `randint`, `normal`, their `_like` forms,
tensors filled in place (`normal_`, `uniform_`, `exponential_`, ...), `gumbel_softmax` and `randperm`. Dropout is not:
its masks are as large as activations. Nor are `multinomial` and `bernoulli` of a tensor, which depend on values.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomfix.runtime import compat

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drawing:
    """One call that draws.

    Attributes:
        name: of the function.
        shape: of what is drawn.
        dtype: of it.
        settings: what else it was called with: calls with equal names and settings draw from one distribution.
        as_asked: makes the call.
        at: draws a tensor of another shape.
        given: what the call returns, made of numbers of its shape that were drawn already; these stay as they are.
        resizes: drawing at another shape draws from the same distribution.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    settings: Hashable
    as_asked: Callable[[], Any]
    at: Callable[[Shape], torch.Tensor]
    given: Callable[[torch.Tensor], Any]
    resizes: bool = True


class DrawingCalls(TorchFunctionMode, ABC):
    """Context that hands the drawing calls inside of it to `drawn`, but for those that must be left to torch."""

    @abstractmethod
    def drawn(self, drawing: Drawing) -> Any:
        """What the call returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READERS.get(func)
        if (read is None and func is not F.gumbel_softmax) or _is_left_to_torch():
            return func(*args, **kwargs)
        if read is None:
            with _InsideOfFunction(self):
                return func(*args, **kwargs)
        drawing = read(func, args, kwargs)
        return func(*args, **kwargs) if drawing is None else self.drawn(drawing)


class _InsideOfFunction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on what is drawn inside of a function of torch, where a mode for functions sees nothing."""

    def __init__(self, calls: DrawingCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes seconds, only to keep it away from this method
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawing = _in_place(func, args, kwargs) if func is torch.ops.aten.exponential_.default else None
        return func(*args, **kwargs) if drawing is None else self._calls.drawn(drawing)


def _is_left_to_torch() -> bool:
    """Whether a draw made now has to come from the generator.

    A compiler records it; `vmap` draws for many at once; and a checkpointed block draws again in backward, from the
    state that the generator had, as do functions that compute again by themselves.
    """
    if torch.compiler.is_compiling() or compat.is_inside_transform() or compat.is_inside_checkpoint():
        return True
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _RUN_AGAIN:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# where forward and backward of torch.autograd.Function are called
_RUN_AGAIN = torch.autograd.function.__file__
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Generator)


def _sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """A call that is given a size, as `torch.randn(2, 3)`."""
    others = _others(kwargs)
    if "size" in others:
        size, numbers = others.pop("size"), args
    elif args and isinstance(args[-1], list | tuple):
        size, numbers = args[-1], args[:-1]
    else:
        size, numbers = args, ()
    trained = others.pop("requires_grad", False)
    if not all(type(length) is int for length in size) or not _is_plain(numbers, others):
        return None
    usual = torch.int64 if func is torch.randint else torch.get_default_dtype()
    return Drawing(
        func.__name__,
        tuple(size),
        others.get("dtype", usual),
        (numbers, *others.items()),
        lambda: func(*args, **kwargs),
        lambda shape: func(*numbers, size=shape, **others),
        lambda values: values.clone().requires_grad_(trained),
    )


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """A call that is given a tensor to be like, as `torch.randn_like(x)`."""
    others = _others(kwargs)
    model, numbers = (args[0], args[1:]) if args else (others.pop("input", None), ())
    trained = others.pop("requires_grad", False)
    if not _is_dense(model) or not _is_plain(numbers, others):
        return None
    if func is torch.bernoulli and not numbers and "p" not in others:
        return None  # `model` holds the probabilities
    order = _order(torch.empty_like(model, device="meta"))
    return Drawing(
        func.__name__,
        tuple(model.shape),
        others.get("dtype", model.dtype),
        (numbers, order, model.dtype, model.device, *others.items()),
        lambda: func(*args, **kwargs),
        lambda shape: func(_empty(shape, order, model), *numbers, **others),
        lambda values: values.clone().requires_grad_(trained),
    )


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """A call that fills a tensor, as `x.normal_()`."""
    tensor, numbers, others = args[0], args[1:], _others(kwargs)
    if not _is_dense(tensor) or not _is_plain(numbers, others):
        return None
    order = _order(tensor)
    return Drawing(
        func.__name__,
        tuple(tensor.shape),
        tensor.dtype,
        (numbers, order, tensor.dtype, tensor.device, *others.items()),
        lambda: func(*args, **kwargs),
        lambda shape: func(_empty(shape, order, tensor), *numbers, **others),
        tensor.copy_,
    )


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """`torch.normal`: with a size, or with a mean or a deviation for each number."""
    others = _others(kwargs)
    mean = args[0] if args else others.pop("mean", None)
    deviation = args[1] if len(args) > 1 else others.pop("std", 1.0)
    given = [value for value in (mean, deviation) if isinstance(value, torch.Tensor)]
    if not given:
        return _sized(func, args, kwargs)
    first = given[0]
    if not all(map(_is_dense, given)) or not _is_plain((), others):
        return None
    if torch.is_grad_enabled() and any(value.requires_grad for value in given):
        return None  # torch would return a graph, whose gradients are 0
    if len({(value.dtype, value.device) for value in given}) > 1 or others.keys() - {"generator"}:
        return None
    scale = 1.0 if isinstance(deviation, torch.Tensor) else deviation

    def given_mean_and_deviation(values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = values * deviation if isinstance(deviation, torch.Tensor) else values
        return scaled + mean  # type: ignore[no-any-return]

    return Drawing(
        "normal of tensors",
        tuple(torch.broadcast_shapes(*(value.shape for value in given))),  # type: ignore[no-untyped-call]
        first.dtype,
        (scale, first.dtype, first.device, *others.items()),
        lambda: func(*args, **kwargs),
        lambda shape: first.new_empty(shape).normal_(0.0, scale, **others),
        given_mean_and_deviation,
    )


def _permutation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """`torch.randperm(n)`."""
    others = _others(kwargs)
    trained = others.pop("requires_grad", False)
    if len(args) != 1 or type(args[0]) is not int or not _is_plain((), others):
        return None
    return Drawing(
        func.__name__,
        (args[0],),
        others.get("dtype", torch.int64),
        tuple(others.items()),
        lambda: func(*args, **kwargs),
        lambda shape: func(*shape, **others),
        lambda values: values.clone().requires_grad_(trained),
        resizes=False,
    )


def _others(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Named arguments, without those that say what is usual."""
    usual = (None, False, torch.strided, torch.preserve_format)
    return {name: value for name, value in kwargs.items() if not any(value is one for one in usual)}


def _is_plain(numbers: tuple[Any, ...], others: dict[str, Any]) -> bool:
    """Whether a call can be made again with the same arguments, and means the same then."""
    elsewhere = ("out", "pin_memory", "layout", "memory_format", "names")
    is_usual = not any(name in others for name in elsewhere)
    return is_usual and all(value is None or isinstance(value, _PLAIN) for value in (*numbers, *others.values()))


def _is_dense(value: Any) -> bool:
    """Whether `value` is a tensor of torch's own, with strides: others say themselves what a call means."""
    own = type(value) is torch.Tensor or type(value) is torch.nn.Parameter
    return own and value.layout is torch.strided and not value.is_nested


def _order(tensor: torch.Tensor) -> Shape:
    """The dimensions of `tensor` as they lie in memory, from the farthest apart to the nearest."""
    # a dimension of one entry that has the stride of another lies inside of that one
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim] > 1), reverse=True))


def _empty(shape: Shape, order: Shape, model: torch.Tensor) -> torch.Tensor:
    """A tensor of `shape` with the dtype and the device of `model`, whose dimensions lie in `order`."""
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.empty([shape[dim] for dim in order], dtype=model.dtype, device=model.device).permute(places)


_FILLS = ("normal_", "uniform_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "bernoulli_")
_READERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Drawing | None]] = {
    **dict.fromkeys((torch.rand, torch.randn, torch.randint), _sized),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli), _like),
    **{getattr(torch.Tensor, name): _in_place for name in _FILLS},
    torch.normal: _normal,
    torch.randperm: _permutation,
}
