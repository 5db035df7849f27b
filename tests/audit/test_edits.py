"""Edits of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.rewrite.edits import apply_edits
from oomfix.rules.base import Edit


@st.composite
def texts_with_edits(draw: st.DrawFn) -> tuple[str, list[Edit]]:
    text = draw(st.text(max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    spans = zip(cuts[::2], cuts[1::2], strict=False)
    return text, [Edit(start, end, draw(st.text(max_size=5))) for start, end in spans]


@given(case=texts_with_edits(), order=st.randoms())
def test_every_span_is_replaced_and_nothing_else(case, order):
    text, edits = case
    expected = text
    for edit in reversed(edits):  # from the back, no edit moves another
        expected = expected[: edit.start] + edit.replacement + expected[edit.end :]
    distinct = len({(edit.start, edit.end) for edit in edits}) == len(edits)
    shuffled = order.sample(edits, len(edits)) if distinct else edits
    assert apply_edits(text, shuffled) == expected


def test_insertions_at_one_place_keep_their_order():
    assert apply_edits("ac", [Edit(1, 1, "x"), Edit(1, 1, "y")]) == "axyc"


def test_an_edit_shared_by_two_findings_is_made_once():
    insertion, replacement = Edit(1, 1, "x"), Edit(2, 3, "y")
    assert apply_edits("abcd", [insertion, replacement, insertion, replacement]) == "axbyd"


def test_equal_replacements_of_two_findings_are_one():
    assert apply_edits("abcd", [Edit(1, 3, "x"), Edit(*(1, 3, "x"))]) == "axd"


def test_equal_insertions_of_two_findings_are_both_made():
    assert apply_edits("if a:", [Edit(0, 0, "    "), Edit(*(0, 0, "    "))]) == "        if a:"


def test_different_replacements_of_one_span_are_refused():
    with pytest.raises(ValueError, match="overlaps the one before it"):
        apply_edits("abcd", [Edit(1, 3, "x"), Edit(1, 3, "y")])


@pytest.mark.parametrize("edits", [[Edit(0, 2, "x"), Edit(1, 3, "y")], [Edit(1, 3, "x"), Edit(2, 2, "y")]])
def test_overlapping_edits_are_refused(edits):
    with pytest.raises(ValueError, match="overlaps the one before it"):
        apply_edits("abcd", edits)


@pytest.mark.parametrize("edit", [Edit(-1, 2, ""), Edit(3, 2, ""), Edit(2, 5, "")])
def test_an_edit_outside_the_text_is_refused(edit):
    with pytest.raises(ValueError, match="inside the 4 characters"):
        apply_edits("abcd", [edit])
