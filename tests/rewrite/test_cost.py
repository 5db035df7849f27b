"""What `apply` costs grows as the file does: nothing looks at the whole file for each of its loops."""

import sys

import pytest

from tests.audit.test_cost import ACCUMULATES, ADDS_UP, IN_HALF
from tests.rewrite.equivalence import rewritten


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


@pytest.mark.parametrize("part", [ACCUMULATES, IN_HALF, ADDS_UP], ids=["accumulates", "in half", "adds up"])
def test_four_times_the_functions_take_four_times_the_work(part):
    work(part, 1)  # what is read or compiled once
    # one look at all calls of the file for each loop makes it 4.1
    assert work(part, 32) < 4.02 * work(part, 8)
