"""What a simulated card answers where the result of an operation depends on data, which it has not.

Masks select everything and elements differ, which takes the most memory; comparisons of whole tensors hold. Small
tensors that came from the host (the lengths of sequences) remember their values.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oomfix.profile.boundary import CardTrace

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)
_MOST_BROUGHT_ELEMENTS = 2**16


def bring_along(here: torch.Tensor, there: torch.Tensor) -> None:
    """Let a small tensor of the card remember the values that it had on the host, such as the lengths of sequences."""
    if here.numel() <= _MOST_BROUGHT_ELEMENTS and not here.requires_grad and not there.is_inference():
        there._oomfix_brought = here.detach().to(there.dtype, copy=True), there._version  # type: ignore[attr-defined]


def brought_along(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values that a tensor of the card has from the host; None where it has none, or was written since."""
    values, version = getattr(tensor, "_oomfix_brought", (None, 0))
    return values if values is not None and tensor._version == version else None


def _scalar(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.constant is not None:
        return tensor.constant.item()
    if (brought := brought_along(tensor)) is not None:
        trace.values_read += 1
        return brought.item()
    if tensor.dtype is torch.bool:
        answer = getattr(tensor, "_oomfix_all", False)
        trace.assume(f"a condition on data of the card is {answer}")
        return answer
    trace.assume("a number read from the card is 1")
    return 1.0 if tensor.is_floating_point() else 1


def _all(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    # checks of the form "all values are valid" hold
    result._oomfix_all = True
    return result


def _equal(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    trace.assume("tensors that are compared are equal")
    return True


def _masked_index(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype in _MASKS:
            trace.assume("a boolean mask selects every element (the most it can)")
            length = index.numel()
            indices += [index.new_empty((length,), dtype=torch.int64) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(args[0], indices, *args[2:], **kwargs)


def _nonzero(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace.assume("every element is nonzero (the most there can be)")
    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)


def _masked_select(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace.assume("a boolean mask selects every element (the most it can)")
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return args[0].new_empty((shape.numel(),))


def _unique(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace.assume("torch.unique finds every element different (the most it can)")
    flat = args[0].new_empty((args[0].numel(),))
    return flat, torch.empty_like(args[0], dtype=torch.int64), torch.empty_like(flat, dtype=torch.int64)


def _bincount(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    trace.assume("torch.bincount counts up to as many numbers as its minlength, or as there are elements")
    weights = args[1] if len(args) > 1 else None
    dtype = torch.int64 if weights is None else weights.dtype
    return args[0].new_empty((least or args[0].numel(),), dtype=dtype)


def _pack(trace: "CardTrace", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # the lengths are on the host, where torch wants them: nothing has to be assumed
    padded, lengths = args[:2]
    longest = int(lengths.max())
    batch_sizes = (lengths.unsqueeze(0) > torch.arange(longest).unsqueeze(1)).sum(dim=1)
    return padded.new_empty((int(lengths.sum()), *padded.shape[2:])), batch_sizes


ANSWERS: dict[Any, Callable[["CardTrace", Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    # a dispatch mode of the script's own that reads a number arrives with the composite operation
    aten.item.default: _scalar,
    aten.all.default: _all,
    aten._is_all_true.default: _all,
    aten.equal.default: _equal,
    aten.allclose.default: _equal,
    aten.index.Tensor: _masked_index,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten._pack_padded_sequence.default: _pack,
}
