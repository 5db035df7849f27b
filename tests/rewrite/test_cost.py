"""What `apply` costs grows as the file does: nothing looks at the whole file for each of its loops."""

import sys

import pytest

from tests.audit.test_cost import ACCUMULATES, ADDS_UP, IN_HALF
from tests.rewrite.equivalence import rewritten

WINDOWS = """
def train_{number}(model, loader, optimizer, criterion, args):
    for step, (images, labels) in enumerate(loader):
        loss = criterion(model(images), labels) / args.window
        loss.backward()
        if (step + 1) % args.window == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def work(part: str, copies: int) -> int:
    """How many functions of Python are entered to rewrite a script of so many functions, generators resumed too."""
    text = "import torch\n" + "".join(part.format(number=number) for number in range(copies))
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        rewritten(text)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "part", [ACCUMULATES, IN_HALF, ADDS_UP, WINDOWS], ids=["accumulates", "in half", "adds up", "windows"]
)
def test_four_times_the_functions_take_four_times_the_work(part):
    work(part, 1)  # what is read or compiled once
    # one look at all calls of the file for each loop makes it 4.1
    assert work(part, 32) < 4.02 * work(part, 8)
