"""Edits: replacing spans of a text, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable

from oomfix.rules.base import Edit


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with every edit made; whatever lies outside their spans is untouched.

    Insertions at the same offset are made in the order given.

    Findings that only make sense together share their edits: the same object given again is one edit, and so is a
    replacement equal to another. Insertions that are merely equal are each made: two blocks nested in each other may
    both be indented.

    Raises:
        ValueError: an edit lies outside the text, or two edits overlap.
    """
    pieces = []
    done = 0
    for edit in sorted(_once(list(edits)), key=lambda edit: (edit.start, edit.end)):
        if not 0 <= edit.start <= edit.end <= len(text):
            raise ValueError(f"edit {edit}: expected a span inside the {len(text)} characters of the text")
        if edit.start < done:
            raise ValueError(f"edit {edit}: overlaps the one before it, which ends at {done}")
        pieces += [text[done : edit.start], edit.replacement]
        done = edit.end
    return "".join(pieces) + text[done:]


def _once(edits: list[Edit]) -> Iterable[Edit]:
    """The edits without what is given twice."""
    return {id(edit) if edit.start == edit.end else edit: edit for edit in edits}.values()
