"""The optimizer of a stage is freed before that of the next one is made, where nothing needs it any more."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def train(model, optimizer):
    for x in torch.randn(5, 8, 4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")


def main():
    head = torch.optim.Adam(model[1].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(head, 2)
    train(model, head)
    schedule.step()

    # everything
    whole = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, whole)


main()
"""


def test_the_first_optimizer_is_freed_and_training_stays_the_same():
    after = rewritten(SCRIPT).text
    assert "    runtime.free(head)\n    # everything\n    whole = torch.optim" in after
    assert rewritten(after).text == after
    assert_same_bits(run(SCRIPT), run(after, preset="off"))
    assert_same_bits(run(SCRIPT), run(after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    train(model, whole)\n", "    train(model, whole)\n    train(model, head)\n"),
        ("    train(model, whole)\n", "    train(model, whole)\n    torch.save(head.state_dict(), 'head.pt')\n"),
        ("    train(model, whole)\n", "    train(model, whole)\n    schedule.step()\n"),
        ("    train(model, head)\n", "    train(model, head)\n    optimizers = [head]\n"),
        ("    train(model, head)\n", "    unseen(model, head)\n"),
        ("        optimizer.zero_grad()\n", "        model.optimizer = optimizer\n        optimizer.zero_grad()\n"),
        ("whole", "head"),
        ("def main():\n", "train = unseen(train)\n\n\ndef main():\n"),
        ("def train(", "@unseen\ndef train("),
        ("def train(model, optimizer):\n", "def train(model, **kept):\n    optimizer = kept['optimizer']\n"),
    ],
    ids=[
        *("trained again", "saved", "scheduled", "listed", "out of sight", "kept by a function", "rebound"),
        *("function bound anew", "decorated", "gathered"),
    ],
)
def test_an_optimizer_that_may_be_needed_is_left_alone(before, after):
    assert before in SCRIPT
    assert "runtime.free" not in rewritten(SCRIPT.replace(before, after)).text


def test_gradients_that_a_window_may_leave_behind_are_left_alone():
    window = SCRIPT.replace("for x in", "for i, x in enumerate(").replace("4):\n        optimizer.zero_grad()", "4)):")
    window = window.replace(
        "        optimizer.step()\n", "        if i % 2 == 1 and i > 2:\n            optimizer.step()\n"
    )
    assert "runtime.free" not in rewritten(window).text
