"""What is read off a result between two lines of a slice goes into its function, if the slice binds the result anew."""

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.slicing.test_slices import assert_trains_the_same
from tests.rewrite.small_loops import TOP, apply

TWO_PARTS = """\
for x, y in loader * 3:
    optimizer.zero_grad()
    out = model(x)
    first = F.cross_entropy(out, y)
    {between}
    out = model(-x)
    second = F.cross_entropy(out, y)
    loss = first + second
    loss.backward()
    optimizer.step()
    print(loss.item(), {read})
"""

HEAD = """\
score, second, scores = 0.0, torch.zeros(1), [0]


def accuracy(out):
    scores.append(out)
    return 1.0


"""


@pytest.mark.parametrize(
    ("between", "read"),
    [
        ("score = out", "score.sum().item()"),
        ("score = kept = out.detach()", "(score + kept).sum().item()"),
        ("score = out.mean().item()", "score"),
        ("score = out.data.sigmoid().mean()", "float(score)"),
    ],
)
def test_a_score_of_the_first_part_is_given_out_by_the_function(between, read):
    text = assert_trains_the_same(TWO_PARTS.format(between=between, read=read))
    assert f"        first = F.cross_entropy(out, y)\n        {between}\n        out = model(-x)\n" in text
    assert "    loss, score" in text.replace("loss, out, score", "loss, score")


def test_a_score_that_nobody_reads_stays_in_the_function():
    text = assert_trains_the_same(TWO_PARTS.format(between="score = out", read="1.0"))
    assert "        score = out\n" in text and "        return loss\n" in text


@pytest.mark.parametrize(
    ("between", "read"),
    [
        ("score = out.std().clamp(0, 1)", "score.item()"),
        ("score = accuracy(out)", "score"),
        ("score = score * 0.9 + out.mean().item()", "score"),
        ("scores[0] = out.mean().item()", "scores[0]"),
    ],
)
def test_what_does_more_than_read_the_result_reads_it_behind_the_function_under_another_name(between, read):
    text = assert_trains_the_same(HEAD + TWO_PARTS.format(between=between, read=read))
    assert "        out_before = out\n" in text
    assert f"\n    {between.replace('(out', '(out_before').replace('out.', 'out_before.')}\n" in text


@pytest.mark.parametrize(
    ("between", "read"),
    [
        ("score = second.detach()", "score"),
        ("score = out\n    if score.sum() > 9:\n        break", "score"),
        ("score = out * 2\n    if accuracy(out) > 1:\n        break", "score"),
    ],
)
def test_what_may_leave_the_loop_or_reads_the_iteration_before_keeps_the_loss_in_place(between, read):
    _, loops = apply(HEAD + TWO_PARTS.format(between=between, read=read))
    assert [form for form, _ in loops] == ["in-place"]


CHANGED = """\
epochs = 3
log = []
for x, y in loader * 3:
    optimizer.zero_grad()
    out = model(x)
    first = F.cross_entropy(out, y)
    loss = {held}
    {between}
    loss += out.pow(2).mean()
    loss.backward()
    optimizer.step()
    log.append({read})
print(log)
"""


@pytest.mark.parametrize("held", ["first", "first.view(())", "first if epochs else None"])
def test_a_number_read_off_a_loss_that_a_later_line_adds_to_under_another_name_is_read_in_the_function(held):
    text = assert_trains_the_same(CHANGED.format(held=held, between="score = first.item()", read="score"))
    assert "        score = first.item()\n        loss += out" in text


@pytest.mark.parametrize("held", ["first", "first.view(())", "first if epochs else None"])
def test_a_number_logged_of_a_loss_that_a_later_line_adds_to_is_not_logged_behind_it(held):
    text = TOP + CHANGED.format(held=held, between="log.append(first.item() / len(x))", read="loss.item()")
    assert_same_bits(run(text), run(rewritten(text, precision="fp32").text, preset="off"))


def test_a_number_logged_of_a_loss_that_no_later_line_changes_is_logged_behind_it():
    text = CHANGED.format(held="first * 2", between="log.append(first.item())", read="loss.item()")
    assert "\n    log.append(first.item())\n" in assert_trains_the_same(text)
