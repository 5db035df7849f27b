"""Which attention kernel a card runs, and what that kernel allocates.

torch chooses at run time: flash attention for 16-bit numbers on capability 8.0 and later, without a mask;
memory-efficient attention for fp16 and fp32 everywhere and for bf16 from 8.0 on, with or without a mask; else plain
matrix products, which hold the whole [tokens, tokens] matrix.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (check_* functions), attention.cpp (padding, masks).
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from oomfix.profile.compat import grouped_heads

aten = torch.ops.aten
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_MOST_FLASH_HEAD = 256


def attention_for(capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """An implementation of `scaled_dot_product_attention` that allocates what a card of `capability` would."""
    choose = choice_for(capability)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = choose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if kernel == SDPBackend.FLASH_ATTENTION.value:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == SDPBackend.EFFICIENT_ATTENTION.value:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        result: torch.Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **grouped_heads(enable_gqa)
        )[0]
        return result

    return attention


def choice_for(capability: tuple[int, int]) -> Callable[..., int]:
    """An implementation of `_fused_sdp_choice`: the number of the kernel that a card of `capability` would run."""

    def choice(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        if _may_flash(query, key, value, attn_mask, capability):
            return SDPBackend.FLASH_ATTENTION.value
        if _may_be_efficient(query, key, value, attn_mask, is_causal, enable_gqa, capability):
            return SDPBackend.EFFICIENT_ATTENTION.value
        return SDPBackend.MATH.value

    return choice


def _may_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, capability: tuple[int, int]
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and capability >= (8, 0)
        and query.dtype in _SIXTEEN_BIT
        and query.dtype == key.dtype == value.dtype
        and mask is None
        and query.dim() == 4
        and query.size(-1) == key.size(-1) == value.size(-1) <= _MOST_FLASH_HEAD
    )


def _may_be_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    capability: tuple[int, int],
) -> bool:
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if capability >= (8, 0):
        dtypes = (*dtypes, torch.bfloat16)
    # loads of 16 bytes from tensor cores' generations on
    aligned = 16 // query.element_size() if capability >= (7, 5) or query.element_size() == 2 else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dtype in dtypes
        and query.dtype == key.dtype == value.dtype
        and query.dim() == 4
        and query.size(-1) % aligned == 0
        and value.size(-1) % aligned == 0
        and not enable_gqa
        and not (mask is not None and (mask.requires_grad or is_causal))
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head_size = query.size(-1)
    padding = -head_size % 8
    scale = head_size**-0.5 if scale is None else scale
    if padding:
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
    heads = query.size(1)
    if key.size(1) != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.size(1), 1) for tensor in (key, value))
    result: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return result[..., :head_size] if padding else result


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None:
        mask = _additive(mask, query)
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    result: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_gradient, dropout, is_causal, scale=scale
    )[0]
    return result


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The mask as numbers to add, its rows padded to 16 elements, as the kernel wants them."""
    if mask.dtype is torch.bool:
        filled = torch.zeros_like(mask, dtype=query.dtype)
        mask = filled.masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.size(-1)
    if columns % 16:
        mask = F.pad(mask, (0, -columns % 16))[..., :columns]
    return mask
