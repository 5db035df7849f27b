"""Attention without its probabilities: the same as written out, in less memory, whatever torch has kernels for."""

import math

import pytest
import torch
from torch.nn import functional

from oomfix import runtime
from oomfix.profile.cards import find_card
from oomfix.profile.simulated_gpu import SimulatedGPU
from oomfix.runtime import compat


def written_out(query, key, value, mask=None, causal=False, scale=None):
    products = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        products = products.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else products + mask
    return products.softmax(-1) @ value


def inputs(*shape, keys=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    *lead, queries, features = shape
    sizes = [(*lead, queries, features), (*lead, keys, features), (*lead, keys, 6)]
    return [torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]


def gradients(function, tensors, **options):
    result = function(*tensors, **options)
    torch.manual_seed(1)
    trained = [*tensors, *(m for m in options.values() if isinstance(m, torch.Tensor) and m.requires_grad)]
    return [result, *torch.autograd.grad((result * torch.randn_like(result)).sum(), trained)]


MASKS = {
    "none": None,
    "boolean": torch.arange(7)[:, None] + 2 >= torch.arange(9),
    "of keys": torch.arange(9) < 6,
    "one row": (torch.arange(9) < 6)[None],
    "trained": torch.linspace(-1, 1, 63, dtype=torch.float64).view(7, 9).requires_grad_(),
    "of heads": torch.linspace(-1, 1, 2 * 63, dtype=torch.float64).view(1, 2, 7, 9),
}


@pytest.mark.parametrize("rows", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_attention_written_out(mask, rows):
    tensors = inputs(3, 2, 7, 4)
    expected = gradients(written_out, tensors, mask=MASKS[mask])
    found = gradients(lambda *t, mask: runtime.attention(*t, mask, rows=rows), tensors, mask=MASKS[mask])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize(("keys", "scale"), [(7, None), (9, 0.3), (4, None)])
def test_a_query_sees_no_key_behind_it(keys, scale, rows):
    tensors = inputs(2, 7, 4, keys=keys)
    expected = gradients(written_out, tensors, causal=True, scale=scale)
    found = gradients(runtime.attention, tensors, causal=True, scale=scale, rows=rows)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def kept_bytes(function, *tensors, **options):
    """What a forward keeps for backward, storages of the inputs left out."""
    kept = {}
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def keep(tensor):
        if (address := tensor.untyped_storage().data_ptr()) not in given:
            kept[address] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*tensors, **options)
    del result
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_probabilities_are_kept(dtype):
    tensors = inputs(2, 2, 256, 8, keys=256, dtype=dtype)
    probabilities = 2 * 2 * 256 * 256 * dtype.itemsize
    # a bias that is trained has no kernel, on any device
    bias = torch.zeros(256, 256, dtype=dtype, requires_grad=True)
    assert kept_bytes(written_out, *tensors, mask=bias) >= probabilities
    assert kept_bytes(functional.scaled_dot_product_attention, *tensors, attn_mask=bias) >= probabilities
    assert kept_bytes(lambda *t: runtime.attention(*t, rows=64), *tensors) < probabilities / 16


@pytest.mark.parametrize("shape", [(2, 2, 16, 8), (4, 16, 8), (16, 8)])
def test_kernels_are_used_where_torch_has_them_for_fewer_dimensions_too(shape, monkeypatch):
    tensors = inputs(*shape, keys=16, dtype=torch.float32)
    seen = []
    fused = compat.attention_is_fused
    monkeypatch.setattr(compat, "attention_is_fused", lambda *a: seen.append(fused(*a)) or seen[-1])
    # value and query have the same features: what the kernel of the CPU wants
    found = runtime.attention(tensors[0], tensors[1], tensors[0])
    assert seen == [True]
    assert found.shape == shape
    torch.testing.assert_close(found, written_out(tensors[0], tensors[1], tensors[0]), rtol=1e-5, atol=1e-6)


def test_dropout_is_drawn_again_in_backward():
    query, key, value = inputs(2, 2, 64, 8, keys=64)
    torch.manual_seed(3)
    found = runtime.attention(query, key, value, dropout=0.5, rows=16)
    gradient = torch.autograd.grad(found.sum(), value)[0]
    # linear in the values: the gradient holds the dropped probabilities that the result was made with
    torch.testing.assert_close((gradient.detach() * value).sum(), found.sum(), rtol=1e-12, atol=0)
    whole = written_out(query, key, value)
    assert float(((found - whole).norm() / whole.norm()).detach()) > 0.5


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("shape", [(0, 2, 6, 4), (3, 2, 0, 4)], ids=["samples", "queries"])
def test_what_is_empty_stays_empty(shape, rows):
    query, key = torch.randn(shape, requires_grad=True), torch.randn(*shape[:2], 6, 4)
    found = runtime.attention(query, key, key, rows=rows)
    assert found.shape == query.shape
    found.sum().backward()
    assert query.grad.shape == query.shape


def test_blocks_compile_where_nothing_asks_for_gradients():
    query = torch.randn(2, 3, 8, 4)
    compiled = torch.compile(lambda query: runtime.attention(query, query, query, rows=3), backend="aot_eager")
    assert torch.allclose(compiled(query), runtime.attention(query, query, query))


@pytest.mark.parametrize(("card", "fits"), [("a100-80gb", True), ("t4", False)])
def test_a_card_without_a_kernel_gets_blocks(card, fits):
    """bf16 has a memory-efficient kernel from Ampere on."""
    with SimulatedGPU(find_card(card)).running() as trace:
        tensors = [torch.randn(8, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)] * 3
        before = trace.allocator.allocated_bytes
        runtime.attention(*tensors)
        kept = trace.allocator.peak_allocated_bytes - before
        assert compat.attention_is_fused(*tensors, None, 0.0, False, None) == fits
    # in bf16 all probabilities are 512 MiB
    assert kept < 400 * 2**20


def test_mistakes_are_named():
    query, key, value = inputs(2, 7, 4)
    for arguments, options, said in (
        ((query, key[..., :3], value), {}, "key: got 3 features, expected 4"),
        ((query, key, value[:, :5]), {}, "value: got 5 tokens, expected 9"),
        ((query[0, 0], key, value), {}, "query: got (4,)"),
        ((query.long(), key, value), {}, "query: got (2, 7, 4) of torch.int64"),
        ((query, key, value, MASKS["boolean"]), {"causal": True}, "mask: got one together with causal=True"),
        ((query, key, value, torch.zeros(5, 9)), {"rows": 4}, "mask: got (5, 9), expected one to be broadcast to"),
        ((query, key, value, torch.zeros(14, 9)), {"rows": 4}, "mask: got (14, 9)"),
        ((query, key, value, torch.zeros(7, 8)), {}, "broadcast to [..., 7, 9]"),
        ((query, key, value), {"dropout": 1.0}, "dropout: got 1.0"),
        ((query, key, value), {"rows": 0}, "rows: got 0"),
        ((query, key, value), {"rows": 2.5}, "rows: got 2.5"),
        ((query, key, value), {"rows": True}, "rows: got True"),
    ):
        with pytest.raises(ValueError, match=r".*") as error:
            runtime.attention(*arguments, **options)
        assert said in str(error.value)
