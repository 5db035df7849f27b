"""Pools that exchange samples with a batch change once for each batch, ahead of the slice that trains on theirs."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten

GAN = """\
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Pool{base}:
    def __init__(self, size):
        super().__init__()
        self.size, self.kept = size, []

    def query(self, images):
        given = []
        for image in images.detach():
            if len(self.kept) < self.size:
                self.kept.append(image)
            elif {coin} > 0.5:
                place = random.randrange(self.size)
                image, self.kept[place] = self.kept[place], image
            given.append(image)
        return torch.stack(given)


generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
pool = Pool(8)
for x in [torch.randn(6, 4) for _ in range(5)]:
    fake = generator(x)
    loss = F.mse_loss(critic(fake), torch.ones(len(x), 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    critic_optimizer.zero_grad()
    real_loss = {real}
    # samples of before
    old = pool.query({given})
    old_loss = critic(old).pow(2).mean()
    critic_loss = real_loss + old_loss
    critic_loss.backward()
    critic_optimizer.step()
    print(loss.item(), critic_loss.item())
"""
PLAIN = {
    "base": "",
    "coin": "random.uniform(0, 1)",
    "real": "F.mse_loss(critic(x[:, :2]), torch.ones(len(x), 1))",
    "given": "fake",
}


@pytest.mark.parametrize(
    "changes", [{}, {"base": "(object)"}, {"coin": "np.random.rand()"}, {"given": "fake.detach()"}], ids=str
)
def test_samples_are_exchanged_ahead_of_the_slice(changes):
    text = GAN.format(**PLAIN | changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert "\n    # samples of before\n    old = pool.query(fake" in after.text
    assert "    def forward_2(x, old):\n        real_loss = " in after.text
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3, precision="fp32").text) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"coin": "torch.rand(1).item()"},
        {"base": "(nn.Module)"},
        {"real": "F.mse_loss(critic(x[:, :2]), torch.ones(len(x), 1)) * random.random()"},
        {"real": "F.mse_loss(critic(x[:, :2]), torch.full((len(x), 1), float(len(pool.kept))))"},
    ],
    ids=str,
)
def test_a_pool_that_the_slice_knows_or_that_draws_as_it_does_keeps_the_losses_in_place(changes):
    (loop,) = rewritten(GAN.format(**PLAIN | changes)).loops
    assert loop.rewrite == "in-place"
    assert "`query` changes self.kept" in loop.reason
