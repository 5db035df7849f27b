"""Which operation needs how much library scratch memory on a card of a given capability."""

from collections.abc import Sequence
from typing import Any

import torch

from oomfix.profile import overheads

aten = torch.ops.aten

_MATRIX_PRODUCTS = frozenset({
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addbmm.default,
    aten.mv.default, aten.addmv.default, aten.dot.default,
})  # fmt: skip


class Workspaces:
    """Scratch memory of cuBLAS, cuDNN and flash attention; `kinds` collects which sorts of layers were seen.

    `kept_bytes` and `scratch_bytes` fit the arguments `keeps` and `scratch` of `MemoryTrace`.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.kinds: set[str] = set()
        self._handles: set[bool] = set()

    def kept_bytes(self, operation: Any, in_backward: bool) -> int:
        """The cuBLAS workspace, at the first matrix product of a thread: autograd's backward has its own."""
        if operation not in _MATRIX_PRODUCTS or in_backward in self._handles:
            return 0
        self._handles.add(in_backward)
        return overheads.cublas_workspace_bytes(self.capability)

    def scratch_bytes(self, operation: Any, arguments: tuple[Any, ...], result: Any) -> int:
        """What an operation needs only while it runs (bytes)."""
        if operation is aten.convolution.default:
            return self._convolution(arguments[0], arguments[1], result, arguments[3])
        if operation is aten.convolution_backward.default:
            gradient, inputs, weight = arguments[:3]
            return self._convolution(inputs, weight, gradient, arguments[4])
        if operation is aten._scaled_dot_product_flash_attention_backward.default:
            return overheads.flash_backward_scratch_bytes(arguments[1])
        return 0

    def _convolution(
        self, inputs: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, stride: Sequence[int]
    ) -> int:
        pointwise = all(length == 1 for length in weight.shape[2:])
        self.kinds.add("convolution" if pointwise or inputs.dtype is not torch.float32 else "convolution fp32")
        return overheads.convolution_scratch_bytes(inputs, weight, outputs, stride, self.capability)

    def margin(self) -> overheads.Margin:
        """The largest margin among the kinds of layers seen."""
        by_kind = {
            "recurrent": overheads.RECURRENT,
            "convolution fp32": overheads.CONVOLUTION_FP32,
            "convolution": overheads.CONVOLUTION,
        }
        for kind, margin in by_kind.items():
            if kind in self.kinds:
                return margin
        return overheads.TRANSFORMER
