"""Modules that train their own parts, and penalize the gradients of one."""

from __future__ import annotations

CODE = """
    import torch
    from torch import autograd, nn

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()

        def fit(self, loader, optimizer):
            for real in loader:
                optimizer.zero_grad(set_to_none=True)
                fake = self.generator(torch.randn_like(real))
                penalty = self.penalty(real, fake.detach())
                loss = self.critic(fake).mean() - self.critic(real).mean() + penalty
                loss.backward()
                optimizer.step()

        def penalty(self, real, fake):
            mixed = (real + fake).requires_grad_()
            score = self.critic(mixed)
            {penalty}
"""


def test_the_forward_of_a_penalty_is_where_the_part_is_called(report):
    body = "return autograd.grad(score.sum(), mixed, create_graph=True)[0].norm()"
    assert report(CODE.format(penalty=body)) == [("OOM202", line) for line in (12, 14, 20)]


def test_a_method_that_differentiates_nothing_is_the_forward_of_its_module(report):
    assert report(CODE.format(penalty="return score.square().mean()")) == [("OOM202", line) for line in (12, 13, 14)]
