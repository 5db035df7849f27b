"""Local names of settings that asked for mixed precision alone go with it."""

import pytest

from tests.rewrite.equivalence import rewritten

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def train(model, optimizer, loader, args):
    epochs = args.epochs
    {made}
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            with autocast("cuda"):
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            if fp16:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        {behind}
"""


def after(made: str, behind: str = "print(epoch)") -> str:
    return rewritten(SCRIPT.format(made=made, behind=behind)).text


@pytest.mark.parametrize("made", ["fp16 = args.fp16", "fp16 = args.amp.fp16  # not on old cards"])
def test_a_setting_that_nothing_reads_any_more_goes(made):
    assert "    epochs = args.epochs\n    for epoch in range(epochs):\n" in after(made)


@pytest.mark.parametrize(
    ("made", "behind"),
    [
        ("fp16 = args.fp16", "print(fp16)"),
        ("fp16 = args.fp16", "print(locals())"),
        ("fp16 = args.fp16", "del fp16"),
        ("fp16 = args.fp16", "fp16 += 1"),
        ("fp16 = args.asked('fp16')", "print(epoch)"),
        ("global fp16\n    fp16 = args.fp16", "print(epoch)"),
        ("# what the cards can do\n    fp16 = args.fp16", "print(epoch)"),
    ],
)
def test_others_stay(made, behind):
    text = after(made, behind)
    assert "if fp16:" not in text and made in text
