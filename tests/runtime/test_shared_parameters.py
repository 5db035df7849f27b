"""Two optimizers step the same parameters: in fp16, their gradients are unscaled once for both."""

import pytest
import torch

from oomfix import runtime
from tests.torch_versions import needs_fused_on_cpu

RATE = 0.25


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(3, generator=generator)) for _ in range(3)]


def trained(memory, fused, unscaled):
    """Parameters after two rounds; the optimizers share the second one, and the first step leaves its gradient."""
    one, shared, other = parameters()
    first = torch.optim.SGD([one, shared], lr=RATE, fused=fused)
    second = torch.optim.SGD([shared, other], lr=RATE, fused=fused)
    for _ in range(2):
        first.zero_grad()
        memory.backward(sum(p.pow(2).sum() for p in (one, shared, other)))
        for optimizer in (first, second) if unscaled else ():
            memory.unscale_(optimizer)
        memory.step(first, zero_grad=False)
        # what is left in the shared one counts as well
        memory.backward(shared.pow(3).sum())
        memory.step(second, zero_grad=False)
        memory.step(first, zero_grad=False)
        second.zero_grad()
    return [one, shared, other]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_fused_on_cpu)])
@pytest.mark.parametrize("unscaled", [False, True])
def test_shared_gradients_are_unscaled_once_for_both(fused, unscaled):
    expected = trained(runtime.preset("16gb", precision="fp32"), fused, unscaled)
    runtime.reset()
    found = trained(runtime.preset("16gb", precision="fp16"), fused, unscaled)
    # the scale is a power of two
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
