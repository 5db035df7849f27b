"""Constants that are made ahead of two losses and that both read: they have no graph that one could go through."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP, apply

GAN = """\
from torch.autograd import Variable

maker, critic = torch.randn(5, 3).requires_grad_(), torch.randn(4, 1).requires_grad_()
optimizer = torch.optim.SGD([maker], lr=0.1)
critic_optimizer = torch.optim.SGD([critic], lr=0.1)
for x, y in loader * 3:
    c = y.numpy()
    c = {made}
    fake = torch.cat([x, c], 1) @ maker
    loss = (torch.cat([fake, c], 1) @ critic).mean() - (torch.cat([x[:, :3], c], 1) @ critic).square().mean()
    loss.backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    optimizer.zero_grad()
    fake = torch.cat([x, c], 1) @ maker
    other = (torch.cat([fake, c], 1) @ critic).mean()
    other.backward()
    optimizer.step()
    critic_optimizer.zero_grad()
    optimizer.zero_grad()
    print(loss.item(), other.item())
"""


@pytest.mark.parametrize(
    "made",
    [
        "Variable(torch.from_numpy(c.astype('float32')[:, None]))",
        "torch.autograd.Variable(torch.ones(len(c), 1))",
    ],
)
def test_both_losses_are_given_a_variable_of_a_constant(made):
    text = TOP + GAN.format(made=made)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)


@pytest.mark.parametrize("more", [", requires_grad=True)", " * maker[0, 0])"])
def test_what_may_have_a_graph_is_none(more):
    _, loops = apply(GAN.format(made=f"Variable(torch.from_numpy(c.astype('float32')[:, None]){more}"))
    assert loops[0][0] == "in-place" and "goes through c, made for the one in line" in loops[0][1]
