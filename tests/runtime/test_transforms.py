"""Forwards that use torch.func: a check sees what they compute, and their batches are split as exactly as others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap

from oomfix import runtime
from oomfix.runtime.batches.batch import Batch
from oomfix.runtime.verification.gradient_check import _joined
from oomfix.runtime.verification.verify import check


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def rows(count, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)).double()


def of_parameters(model, x, y):
    return lambda weights: F.cross_entropy(functional_call(model, weights, (x,)), y)


def gradient_of_each_sample():
    """The norm of each sample's gradient, clipped, as in differentially private training."""
    model = network()

    def norm(weights, x, y):
        gradients = grad(lambda w: F.cross_entropy(functional_call(model, w, (x[None],)), y[None]))(weights)
        return sum(g.pow(2).sum() for g in gradients.values()).clamp(max=2.0)

    def forward(x, y):
        norms = vmap(norm, in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
        return F.cross_entropy(model(x), y) + 0.1 * norms.mean()

    return list(model.parameters()), forward


def penalty_on_the_jacobian():
    model = network()

    def forward(x, y):
        return F.cross_entropy(model(x), y) + vmap(jacrev(model))(x).abs().sum((1, 2)).mean()

    return list(model.parameters()), forward


def derivative_along_a_direction():
    model = network()

    def forward(x, y):
        out, along = jvp(model, (x,), (torch.ones_like(x),))
        return F.cross_entropy(out, y) + F.relu(along).mean()

    return list(model.parameters()), forward


def ensemble_on_a_skeleton():
    """The skeleton is on the meta device, as torch's own pages have it: its weights are never used."""
    weights, _ = stack_module_state([network(seed) for seed in range(3)])
    skeleton = copy.deepcopy(network()).to("meta")

    def forward(x, y):
        outs = vmap(lambda w, x: functional_call(skeleton, w, (x,)), in_dims=(0, None))(weights, x)
        return F.cross_entropy(outs.flatten(0, 1), y.repeat(3))

    return list(weights.values()), forward


KINDS = [gradient_of_each_sample, penalty_on_the_jacobian, derivative_along_a_direction, ensemble_on_a_skeleton]


@pytest.mark.parametrize("make", KINDS)
def test_a_transform_over_samples_is_split(make):
    memory, (parameters, forward) = runtime.preset("16gb", micro_batches=3), make()
    for call in range(4):
        x, y = rows(12, call), torch.arange(12) % 4
        expected = torch.autograd.grad(forward(x, y), parameters)
        for parameter in parameters:
            parameter.grad = None
        memory.forward_backward(forward, x, y)
        for parameter, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    (known,) = memory._forwards
    assert known.split_calls == 4


def test_a_threshold_for_the_whole_batch_is_seen_inside_of_a_transform():
    """`grad` shows tensors that wrap others, and have no storage."""
    model, labels = network(), torch.arange(12) % 4

    def forward(x, y, bend):
        gradients = grad(lambda weights: bend(of_parameters(model, x, y)(weights)))(dict(model.named_parameters()))
        return sum(g.sum() for g in gradients.values()) * 0 + model(x).pow(2).mean()

    def verdict_of(bend):
        batch = Batch((rows(12), labels), {})
        return check(lambda x, y: forward(x, y, bend), batch, list(model.modules()), 5)

    assert verdict_of(lambda loss: loss).rule is not None
    assert "threshold" in verdict_of(lambda loss: (loss - 0.05).abs()).reason


def test_gradients_on_several_devices_are_joined_on_one():
    joined = _joined([torch.ones(2, 3, device="meta"), torch.ones(4)])
    assert joined.shape == (10,)
