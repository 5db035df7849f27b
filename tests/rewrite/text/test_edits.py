"""Edits of a text: where its lines come from."""

import pytest

from oomfix.rewrite.text.edits import Shift, apply_edits, line_before
from oomfix.rules.base import Edit


def test_lines_after_edits_are_found_in_the_text_before():
    text = "".join(f"line {number}\n" for number in range(1, 8))
    edits = [Edit(7, 7, "new\nnew\n"), Edit(21, 28, ""), Edit(35, 41, "put\nput")]
    after = apply_edits(text, edits).splitlines()
    assert after == ["line 1", "new", "new", "line 2", "line 3", "line 5", "put", "put", "line 7"]
    assert [line_before(text, edits, number) for number in range(1, 10)] == [1, 2, 2, 2, 3, 5, 6, 6, 7]


@pytest.mark.parametrize(
    ("edits", "there"),
    [
        ([], "model(x)"),
        ([Edit(0, 3, "a longer start")], "model(x)"),
        ([Edit(7, 7, "(")], "model(x)"),
        ([Edit(15, 15, ")")], "model(x)"),
        ([Edit(7, 7, "("), Edit(15, 15, ")"), Edit(15, 16, "\n")], "model(x)"),
        ([Edit(13, 14, "x.half()")], "model(x.half())"),
        ([Edit(7, 15, "net(x, y)")], "net(x, y)"),
        ([Edit(5, 9, "")], None),
        ([Edit(13, 16, "")], None),
        ([Edit(0, 17, "")], None),
    ],
)
def test_a_span_is_found_again_unless_an_edit_cuts_into_it(edits, there):
    text = "loss = model(x) + 1\n"
    span = Shift(edits).span(7, 15)
    assert text[7:15] == "model(x)"
    assert (span and apply_edits(text, edits)[slice(*span)]) == there
