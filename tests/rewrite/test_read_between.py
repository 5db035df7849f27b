"""What is read off a result between two lines of a slice goes into its function, if the slice binds the result anew."""

import pytest

from tests.rewrite.small_loops import apply
from tests.rewrite.test_slices import assert_trains_the_same

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
        ("score = out.std().clamp(0, 1)", "score"),
        ("score = accuracy(out)", "score"),
        ("score = score * 0.9 + out.mean().item()", "score"),
        ("scores[0] = out.mean().item()", "scores"),
        ("score = second.detach()", "score"),
        ("score = out\n    if score.sum() > 9:\n        break", "score"),
    ],
)
def test_what_does_more_than_read_the_result_keeps_the_loss_in_place(between, read):
    head = "score, second, scores = 0.0, torch.zeros(1), [0]\n\n\n"
    head += "def accuracy(out):\n    scores.append(out)\n    return 1.0\n\n\n"
    _, loops = apply(head + TWO_PARTS.format(between=between, read=read))
    assert [form for form, _ in loops] == ["in-place"]
