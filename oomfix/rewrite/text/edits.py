"""Edits: replacing spans of a text, all of them or none; the edits of several findings merged."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

from oomfix.parsing import Unreadable, parse
from oomfix.rules.base import Edit, Finding
from oomfix.source import Source


class EditsOverlap(ValueError):
    """Edits that cannot be made together: a defect of whoever made them."""


class EditsBreakSource(ValueError):
    """Edits that leave a text which is no Python: a defect of whoever made them."""


def with_text(source: Source, text: str) -> Source:
    """A source with a new text; the same object where nothing changed.

    Raises:
        EditsBreakSource: the new text is no Python.
    """
    if text == source.text:
        return source
    try:
        tree = parse(text)
    except Unreadable as problem:
        raise EditsBreakSource(str(problem)) from problem
    return Source(source.path, text, tree, encoding=source.encoding, bom=source.bom)


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with every edit made; whatever lies outside their spans is untouched.

    Insertions at the same offset are made in the order given.

    Findings that only make sense together share their edits: the same object given again is one edit, and so is a
    replacement equal to another. Insertions that are merely equal are each made: two blocks nested in each other may
    both be indented.

    `merge` gives the edits of findings that do not know of each other.

    Raises:
        EditsOverlap: two edits overlap.
        ValueError: an edit lies outside the text.
    """
    pieces = []
    done = 0
    for edit in sorted(_once(list(edits)), key=lambda edit: (edit.start, edit.end)):
        if not 0 <= edit.start <= edit.end <= len(text):
            raise ValueError(f"edit {edit}: expected a span inside the {len(text)} characters of the text")
        if edit.start < done:
            raise EditsOverlap(f"edit {edit}: overlaps the one before it, which ends at {done}")
        pieces += [text[done : edit.start], edit.replacement]
        done = edit.end
    return "".join(pieces) + text[done:]


def _once(edits: list[Edit]) -> Iterable[Edit]:
    """The edits without what is given twice."""
    return {id(edit) if edit.start == edit.end else edit: edit for edit in edits}.values()


def line_before(text: str, edits: Iterable[Edit], line: int) -> int:
    """The line (1-based) of a text that became line `line` after the edits.

    What an edit put there has no line of its own, and gets that of the place where it was put.
    """
    edits = list(edits)
    lines = apply_edits(text, edits).split("\n")
    offset = sum(len(before) + 1 for before in lines[: line - 1])
    grown = 0
    for edit in sorted(_once(edits), key=lambda edit: (edit.start, edit.end)):
        start = edit.start + grown
        if offset < start:
            break
        if offset < start + len(edit.replacement):
            return text.count("\n", 0, edit.start) + 1
        grown += len(edit.replacement) - (edit.end - edit.start)
    return text.count("\n", 0, offset - grown) + 1


class Shift:
    """Where what edits leave as it is stands once they are made.

    Args:
        edits: those of a text, which do not overlap.
    """

    def __init__(self, edits: Iterable[Edit]) -> None:
        self._edits = sorted(_once(list(edits)), key=lambda edit: (edit.start, edit.end))
        self._ends = [edit.end for edit in self._edits]
        grown = (len(edit.replacement) - (edit.end - edit.start) for edit in self._edits)
        self._grown = list(accumulate(grown, initial=0))

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """The new place of a span that is not empty; None where an edit replaces one of its ends and not the other.

        What is inserted at its start stands before it, what is inserted at its end behind it.
        """
        first = last = bisect_right(self._ends, start)
        while last < len(self._edits) and self._edits[last].start < end and self._ends[last] <= end:
            last += 1
        cut = self._edits[first : first + 1] + self._edits[last : last + 1]
        if any(edit.start < start < edit.end or edit.start < end < edit.end for edit in cut):
            return None
        return start + self._grown[first], end + self._grown[last]


def with_lines(said: str, line: Callable[[int], int | str]) -> str:
    """What was said of a text, with other numbers (or words) in place of those of its lines."""
    return re.sub(r"\bline (\d+)", lambda found: f"line {line(int(found[1]))}", said)


class Merged(NamedTuple):
    """The findings that can be mended at once, and the edits that do it, for `apply_edits`."""

    findings: list[Finding]
    edits: list[Edit]


def merge(findings: Iterable[Finding]) -> Merged:
    """The local fixes of a text's findings as far as they can be made together, first come first served.

    Findings with the same edits are mended by making them once: two forwards of one function need one
    `@torch.no_grad()`. A finding whose edits overlap those before it is left out, and so is one that would insert the
    same text at the same place as another fix: only the findings of the new text tell whether it is needed still.
    """
    merged = Merged([], [])
    for finding in findings:
        if any(finding.edits == other.edits for other in merged.findings):
            merged.findings.append(finding)
        elif not any(_collide(edit, other) for edit in finding.edits for other in merged.edits):
            merged.edits.extend(finding.edits)
            merged.findings.append(finding)
    return merged


def _collide(edit: Edit, other: Edit) -> bool:
    """Whether two edits cannot be made together, or would do the same thing twice."""
    if edit is other:
        return False
    if edit.start == edit.end and other.start == other.end:
        return edit == other
    return edit == other or (edit.start < other.end and other.start < edit.end)
