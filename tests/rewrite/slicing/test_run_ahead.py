"""A critic trained in a loop of its own on samples that the loss of the generator behind that goes back through."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

CRITIC = """\
import torch
from torch import nn

torch.manual_seed(0)
gen = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4))
critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
opt_gen = torch.optim.RMSprop(gen.parameters(), lr=0.01)
opt_critic = torch.optim.RMSprop(critic.parameters(), lr=0.01)
batches = [torch.randn(6, 4) for _ in range(3)]

for real in batches:
    for _ in range(2):
        fake = gen(torch.randn(len(real), 2))
        critic_real = critic(real).reshape(-1)
        critic_fake = critic({seen}).reshape(-1)
        loss_critic = -(torch.mean(critic_real) - torch.mean(critic_fake))
        critic.zero_grad()
        loss_critic.backward({kept})
        opt_critic.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
    loss_gen = -torch.mean(critic({judged}).reshape(-1))
    gen.zero_grad()
    loss_gen.backward()
    opt_gen.step()
    print(loss_critic.item(), loss_gen.item())
"""


@pytest.mark.parametrize(("seen", "kept"), [("fake.detach()", ""), ("fake", "retain_graph=True")])
def test_samples_of_a_loop_around_another_backward_are_given_to_both_losses(seen, kept):
    text = CRITIC.format(seen=seen, kept=kept, judged="fake")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.line, loop.rewrite) for loop in after.loops] == [(11, "micro-batched"), (12, "micro-batched")]
    whole = "line 13 runs its network on whole batches: a later loss needs what it gives"
    assert [whole in loop.notes for loop in after.loops] == [False, True]
    assert "critic(fake.detach())" in after.text and "retain_graph" not in after.text
    assert parts_as_whole(text, after.text, after.text) == 9
    assert_same_bits(run(text), run(rewritten(text).text, preset="off"))


PENALTY = """\
def penalty(critic, real, fake):
    share = torch.rand(len(real), 1)
    mixed = real * share + fake * (1 - share)
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


for real in batches:
"""


@pytest.mark.parametrize(("logged", "forms"), [("print(extra.item())", 2), ("loss_gen = loss_gen + extra", 1)])
def test_a_penalty_differentiates_copies_of_samples_if_it_is_of_this_loss_alone(logged, forms):
    text = CRITIC.format(seen="fake", kept="retain_graph=True", judged="fake")
    text = text.replace("for real in batches:\n", PENALTY)
    text = text.replace("        critic.zero", "        extra = penalty(critic, real, fake)\n        critic.zero")
    text = text.replace("loss_critic.backward(", "(loss_critic + 10 * extra).backward(")
    text = text.replace("    gen.zero_grad()", f"    {logged}\n    gen.zero_grad()")
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops].count("micro-batched") == forms
    assert ("penalty(critic, real, fake.detach().requires_grad_())" in after.text) == (forms == 2)
    if forms == 2:
        assert_same_bits(run(text), run(rewritten(text).text, preset="off"))
        assert parts_as_whole(text, after.text, after.text) == 9


def test_scores_of_a_loop_are_no_batch_of_the_loss_behind_it():
    text = CRITIC.format(seen="fake", kept="retain_graph=True", judged="fake").replace(
        "    loss_gen = -torch.mean(critic(fake).reshape(-1))", "    loss_gen = -torch.mean(critic_fake)"
    )
    assert [loop.rewrite for loop in rewritten(text).loops if loop.line == 11] == ["in-place"]
