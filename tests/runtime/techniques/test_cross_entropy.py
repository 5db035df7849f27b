"""Chunked cross entropies: torch's values and gradients, without torch's copies."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard

KINDS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted}
    for reduction, smoothing, weighted in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True))
]


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=dtype, requires_grad=True)
    layer = nn.Linear(8, 13, dtype=dtype)
    target = torch.randint(0, 13, (23,))
    target[[2, 3, 11]] = -100
    return hidden, layer, target


def settings(kind, dtype):
    kind = dict(kind)
    weighted = kind.pop("weighted")
    return {**kind, "weight": torch.rand(13, dtype=dtype) + 0.5 if weighted else None}


def gradients(loss, *leaves):
    # a different factor for each loss, so that a wrong upstream gradient is seen
    if loss.dim():
        loss = (loss * torch.arange(1, loss.numel() + 1, dtype=loss.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def assert_close(first, second, tolerance):
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("rows", [1, 7, 23, None])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_from_logits_it_is_torchs_cross_entropy(kind, rows):
    hidden, layer, target = problem()
    options = settings(kind, torch.float64)
    logits = layer(hidden).detach().requires_grad_()
    expected = functional.cross_entropy(logits, target, **options)
    found = runtime.chunked_cross_entropy(logits, target, rows=rows, **options)
    assert found.shape == expected.shape
    before = logits.detach().clone()
    assert_close([found], [expected], 1e-14)
    assert_close(gradients(found, logits), gradients(expected, logits), 1e-13)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rows", [1, 7, 23, None])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_from_hidden_it_is_the_layer_and_torchs_cross_entropy(kind, rows):
    hidden, layer, target = problem()
    options = settings(kind, torch.float64)
    leaves = (hidden, layer.weight, layer.bias)
    expected = functional.cross_entropy(layer(hidden), target, **options)
    found = runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias, rows=rows, **options)
    assert found.shape == expected.shape
    assert_close([found], [expected], 1e-14)
    assert_close(gradients(found, *leaves), gradients(expected, *leaves), 1e-13)


def test_tokens_need_not_be_flattened():
    hidden, layer, target = problem()
    whole = runtime.linear_cross_entropy(hidden[:20], layer.weight, target[:20])
    folded = runtime.linear_cross_entropy(hidden[:20].view(4, 5, 8), layer.weight, target[:20].view(4, 5))
    each = runtime.chunked_cross_entropy(
        (hidden[:20] @ layer.weight.T).view(4, 5, 13), target[:20].view(4, 5), reduction="none"
    )
    assert torch.equal(folded, whole)
    assert each.shape == (4, 5)


def second_derivatives(loss, leaves):
    first = torch.autograd.grad(loss.sum(), leaves, create_graph=True)
    return torch.autograd.grad(loss.sum() + sum(gradient.square().sum() for gradient in first), leaves)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_that_are_differentiated_again_are_torchs(kind):
    """A gradient penalty, or an inner step that is learned through."""
    hidden, layer, target = problem()
    options, leaves = settings(kind, torch.float64), (hidden, layer.weight, layer.bias)
    expected = second_derivatives(functional.cross_entropy(layer(hidden), target, **options), leaves)
    chunked = runtime.chunked_cross_entropy(layer(hidden), target, rows=7, **options)
    assert_close(second_derivatives(chunked, leaves), expected, 1e-12)
    linear = runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias, rows=7, **options)
    assert_close(second_derivatives(linear, leaves), expected, 1e-12)


def test_a_frozen_head_is_differentiated_again_too():
    hidden, layer, target = problem()
    layer.requires_grad_(False)
    expected = second_derivatives(functional.cross_entropy(layer(hidden), target), [hidden])
    found = runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias, rows=7)
    assert_close(second_derivatives(found, [hidden]), expected, 1e-12)


def test_a_frozen_head_gets_no_gradient():
    hidden, layer, target = problem()
    layer.requires_grad_(False)
    runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias).backward()
    assert hidden.grad is not None and layer.weight.grad is None and layer.bias.grad is None


def test_all_targets_ignored_gives_nan_as_torch_does():
    hidden, layer, _ = problem()
    target = torch.full((23,), -100)
    assert runtime.linear_cross_entropy(hidden, layer.weight, target).isnan()
    assert runtime.linear_cross_entropy(hidden, layer.weight, target, reduction="sum") == 0


def test_half_logits_are_computed_in_fp32():
    torch.manual_seed(0)
    logits = (4 * torch.randn(64, 1000)).bfloat16().requires_grad_()
    target = torch.randint(0, 1000, (64,))
    expected = functional.cross_entropy(logits.float(), target)
    found = runtime.chunked_cross_entropy(logits, target, rows=5)
    assert found.dtype == torch.float32
    assert_close([found], [expected], 1e-6)
    assert_close(gradients(found, logits), gradients(expected, logits), 2**-8)


def test_autocast_decides_the_type_of_the_products():
    torch.manual_seed(0)
    hidden, layer = torch.randn(64, 32, requires_grad=True), nn.Linear(32, 100)
    target = torch.randint(0, 100, (64,))
    leaves = (hidden, layer.weight, layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.cross_entropy(layer(hidden).float(), target)
        found = runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias, rows=16)
    assert found.dtype == torch.float32
    assert_close([found], [expected], 1e-3)
    found_gradients = gradients(found, *leaves)
    assert [g.dtype for g in found_gradients] == [torch.float32] * 3
    assert_close(found_gradients, gradients(expected, *leaves), 2**-6)
    plain = runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias)
    assert not torch.equal(plain, found)


def peak_bytes(run):
    with SimulatedCard() as card:
        run().backward()
        return card.peak_bytes


def test_no_log_probabilities_are_kept():
    logits, target = torch.randn(512, 2048, requires_grad=True), torch.randint(0, 2048, (512,))
    one = 4 * 512 * 2048
    assert peak_bytes(lambda: functional.cross_entropy(logits, target)) >= 2 * one
    # the gradient, and two chunks of 16 rows
    assert peak_bytes(lambda: runtime.chunked_cross_entropy(logits, target, rows=16)) < 1.1 * one


def test_logits_never_exist_as_a_whole():
    hidden, layer = torch.randn(512, 16, requires_grad=True), nn.Linear(16, 2048)
    target = torch.randint(0, 2048, (512,))
    one = 4 * 512 * 2048
    assert peak_bytes(lambda: functional.cross_entropy(layer(hidden), target)) >= 2 * one

    def chunked():
        return runtime.linear_cross_entropy(hidden, layer.weight, target, linear_bias=layer.bias, rows=16)

    assert peak_bytes(chunked) < 0.3 * one


@pytest.mark.parametrize("loss", ["chunked", "linear"])
def test_split_by_the_manager_padded_gradients_are_those_of_the_batch(loss, relative_error):
    """Rows without a label weigh nothing: what the loss divides by is seen through its last operation."""
    torch.manual_seed(0)
    reference, model = (nn.Linear(6, 11, dtype=torch.float64) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    x, target = torch.randn(12, 5, 6, dtype=torch.float64), torch.randint(0, 11, (12, 5))
    target[6:, 1:] = -100
    functional.cross_entropy(reference(x).flatten(0, 1), target.flatten()).backward()

    def forward(x, target):
        if loss == "chunked":
            return runtime.chunked_cross_entropy(model(x), target, rows=7)
        return runtime.linear_cross_entropy(x, model.weight, target, linear_bias=model.bias, rows=7)

    memory = runtime.preset("16gb", micro_batches=3, precision="fp32")
    memory.forward_backward(forward, x, target)
    assert relative_error(model, reference) < 1e-12
    assert not memory.report().whole_because


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": torch.zeros(3, dtype=torch.int64)}, "target: got torch.int64 of shape"),
        ({"target": torch.zeros(23)}, "target: got torch.float32"),
        ({"weight": torch.ones(5)}, "weight: got shape"),
        ({"weight": torch.ones(13, requires_grad=True)}, "weight: got one that requires a gradient"),
        ({"reduction": "max"}, "reduction: got 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing: got 1.5"),
        ({"label_smoothing": "much"}, "label_smoothing: got 'much'"),
        ({"rows": 0}, "rows: got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused(changed, message):
    hidden, layer, target = problem()
    arguments = {"target": target, **changed}
    with pytest.raises(ValueError, match=message):
        runtime.chunked_cross_entropy(layer(hidden), **arguments)
    with pytest.raises(ValueError, match=message):
        runtime.linear_cross_entropy(hidden, layer.weight, **arguments)


def test_a_head_of_another_width_is_refused():
    hidden, _, target = problem()
    with pytest.raises(ValueError, match=r"linear_weight: got shape \(13, 9\), expected \[classes, 8\]"):
        runtime.linear_cross_entropy(hidden, torch.zeros(13, 9), target)
    with pytest.raises(ValueError, match="linear_bias: got shape"):
        runtime.linear_cross_entropy(hidden, torch.zeros(13, 8), target, linear_bias=torch.zeros(8))


def test_no_classes_are_refused():
    with pytest.raises(
        ValueError, match=r"input: got torch.float32 of shape \(3, 0\), expected .* of one class or more"
    ):
        runtime.chunked_cross_entropy(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"linear_weight: got shape \(0, 8\)"):
        runtime.linear_cross_entropy(torch.zeros(3, 8), torch.zeros(0, 8), torch.zeros(3, dtype=torch.int64))


def test_an_empty_batch_is_torchs_too():
    layer, hidden = nn.Linear(8, 13), torch.randn(0, 8, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64)
    assert runtime.linear_cross_entropy(hidden, layer.weight, target).isnan()
    assert runtime.chunked_cross_entropy(layer(hidden), target, reduction="sum") == 0
