"""CUDA's autocast rules on CPU tensors: which operations run in 16 bits, which in fp32, which are refused.

CPU autocast has lists of its own. Fake tensors are CPU tensors, so while these rules are installed, autocast on the
CPU follows CUDA's lists.

Source: the lists in aten/src/ATen/autocast_mode.h and docs/source/amp.rst, "CUDA Ops".
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomfix.profile import compat

aten = torch.ops.aten
_KEY = "AutocastCPU"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)

_IN_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d""".split()

_RESULT_IN_FP32 = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm sum sum.dim_IntList""".split()

_IN_SIXTEEN_BIT = "prelu mv addmv addr chain_matmul linalg_multi_dot".split()

# in CPU's lists and not in CUDA's
_UNTOUCHED = "cross_entropy_loss avg_pool3d grid_sampler polar quantile nanquantile stft trace view_as_complex".split()


def install(library: torch.library.Library) -> None:
    """Put CUDA's rules in the place of the CPU's, until `library` is destroyed."""
    with warnings.catch_warnings():
        # torch warns that kernels are replaced, which is the purpose
        warnings.simplefilter("ignore")
        for names, rule in ((_IN_FP32, _fp32), (_RESULT_IN_FP32, _fp32_result), (_IN_SIXTEEN_BIT, _sixteen_bit)):
            for name in names:
                if (operation := compat.operation(name)) is not None:
                    kernel = rule(operation) if compat.has_autocast_of_cuda(name) else torch.library.fallthrough_kernel
                    compat.replace_kernel(library, name, kernel, _KEY)
        for name in _UNTOUCHED:
            if compat.operation(name) is not None:
                compat.replace_kernel(library, name, torch.library.fallthrough_kernel, _KEY)
        compat.replace_kernel(library, "binary_cross_entropy", _refused, _KEY)


def _fp32(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            args, kwargs = tree_map_only(torch.Tensor, _to_fp32, (args, kwargs))
            return operation(*args, **kwargs)

    return run


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _SIXTEEN_BIT else tensor


def _sixteen_bit(operation: Any) -> Callable[..., Any]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(compat.autocast_dtype("cpu")) if tensor.dtype is torch.float32 else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run


def _fp32_result(operation: Any) -> Callable[..., Any]:
    """The input stays as it is, the result is asked for in fp32; of a norm, both are fp32."""
    names = [argument.name for argument in operation._schema.arguments]
    position = names.index("dtype")
    # softmax has a kernel that reads fp16 and writes fp32; what is not fp16 is converted first
    fused = {aten.softmax.int: aten._softmax, aten.log_softmax.int: aten._log_softmax}.get(operation)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype", args[position] if position < len(args) else None)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if given is not None or args[0].dtype not in _SIXTEEN_BIT:
                return operation(*args, **kwargs)
            if fused is not None and args[0].dtype is torch.float16:
                return fused(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
            return operation(*args[:position], **{**kwargs, "dtype": torch.float32})

    return run


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are refused under CUDA autocast: their "
        "gradient does not fit into 16 bits. Use binary_cross_entropy_with_logits, or leave autocast before the loss."
    )
