"""A term of a loss may have the weight 0 for many calls, and begin to count between two checks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix import runtime


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 6, generator=generator).double(), torch.randint(0, 4, (12,), generator=generator)


def gradients_apart(term, calls, warmup, multiply=lambda weight, value: weight * value):
    """The largest difference from gradients of whole batches, with a weight of 0 in the first `warmup` calls."""
    model, memory, worst, state = network(), runtime.preset("16gb", micro_batches=3), 0.0, {"step": 0}

    def forward(x, y):
        out = model(x)
        weight = 0.0 if state["step"] < warmup else 1.0
        return F.cross_entropy(out, y) + multiply(weight, term(model, out))

    parameters = list(model.parameters())
    for step in range(calls):
        state["step"] = step
        expected = torch.autograd.grad(forward(*batch(step)), parameters)
        model.zero_grad()
        memory.forward_backward(forward, *batch(step))
        worst = max([worst, *(float((p.grad - e).abs().max()) for p, e in zip(parameters, expected, strict=True))])
    return worst


def whole_because():
    (report,) = runtime.preset("16gb", micro_batches=3).report().forwards
    return report.whole_because


def decorrelation(model, out):
    centred = out - out.mean(0)
    return (centred.T @ centred).pow(2).sum()


MULTIPLICATIONS = [
    lambda weight, value: weight * value,
    lambda weight, value: value * weight,
    lambda weight, value: torch.mul(value, weight),
    lambda weight, value: (weight > 0) * value,
]


@pytest.mark.parametrize("multiply", MULTIPLICATIONS)
def test_a_term_of_several_samples_is_seen_before_its_weight_rises(multiply):
    assert gradients_apart(decorrelation, calls=15, warmup=12, multiply=multiply) < 1e-12


def test_whoever_is_refused_a_split_is_told_of_the_weight():
    gradients_apart(decorrelation, calls=5, warmup=5)
    assert whole_because() == "samples depend on each other in a term of its loss whose weight is 0 now"


TERMS = [
    lambda model, out: out.pow(2).mean(),
    lambda model, out: out.sum(),
    lambda model, out: sum(parameter.sum() for parameter in model.parameters()),
]


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_each_sample_or_of_none_do_not_stand_in_the_way(term):
    """Nor does what only puts all parameters into the graph."""
    assert gradients_apart(term, calls=5, warmup=5) < 1e-12
    assert whole_because() is None
