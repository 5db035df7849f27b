"""Where an autocast block ends: ahead of the backward."""

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP, apply


def test_a_backward_inside_of_autocast_moves_out_and_the_loop_is_split():
    text, forms = apply("""\
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
                # far from here
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """)
    assert forms == [("micro-batched", None)]
    assert "        return loss\n\n    # far from here\n    memory.forward_backward(forward, x, y)\n" in text


TWO = """\
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        out = model(x)
        loss = F.cross_entropy(out, y)
        {other}
        scaler.scale(loss).backward({kept})
        {behind}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "behind",
    [
        "other = F.cross_entropy(model(2 * x), y)\n        scaler.scale(other).backward()",
        "if y.any():\n            loss = attacked(x, y)\n            scaler.scale(loss).backward()",
        "print(model(x))",
    ],
    ids=["forward", "out of sight", "forward alone"],
)
def test_what_is_computed_behind_a_backward_inside_of_autocast_stays_under_it(behind):
    text, _ = apply(TWO.format(other="pass", kept="", behind=behind))
    line = behind.splitlines()[0].split("(")[0]
    assert f"\n        {line}(" in text


def test_two_backwards_at_the_end_of_a_block_of_autocast_move_out_together():
    after = rewritten(
        TOP
        + TWO.format(
            other="other = out.square().mean()", kept="retain_graph=True", behind="scaler.scale(other).backward()"
        )
    )
    compile(after.text, "train.py", "exec")
    assert "\n    memory.backward(loss, retain_graph=True)\n    memory.backward(other)\n" in after.text
    assert [fixed.code for fixed in after.fixed].count("OOM305") == 2


UNDER_A_TEST = """\
scaler = torch.amp.GradScaler("cuda")
use_amp = True
for x, y in loader:
    with torch.autocast("cuda", enabled=use_amp):
        loss = F.cross_entropy(model(x), y)
        {reset}
        if use_amp:
            {ahead}
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        print(loss.item())
"""


def test_a_test_of_two_backwards_inside_of_autocast_moves_out_with_the_resets_ahead_of_it():
    text, forms = apply(UNDER_A_TEST.format(reset="optimizer.zero_grad()", ahead="# scaled"))
    assert forms == [("micro-batched", None)]
    assert text.endswith("    memory.step(optimizer)\n    print(loss.item())\n")


@pytest.mark.parametrize("ahead", ["loss = loss + F.cross_entropy(model(2 * x), y)", "loss = loss * 2"])
def test_a_test_with_more_of_a_loss_stays_under_autocast(ahead):
    text, _ = apply(UNDER_A_TEST.format(reset="pass", ahead=ahead))
    assert "\n        if use_amp:\n" in text
