"""A script that asks for the graph of its loss finds it there: such a loss stays in place."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, parts_as_whole, rewritten, run
from tests.rewrite.small_loops import TOP

LOOP = """\
for x, y in loader:
    x.requires_grad_()
    out = model(x)
    loss = F.cross_entropy(out, y)
    {between}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), {behind})
"""


@pytest.mark.parametrize(
    ("between", "behind", "read"),
    [
        ("assert loss.grad_fn is not None, y", "0", "line 12 reads `loss.grad_fn`"),
        ("assert loss.grad_fn", "loss.requires_grad", "line 16 reads `loss.requires_grad`"),
        ("if not out.requires_grad: raise ValueError", "out", "line 12 reads `out.requires_grad`"),
        ("pass", "out.is_leaf, out.shape", "line 16 reads `out.is_leaf`"),
        ("pass", "out.retain_grad()", "line 16 reads `out.retain_grad`"),
        ("pass", "len({out.register_hook(abs)})", "line 16 reads `out.register_hook`"),
    ],
)
def test_what_is_asked_for_its_graph_has_one(between, behind, read):
    text = TOP + LOOP.format(between=between, behind=behind)
    after = rewritten(text)
    assert [(loop.rewrite, loop.reason) for loop in after.loops] == [
        ("in-place", f"{read}, and the call leaves no graph")
    ]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_what_the_next_iteration_asks_for_its_graph_has_one():
    loop = LOOP.format(between="pass", behind="0")
    asked = "loss = None\nfor x, y in loader * 2:\n    print(loss is not None and loss.requires_grad)"
    text = TOP + loop.replace("for x, y in loader:", asked)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_what_is_not_left_by_the_loss_may_be_asked_for_its_graph():
    after = rewritten(TOP + LOOP.format(between="assert x.requires_grad", behind="out.shape"))
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]


@pytest.mark.parametrize("asserted", ["loss.requires_grad", "out.grad_fn is not None and loss.requires_grad"])
def test_what_is_asserted_of_a_graph_holds_of_all_parts(asserted):
    text = TOP + LOOP.format(between=f"assert {asserted}", behind="out.shape")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert f"        assert {asserted}\n        return loss" in after.text
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text) == 1
