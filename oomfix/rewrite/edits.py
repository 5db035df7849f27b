"""Edits: replacing spans of a text, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable

from oomfix.rules.base import Edit


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with every edit made; whatever lies outside their spans is untouched.

    Insertions at the same offset are made in the order given.

    Raises:
        ValueError: an edit lies outside the text, or two edits overlap.
    """
    pieces = []
    done = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if not 0 <= edit.start <= edit.end <= len(text):
            raise ValueError(f"edit {edit}: expected a span inside the {len(text)} characters of the text")
        if edit.start < done:
            raise ValueError(f"edit {edit}: overlaps the one before it, which ends at {done}")
        pieces += [text[done : edit.start], edit.replacement]
        done = edit.end
    return "".join(pieces) + text[done:]
