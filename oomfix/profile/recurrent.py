"""LSTM, GRU and plain RNN as cuDNN runs them: the whole sequence in one call, with one reserve space.

On the CPU torch unrolls a recurrent layer into one matrix product per time step; a card keeps the output and an
opaque reserve for the backward instead. Only sizes are simulated: results are empty tensors of the right shape.

Source: aten/src/ATen/native/cudnn/RNN.cpp for what is allocated; the size of the reserve is computed
(`overheads.recurrent_reserve_bytes`), since cuDNN does not document it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from oomfix.profile import compat, overheads

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def install(library: torch.library.Library, seen: Callable[[], object]) -> None:
    """Replace the recurrent operations until `library` is destroyed; `seen` is called whenever one runs."""
    for name, gates in _GATES.items():
        compat.replace_kernel(library, f"{name}.input", _padded(gates, seen), "CompositeImplicitAutograd")
        compat.replace_kernel(library, f"{name}.data", _packed(gates, seen), "CompositeImplicitAutograd")


def _padded(gates: int, seen: Callable[[], object]) -> Callable[..., Any]:
    def run(
        inputs: torch.Tensor,
        hidden: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        seen()
        return _run(gates, inputs, hidden, weights, layers, train, bidirectional)

    return run


def _packed(gates: int, seen: Callable[[], object]) -> Callable[..., Any]:
    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hidden: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        seen()
        return _run(gates, data, hidden, weights, layers, train, bidirectional)

    return run


def _run(
    gates: int,
    inputs: torch.Tensor,
    hidden: Any,
    weights: Sequence[torch.Tensor],
    layers: int,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    states = (hidden,) if isinstance(hidden, torch.Tensor) else tuple(hidden)
    if compat.autocast_enabled("cpu"):
        # cuDNN gets one flat buffer of the weights in 16 bits
        dtype = compat.autocast_dtype("cpu")
        inputs, states = inputs.to(dtype), tuple(state.to(dtype) for state in states)
        weights = [weight.to(dtype) for weight in weights]
    directions = 2 if bidirectional else 1
    result: tuple[torch.Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]
        gates, layers, directions, len(states), inputs, *states, *weights
    )
    return result


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: int, layers: int, directions: int, n_states: int, inputs: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states, weights = rest[:n_states], rest[n_states:]
        width = states[0].shape[-1]
        hidden_size = weights[1].shape[-1]
        outputs = inputs.new_empty((*inputs.shape[:-1], width * directions))
        finals = [torch.empty_like(state) for state in states]
        tokens = inputs[..., 0].numel()
        nbytes = overheads.recurrent_reserve_bytes(
            tokens, hidden_size, layers, directions, gates, inputs.element_size()
        )
        reserve = inputs.new_empty((nbytes,), dtype=torch.uint8)
        ctx.n_states = n_states
        ctx.save_for_backward(inputs, outputs, reserve, *rest)
        return (outputs, *finals)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, _, _, *rest = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        tensors = (inputs, *rest)
        results = [
            torch.empty_like(tensor) if index <= ctx.n_states and wanted[index] else None
            for index, tensor in enumerate(tensors)
        ]
        weights = rest[ctx.n_states :]
        # one flat buffer of which the gradients of the weights are pieces
        flat = inputs.new_empty((sum(weight.numel() for weight in weights),))
        pieces = flat.split([weight.numel() for weight in weights])
        start = 1 + ctx.n_states
        for offset, (weight, piece) in enumerate(zip(weights, pieces, strict=True)):
            results[start + offset] = piece.view(weight.shape) if wanted[start + offset] else None
        return (None, None, None, None, *results)
