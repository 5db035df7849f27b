"""A small model with its optimizer and loader, and what becomes of a loop behind them."""

import textwrap

from tests.rewrite.equivalence import parts_as_whole, rewritten

TOP = """\
import torch
import torch.nn.functional as F
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))]
"""


def apply(body: str) -> tuple[str, list[tuple[str, str | None]]]:
    """The text behind the imports and the set-up after apply, and the forms of the loops with their reasons."""
    result = rewritten(TOP + textwrap.dedent(body))
    compile(result.text, "train.py", "exec")
    return result.text, [(loop.rewrite, loop.reason) for loop in result.loops]


def loop_of(body: str) -> str:
    """The loop after apply, for a body whose first line is that of the loop."""
    text, _ = apply(body)
    return text[text.index("\nfor ") + 1 :]


def assert_trains_the_same(body: str) -> str:
    """The text of a micro-batched script, which trains the same whole and in three parts."""
    text = TOP + textwrap.dedent(body)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text)
    return after.text
