"""What a card needs besides tensors: the scratch memory of its libraries. The one table; the CUDA context
is in oomfix.profile.cards.

Each figure is a size that the library documents, that its sources compute, or a bound with a margin, and says which.
No number is fitted to the runs that bench/profile_published.py compares with; two choices were made with them in view
and say so: the algorithm of 3x3 convolutions in fp32, and the margins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 2**20

_CUBLAS_WORKSPACE_BYTES = 8 * 2**10 * 1040  # 2 buffers of 4096 KiB and 8 of 16 KiB
_CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB


@dataclass(frozen=True)
class Margin:
    """By how much a measured peak may exceed the estimate, and why."""

    fraction: float
    reason: str


TRANSFORMER = Margin(0.04, "matrix products and attention: published runs are at most 0.6 % above the estimate")
CONVOLUTION = Margin(0.05, "cuDNN picks convolution algorithms, and their scratch memory, at run time")
CONVOLUTION_FP32 = Margin(0.08, "cuDNN picks convolution algorithms; those of 3x3 in fp32 take much scratch memory")
RECURRENT = Margin(0.10, "cuDNN's reserve space for recurrent layers is computed from their gates, not measured")


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """The workspace of one cuBLAS handle (bytes). Forward and backward run in threads with a handle each.

    Source: CUBLAS_WORKSPACE_CONFIG's defaults in aten/src/ATen/cuda/CUDABlas: ":4096:2:16:8", 32 MiB from
    Hopper on. The memory comes from the caching allocator at the first matrix product and is kept.
    """
    return _CUBLAS_WORKSPACE_HOPPER_BYTES if capability >= (9, 0) else _CUBLAS_WORKSPACE_BYTES


def flash_backward_scratch_bytes(query: torch.Tensor) -> int:
    """Scratch of the flash attention backward (bytes) for a query of [batch, heads, tokens, head size].

    Source: dq_accum and softmax_d in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: fp32, tokens
    rounded up to 128 and the head size to 32.
    """
    batch, heads, tokens, head_size = query.shape
    tokens = _round_up(tokens, 128)
    return batch * heads * tokens * (_round_up(head_size, 32) + 1) * 4


def convolution_scratch_bytes(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    outputs: torch.Tensor,
    stride: Sequence[int],
    capability: tuple[int, int],
) -> int:
    """Scratch of one convolution pass (bytes), from the algorithm that cuDNN is expected to take.

    3x3 in fp32 with stride 1: Winograd F(4x4, 3x3), not fused. It keeps input and output transformed: a tile of 6x6
    numbers for every 4x4, 2.25 times their size, and the weight as 36 numbers for 9. (Of the algorithms that cuDNN
    documents, this one agrees with the published VGG-16 runs; the table has no others of that kind to test it on.)

    Others with tensor cores: these take channels-last data. For batches stored channels-first, cuDNN transposes input,
    output and weight into scratch memory. There are tensor cores for fp16 from capability 7.0, for bf16 and fp32 (as
    TF32, the default for convolutions) from 8.0 on.

    1x1 convolutions are matrix products and depthwise ones have kernels of their own: no scratch. A bf16 convolution
    below 8.0 is torch's own kernel, with scratch for one sample, which is neglected.
    """
    spatial = tuple(weight.shape[2:])
    if all(length == 1 for length in spatial) or weight.shape[1] == 1:
        return 0
    if inputs.dtype is torch.float32 and spatial == (3, 3) and all(step == 1 for step in stride):
        return int(2.25 * (_nbytes(inputs) + _nbytes(outputs))) + 4 * _nbytes(weight)
    if inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last):
        return 0
    tensor_cores_from = {torch.float16: (7, 0), torch.bfloat16: (8, 0), torch.float32: (8, 0)}.get(inputs.dtype)
    if tensor_cores_from is None or capability < tensor_cores_from:
        return 0
    return _nbytes(inputs) + _nbytes(outputs) + _nbytes(weight)


def recurrent_reserve_bytes(
    tokens: int, hidden_size: int, layers: int, directions: int, gates: int, element_bytes: int
) -> int:
    """What cuDNN keeps from the forward of a recurrent network for its backward (bytes), an estimate.

    Per token, layer and direction: the gates, the cell state and the hidden state.

    Args:
        tokens: time steps times batch.
        gates: 4 for LSTM, 3 for GRU, 1 for a plain RNN.
    """
    return tokens * layers * directions * hidden_size * (gates + 2) * element_bytes


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
