"""Edits of a text: where its lines come from."""

from oomfix.rewrite.text.edits import apply_edits, line_before
from oomfix.rules.base import Edit


def test_lines_after_edits_are_found_in_the_text_before():
    text = "".join(f"line {number}\n" for number in range(1, 8))
    edits = [Edit(7, 7, "new\nnew\n"), Edit(21, 28, ""), Edit(35, 41, "put\nput")]
    after = apply_edits(text, edits).splitlines()
    assert after == ["line 1", "new", "new", "line 2", "line 3", "line 5", "put", "put", "line 7"]
    assert [line_before(text, edits, number) for number in range(1, 10)] == [1, 2, 2, 2, 3, 5, 6, 6, 7]
