"""Names that a script deletes, once what binds them stands in the function of a loss."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, loop_of


def test_names_that_are_only_deleted_leave_the_del():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            print(loss.item())
            del out, loss, x
            del out
        """)
    assert "        return loss\n" in text
    assert text.endswith("    print(loss.item())\n    del loss, x\n")


@pytest.mark.parametrize("behind", ["optimizer.step()\n", "optimizer.step()\n\n    optimizer.zero_grad()\n"])
def test_of_the_blank_lines_around_a_del_that_goes_one_stays(behind):
    text = f"""\
for x, y in loader * 2:
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()

    del out

    {behind}"""
    assert "memory.forward_backward(forward, x, y)\n\n    memory.step(optimizer" in rewritten(TOP + text).text


@pytest.mark.parametrize(
    ("deleting", "left"),
    [
        ("del out", False),
        ("del out, scores", False),
        ("# no longer needed\n    del (out)", False),
        ("del out, x", True),
        ("del x", True),
        ("if len(x) > 5: del out", True),
        ("for n in range(1): del out", True),
    ],
)
def test_names_may_be_deleted_between_the_loss_and_its_backward(deleting, left):
    text = f"""\
for x, y in loader * 2:
    optimizer.zero_grad()
    out = model(x)
    scores = out.log_softmax(1)
    loss = F.nll_loss(scores, y)
    {deleting}
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
    after = rewritten(TOP + text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert (" del " in after.text) is left
    assert_same_bits(run(TOP + text), run(after.text, preset="off"))


INSIDE = """\
for x, y in loader * 2:
    optimizer.zero_grad()
    if {test}:
        with torch.autocast("cpu", enabled=False):
            out = model(x)
            del {deleted}
            loss = F.cross_entropy(out, y)
        loss.backward()
    else:
        out = model(x)
        del x
        loss = F.cross_entropy(out, y)
        loss.backward()
    optimizer.step()
    print(loss.item())
    {behind}
"""


@pytest.mark.parametrize("test", ["len(x) > 1", "len(x) < 1"])
def test_a_batch_may_be_deleted_on_the_way_to_the_loss(test):
    text = TOP + INSIDE.format(test=test, deleted="x", behind="del y")
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert after.text.count("del x") == 2
    assert_same_bits(run(text), run(after.text, preset="off"))


@pytest.mark.parametrize(("deleted", "behind"), [("loader", ""), ("model.bias", ""), ("x", "print(locals())")])
def test_what_is_to_be_gone_outside_of_the_function_too_keeps_the_loss_in_place(deleted, behind):
    after = rewritten(TOP + INSIDE.format(test="len(x) > 1", deleted=deleted, behind=behind))
    assert [loop.rewrite for loop in after.loops] == ["in-place"]


def test_a_name_deleted_behind_the_loop_is_still_there():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        del out
        """)
    assert "return loss, out\n" in text and "\ndel out\n" in text


def test_a_name_that_is_bound_anew_ahead_of_its_del_need_not_be_returned():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        for x, y in loader:
            out = len(x)
            del out
        """)
    assert "        return loss\n" in text


@pytest.mark.parametrize(
    ("skipped", "deleted", "returned"),
    [
        ("", "del x, out", "return loss"),
        ("", "del x, out; out = 1", "return loss, out"),  # what the last `del` takes is another one
        ("if len(x) > 9: continue", "del x, out", "return loss, out"),
        ("", "if len(x) > 9: del out", "return loss, out"),
    ],
)
def test_a_name_that_each_iteration_deletes_is_not_returned_for_another_del_behind_the_loop(skipped, deleted, returned):
    """An evaluation that follows binds it anew, and deletes it as well."""
    text = loop_of(f"""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            {skipped or "pass"}
            {deleted}
        for x, y in loader:
            out = len(x)
        del x, out
        """)
    assert f"        {returned}\n" in text
