"""Autocast around a generator and the loss of its critic becomes two blocks where both losses can then be split."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run

GAN = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
make = torch.optim.SGD(generator.parameters(), lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
scaler = GradScaler("cuda", enabled=False)


def made_from(x):
    return generator(x)


for x, y in [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]:
    # the critic
    {header}
        {first}

        # real and fake
        real = critic(y).pow(2).mean()
        {judged}

    judge.zero_grad()
    scaler.scale(judged).backward()
    scaler.step(judge)
    scaler.update()
    with autocast("cuda"):
        made = {made}
    make.zero_grad()
    scaler.scale(made).backward()
    scaler.step(make)
    scaler.update()
    print(judged.item(), made.item(), fake.mean().item())
"""
PLAIN = {
    "header": 'with autocast("cuda"):',
    "first": "fake = generator(x)",
    "judged": "judged = critic(fake.detach()).exp().mean() + real",
    "made": "F.mse_loss(fake, y) - critic(fake).mean()",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"header": 'with autocast("cuda", dtype=torch.bfloat16):'},
        {"first": "fake = made_from(x)"},
        {"first": "x = x * 2\n        noise = torch.randn(len(x), 4)\n        fake = generator(x + noise)"},
    ],
    ids=str,
)
def test_both_losses_are_split_where_the_samples_have_a_block_of_their_own(changes):
    text = GAN.format(**PLAIN | changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 8


def test_comments_and_blank_lines_stay_with_their_statements():
    text = rewritten(GAN.format(**PLAIN)).text
    assert (
        text[text.index("    # the critic") : text.index("    judge.zero")]
        == """\
    # the critic
    with memory.autocast("cuda"):
        fake = generator(x)

    def forward(y, fake):
        with memory.autocast("cuda"):
            # real and fake
            real = critic(y).pow(2).mean()
            judged = critic(fake.detach()).exp().mean() + real
        return judged

"""
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "score = critic(y)\n        fake = generator(x)"},
        {"judged": "judged = critic(fake.detach()).exp().mean() + real + generator(x).mean() * 0"},
        {"header": 'with autocast("cuda"), torch.enable_grad():'},
        {"header": 'with autocast("cuda") as precision:'},
        {"judged": "judged = critic(fake).exp().mean() + real"},
    ],
    ids=["critic first", "generator again", "two contexts", "a name", "through the samples"],
)
def test_a_block_stays_whole_where_parts_may_not_mean_the_same(changes):
    text = GAN.format(**PLAIN | changes)
    if "critic(fake).exp()" in text:
        text = text.replace("scaler.scale(judged).backward()", "scaler.scale(judged).backward(retain_graph=True)")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert after.text.count("autocast(") == text.count("autocast(")
    assert_same_bits(run(text), run(after.text, preset="off"))
