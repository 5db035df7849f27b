"""A forward right ahead of the branch that makes its loss and runs the backward."""

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP, apply

LOOP = """\
state = {{"phase": "train"}}


def run(x):
    state["seen"] = len(x)
    return model(x)


for phase in ["train", "test", "train"]:
    for number, (x, y) in enumerate(loader * 2):
        optimizer.zero_grad()
        # scores of all classes
        {forward}
        if {test}:
            # only here
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item())
        {other}
        print(f"{{out.sum().item():.6f}}")
"""
PLAIN = {"forward": "out = model(x)", "test": 'phase == "train"', "other": "# for all phases"}


def of(**changes: str) -> str:
    return LOOP.format(**PLAIN | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"other": "else:\n            print('evaluated')"},
        {"forward": "out = model(x)\n        best = out.argmax(1)"},
        {"test": 'state["phase"] == phase'},
    ],
    ids=str,
)
def test_a_forward_moves_into_both_branches(changes):
    text = TOP + of(**changes)
    after = rewritten(text, micro_batches=3, precision="fp32")
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [("micro-batched", None)]
    assert parts_as_whole(text, after.text, after.text) == 4


def test_the_other_branch_runs_the_network_as_it_did():
    text, _ = apply(of())
    assert "# scores of all classes\n                out = model(x)\n                # only here\n" in text
    assert (
        """\
            print(loss.item())
        else:
            # scores of all classes
            out = model(x)
"""
        in text
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"other": "elif number:\n            print('evaluated')"},
        {"test": "bool(phase)"},
        {"test": "out.sum() < 99"},
        {"forward": "out = model(x)\n        state['out'] = out"},
        {"forward": "out = run(x)", "test": 'state["phase"] == phase'},
        {"forward": "out = model(x)\n        a = out + 1\n        b = out + 2\n        c = a + b"},
    ],
    ids=str,
)
def test_a_forward_that_the_branch_may_mind_stays_ahead_of_it(changes):
    text, forms = apply(of(**changes))
    assert forms[0][0] == "in-place"
    assert "out = model(x)\n" in text or "out = run(x)\n" in text or "memory.forward(model, x)" in text
