"""Labels and noise that a slice makes by the size of a batch that it reads nothing else of."""

import pytest

from tests.rewrite.equivalence import assert_close, assert_same_bits, rewritten, run

CRITIC = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
make = torch.optim.SGD(generator.parameters(), lr=0.1)
judge = torch.optim.SGD(critic.parameters(), lr=0.1)
for x in [torch.randn(6, 4) for _ in range(4)]:
    {size}
    fake = generator(torch.randn(n, 3)).detach()
    judge.zero_grad()
    real = F.mse_loss(critic(x), torch.ones(n, 1))
    real.backward()
    judged = F.mse_loss(critic(fake), torch.zeros({rows}, 1))
    judged.backward()
    judge.step()
    noise = torch.randn(n, 3)
    make.zero_grad()
    made = F.mse_loss(critic(generator(noise)), torch.ones({rows}, 1))
    made.backward()
    make.step()
    print(f"{real.item():.9f} {judged.item():.9f} {made.item():.9f}")
"""


def trains_alike(text):
    """The text after apply, which trains as before, and how many of its calls ran in parts."""
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    before, split = run(text), run(after.text)
    assert_same_bits(before, run(after.text, preset="off"))
    assert_close(before, split)
    return after.text, split.calls_in_parts


@pytest.mark.parametrize("size", ["n = len(x)", "n = x.size(0)", "n = x.shape[0]"])
def test_a_slice_that_makes_labels_by_the_size_of_the_batch_is_given_it(size):
    """Samples whose graph is cut at once stay ahead of the slice, which begins behind what runs in between."""
    text, in_parts = trains_alike(CRITIC.replace("{size}", size).replace("{rows}", "n"))
    assert in_parts == 12
    assert f"    def forward_2(fake, x):\n        {size}\n        judged =" in text
    assert f"    def forward_3(noise, x):\n        {size}\n        made =" in text


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ("n = len(x)\n    x, whole = x.flip(0), len(x)", "n"),
        ("n = x.size(1) + 2", "n"),
        ("n = len(x)", "6"),
        ("n = 6", "n"),
    ],
    ids=["bound again", "another size", "a number", "a constant"],
)
def test_a_slice_that_makes_other_sizes_is_given_no_batch(size, rows):
    text, _ = trains_alike(CRITIC.replace("{size}", size).replace("{rows}", rows))
    assert "def forward_2(fake):" in text
