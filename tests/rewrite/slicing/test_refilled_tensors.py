"""One tensor of labels, filled anew for each loss between the network and its criterion."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten

GAN = """\
import torch
import torch.nn.functional as F
from torch import nn

generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
label = torch.empty(6)
for x in [torch.randn(6, 4) for _ in range(5)]:
    {made}
    critic_optimizer.zero_grad()
    score = critic(x[:, :2])
    {real}
    real_loss = F.binary_cross_entropy(score.view(-1), label)
    real_loss.backward()
    fake = generator(torch.randn(6, 4))
    score = {score}
    {fake}
    fake_loss = F.binary_cross_entropy(score.view(-1), label)
    fake_loss.backward()
    critic_optimizer.step()
    optimizer.zero_grad()
    score = critic(fake)
    # seen as real
    {real}
    loss = F.binary_cross_entropy(score.view(-1), label)
    loss.backward()
    optimizer.step()
    print(real_loss.item(), fake_loss.item(), loss.item(), label.sum().item())
"""
PLAIN = {"made": "pass", "real": "label.fill_(1)", "fake": "label.zero_()", "score": "critic(fake.detach())"}


def of(**changes: str) -> str:
    return GAN.format(**PLAIN | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"real": "label.data.fill_(1.0)"},
        {"real": "label.data.fill_(1); label = label.to('cpu')", "fake": "label.data.fill_(0)"},
        {"made": "label = torch.full((len(x),), 0.5)", "fake": "label.fill_(smooth)"},
    ],
    ids=str,
)
def test_labels_are_filled_ahead_of_each_slice(changes):
    text = "smooth = 0.1\n" + of(**changes)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.index("# seen as real\n    label.") < after.text.index("def forward_3(fake, label):")
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3, precision="fp32").text) == 15


NEAR_MISSES = {
    "the network's result decides the number": {"fake": "label.fill_(score.mean().item())"},
    "what is passed binds the number": {"score": "critic(fake.detach()); smooth = 0.3", "fake": "label.fill_(smooth)"},
    "what is passed reads the labels": {"score": "critic(fake.detach()) * (1 - label.view(-1, 1) / 2)"},
    "what is passed reads a view of them": {"made": "one = label.view(-1, 1)", "score": "critic(fake.detach()) * one"},
    "each label gets another number": {"fake": "label.copy_(score.detach().view(-1))"},
}


@pytest.mark.parametrize("changes", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_labels_that_depend_on_where_they_are_filled_stay(changes):
    after = rewritten(of(**changes))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "label, which was made outside of the slice" in (after.loops[0].reason or "")
