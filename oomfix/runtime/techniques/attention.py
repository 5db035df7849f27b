"""Attention that never keeps its probabilities, whichever kernels there are."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from oomfix.runtime import compat

_BLOCK_BYTES = 64 * 2**20


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """`dropout(softmax(query @ key.mT * scale + mask)) @ value`, in memory that does not grow with queries x keys.

    Written out, attention keeps its probabilities for backward, several times. This runs torch's
    `scaled_dot_product_attention` where that has a kernel which does not keep them, and else (float64, masks that are
    trained, such as a relative position bias, bf16 on cards before Ampere) some queries at a time, computed again in
    backward: a third more arithmetic here.

    Args:
        query: [..., queries, features]; tensors of fewer than four dimensions get a kernel too.
        key: [..., keys, features].
        value: [..., keys, features of its own].
        mask: broadcast to [..., queries, keys]; boolean (True takes part) or added to the products.
        causal: query i sees the keys 0 to i. Not together with `mask`.
        dropout: probability at which a probability is dropped, 0 in evaluation: `self.p if self.training else 0.0`.
        scale: None: 1 / sqrt(features).
        rows: always run so many queries at a time; None: where no kernel does it, as many as are 64 MiB in fp32.

    Returns:
        [..., queries, features of value], in the type of `query` (under autocast in its type).

    Raises:
        ValueError: shapes or numbers that do not go together.

    Values and gradients differ from those of attention written out by rounding; with dropout other numbers are drawn.

    GPT-2 124M with 16 x 1024 tokens under bf16 peaks at 23.04 GiB instead of 38.79 with attention written out
    (simulated A100), with the kernel and in blocks; on a CPU a smaller version takes 1.27 and 1.17 times as long
    (bench/results/techniques-cpu.md).

    Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory", for the blocks.
    """
    _check(query, key, value, mask, causal, dropout, rows)
    if mask is not None:
        mask = torch.atleast_2d(mask)  # type: ignore[no-untyped-call]
    if rows is None:
        # kernels want [samples, heads, tokens, features]
        missing = (1,) * max(4 - query.dim(), 0)
        of_four = (query.view(missing + query.shape), key.view(missing + key.shape), value.view(missing + value.shape))
        if compat.attention_is_fused(*of_four, mask, dropout, causal, scale):
            found = functional.scaled_dot_product_attention(*of_four, mask, dropout, causal, scale=scale)
            return found.view(found.shape[len(missing) :])
        rows = _rows_for(query, key)
    attend: Callable[..., torch.Tensor] = functools.partial(functional.scaled_dot_product_attention, scale=scale)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, mask)):
        attend = functools.partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=dropout > 0)
    blocks = []
    for start in range(0, max(query.shape[-2], 1), rows):
        stop = min(start + rows, query.shape[-2])
        seen = min(stop, key.shape[-2]) if causal else key.shape[-2]
        allowed = _causal_mask(start, stop, seen, query.device) if causal else _mask_rows(mask, start, stop)
        blocks.append(attend(query[..., start:stop, :], key[..., :seen, :], value[..., :seen, :], allowed, dropout))
    return torch.cat(blocks, dim=-2)


def _rows_for(query: torch.Tensor, key: torch.Tensor) -> int:
    bytes_per_query = 4 * key.shape[-2] * max(query.shape[:-2].numel(), 1)
    return max(1, _BLOCK_BYTES // max(bytes_per_query, 1))


def _mask_rows(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]


def _causal_mask(start: int, stop: int, keys: int, device: torch.device) -> torch.Tensor:
    queries = torch.arange(start, stop, device=device)
    return queries[:, None] >= torch.arange(keys, device=device)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    rows: int | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2 or not tensor.is_floating_point():
            raise ValueError(f"{name}: got {tuple(tensor.shape)} of {tensor.dtype}, expected floats [..., tokens, n]")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got {key.shape[-1]} features, expected {query.shape[-1]}, as many as query has")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: got {value.shape[-2]} tokens, expected {key.shape[-2]}, as many as key has")
    if mask is not None and causal:
        raise ValueError("mask: got one together with causal=True, expected one of them; write both into the mask")
    if mask is not None:
        tokens = (key.shape[-2], query.shape[-2])
        # a block would take what rows there are for its own
        if any(n not in (1, count) for n, count in zip(reversed(mask.shape), tokens, strict=False)):
            expected = f"one to be broadcast to [..., {tokens[1]}, {tokens[0]}]"
            raise ValueError(f"mask: got {tuple(mask.shape)}, expected {expected}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: got {dropout!r}, expected a probability from 0 to below 1")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows: got {rows!r}, expected a whole number above 0, or None")
