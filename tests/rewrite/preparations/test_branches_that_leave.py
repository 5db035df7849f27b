"""Branches that always leave an iteration, with the forward in their `else`."""

import pytest

from tests.rewrite.small_loops import apply, assert_trains_the_same, loop_of

LOOP = """\
for number, (x, y) in enumerate(loader * 4):
    if number == 0:
        # sees the first batch only
        {first}
    {other}
        # trains on all others
        out = model(x)
        last = out.argmax(1)

    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), last.sum().item() / 2)
"""
UNDER_NO_GRAD = "with torch.no_grad():\n            model(x)\n            continue"


def loop(first: str = "continue", other: str = "else:") -> str:
    return LOOP.format(first=first, other=other)


@pytest.mark.parametrize(
    "first",
    [
        "continue",
        UNDER_NO_GRAD,
        "if y.sum() > 2:\n            continue\n        else:\n            raise ValueError('few')",
    ],
)
def test_what_stands_in_the_other_branch_is_lifted(first):
    assert_trains_the_same(loop(first))


def test_the_text_of_the_other_branch_moves_out():
    assert loop_of(loop(UNDER_NO_GRAD)).startswith("""\
for number, (x, y) in enumerate(loader * 4):
    if number == 0:
        # sees the first batch only
        with torch.no_grad():
            model(x)
            continue

    def forward(x, y):
        # trains on all others
        out = model(x)

        loss = F.cross_entropy(out, y)
        return loss, out

    loss, out = memory.forward_backward(forward, x, y)
    last = out.argmax(1)
""")


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "with contextlib.suppress(ValueError):\n            check(x)\n            continue"},
        {"first": "if y.sum() > 2:\n            continue"},
        {"first": "for one in y:\n            continue"},
        {"other": "elif number > 1:"},
    ],
    ids=str,
)
def test_a_branch_that_may_go_on_keeps_its_else(changes):
    text, loops = apply(loop(**changes))
    assert loops[0][0] == "in-place"
    assert LOOP[LOOP.index("    {other}") :].splitlines()[1] in text
