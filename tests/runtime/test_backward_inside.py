"""A forward that runs backward on its own loss is told to leave that to `forward_backward`."""

import pytest
import torch
from torch import nn

from oomfix import runtime


@pytest.mark.parametrize("micro_batches", ["auto", 3])
@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: (loss, loss.item())])
@pytest.mark.parametrize("by_manager", [True, False])
def test_a_backward_inside_of_the_forward_ends_in_an_error_that_says_what_to_do(returned, by_manager, micro_batches):
    memory, model = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches), nn.Linear(6, 4)

    def forward(x):
        loss = model(x).pow(2).mean()
        memory.backward(loss) if by_manager else loss.backward()
        return returned(loss)

    with pytest.raises(
        ValueError, match=r"(?i)leave backward\(\) to forward_backward|A backward\(\) inside of it is to be left"
    ):
        memory.forward_backward(forward, torch.randn(12, 6))


def test_a_graph_of_an_earlier_call_is_not_taken_for_one_that_the_forward_made():
    memory, model = runtime.preset("16gb", precision="fp32"), nn.Linear(6, 6)
    states = [torch.zeros(12, 6)]

    def forward(x):
        states.append(model(x + states[-1]).tanh())
        return states[-1].pow(2).mean()

    memory.forward_backward(forward, torch.randn(12, 6))
    with pytest.raises(RuntimeError, match="a second time"):
        memory.forward_backward(forward, torch.randn(12, 6))


def test_what_a_backward_inside_has_added_is_gone_after_an_error_at_the_first_call():
    model = nn.Linear(4, 3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward()
        raise ValueError("the caller's own")

    memory = runtime.preset("16gb", precision="fp32")
    with pytest.raises(ValueError, match="the caller's own"):
        memory.forward_backward(forward, torch.randn(6, 4))
    assert model.weight.grad is None
    assert model.bias.grad is None
