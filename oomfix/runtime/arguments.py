"""Wrong arguments of the manager's methods, refused with the argument, the value, and what was expected."""

from collections.abc import Mapping
from typing import Any

import torch


def check_forward(forward: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: `forward` is not a function.
    """
    if callable(forward):
        return
    hint = "; memory.backward(loss) takes a loss" if isinstance(forward, torch.Tensor) else ""
    raise TypeError(f"forward: got {shown(forward)}, expected a function that returns the loss{hint}")


def check_loss(loss: Any, options: Mapping[str, Any]) -> None:
    """Refuse what has no backward.

    Args:
        loss: what to run backward from.
        options: those of `Tensor.backward`.

    Raises:
        TypeError: `loss` is not a tensor.
        ValueError: it has more than one number, or no graph.
    """
    if not isinstance(loss, torch.Tensor):
        hint = "; a loss made with .item() or float() has no graph" if isinstance(loss, int | float) else ""
        raise TypeError(f"loss: got {shown(loss)}, expected a tensor with one number{hint}")
    if loss.numel() != 1 and options.get("gradient") is None:
        raise ValueError(f"loss: got {shown(loss)}, expected one number: take its mean or sum, or pass gradient=")
    if not loss.requires_grad:
        raise ValueError(
            "loss: got a tensor without a graph (requires_grad is False); was it detached, or computed under no_grad?"
        )


def check_autocast(device_type: Any, dtype: Any) -> None:
    """Refuse what autocast has no rules for.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: there is no such type of device.
    """
    expected = "expected the type of a device, as 'cuda' or 'cpu'"
    if not isinstance(device_type, str):
        raise TypeError(f"device_type: got {device_type!r}, {expected}")
    try:
        known = torch.device(device_type).type
    except RuntimeError:
        known = ""
    if device_type != known:
        raise ValueError(f"device_type: got {device_type!r}, {expected}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: got {dtype!r}, expected a torch.dtype, or None")


def shown(value: Any) -> str:
    """`value` in a message: itself where that is short, else what it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.dim() else "a tensor"
    return repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__


def without_graph() -> ValueError:
    """The error for the loss of a forward that no backward can begin at."""
    return ValueError(
        "forward: returned a loss without a graph (requires_grad is False); was it detached, made of numbers, "
        "computed under no_grad, or returned by a forward_backward inside of the forward? A backward() inside of "
        "it is to be left to forward_backward"
    )


def has_hooks() -> RuntimeError:
    """The error for gradients that are computed ahead, and would pass a hook then and in their backward once more."""
    return RuntimeError(
        "memory.loss: its loss reaches a tensor with a hook, which would see each gradient twice; call the forward "
        "itself, whose backward passes it once"
    )


def check_is_first_backward(error: BaseException) -> None:
    """Refuse the loss of a forward whose graph a backward has passed already, which is what `error` says.

    Raises:
        ValueError: one has.
    """
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error):
        raise ValueError(
            "forward: a backward has passed the graph of the loss that it returned. Leave backward() to "
            "forward_backward, which runs it on the loss that the forward returns"
        ) from error
