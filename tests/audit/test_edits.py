"""Edits of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomfix.rewrite.surroundings.local import findings_of
from oomfix.rewrite.text.edits import apply_edits, merge
from oomfix.rules import all_rules
from oomfix.rules.base import Edit, Finding, Severity
from oomfix.source import Source


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


def finding(*edits: Edit) -> Finding:
    return Finding("OOM901", "mark", Severity.NOTE, "a mark", 1, 1, 1, 2, edits=edits)


TWO_FORWARDS = """\
import torch

def validate(model, loader):
    model.eval()
    total, correct = 0, 0
    for x, y in loader:
        total += criterion(model(x), y).item()
    for x, y in loader:
        correct += criterion(model(x), y).item()
    return total, correct
"""


def test_two_findings_that_need_one_decorator_get_one():
    source = Source.from_bytes("a.py", TWO_FORWARDS.encode())
    findings = findings_of(source, all_rules())
    assert [found.code for found in findings] == ["OOM201", "OOM201"]
    expected = TWO_FORWARDS.replace("def validate", "@torch.no_grad()\ndef validate")
    merged = merge(findings)
    assert merged.findings == findings
    assert apply_edits(source.text, merged.edits) == expected
    assert apply_edits(source.text, dict.fromkeys(edit for found in findings for edit in found.edits)) == expected


def test_a_finding_whose_edits_overlap_those_of_another_waits():
    first, second, third = finding(Edit(0, 2, "x")), finding(Edit(1, 3, "y")), finding(Edit(3, 4, "z"))
    merged = merge([first, second, third])
    assert merged.findings == [first, third]
    assert apply_edits("abcd", merged.edits) == "xcz"


def test_blocks_put_around_each_other_are_not_merged_into_one_indentation():
    outer = finding(Edit(0, 0, "with a:\n"), Edit(0, 0, "    "), Edit(2, 2, "    "))
    inner = finding(Edit(2, 2, "with b:\n"), Edit(2, 2, "    "))
    assert merge([outer, inner]).findings == [outer]


def test_an_edit_that_findings_share_keeps_none_of_them_out():
    shared = Edit(0, 0, "import a\n")
    merged = merge([finding(shared, Edit(1, 2, "x")), finding(shared, Edit(2, 3, "y"))])
    assert apply_edits("abcd", merged.edits) == "import a\naxyd"
