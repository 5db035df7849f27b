"""The JSON of a notebook with the sources of some cells replaced, and without those left empty; the rest as it was."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from oomfix.rewrite.text.edits import apply_edits
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.patterns import Pattern

_SPACE = Pattern(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class CannotRestore(Exception):
    """A rewritten text that cannot be put back into a notebook; the message is one plain line that says why."""


class Span(NamedTuple):
    """A JSON value: where it starts, and where it ends, in characters of the document."""

    start: int
    end: int


def replace_sources(data: bytes, sources: Mapping[int, str]) -> bytes:
    """A notebook with other sources in some cells. Lines that stay are spelled as they were, escapes included.

    A cell that is left without a source goes, unless it has outputs.

    Args:
        data: the notebook, nbformat 3 or 4.
        sources: 1-based number of a cell among all cells -> its new source, newlines as "\\n".

    Raises:
        CannotRestore: a source is no text, or mixes line ends.
        UnicodeEncodeError: a source has characters that the encoding of the notebook has not.
    """
    encoding = json.detect_encoding(data)  # type: ignore[attr-defined]
    text = data.decode(encoding, "surrogatepass")
    cells = list(_cells(text))
    emptied = {number for number, source in sources.items() if not source.strip()}
    gone = {number for number in emptied if _has_no_outputs(text, cells[number - 1])}
    edits = [Edit(*span, "") for span in _with_commas(cells, gone)]
    for number in sources.keys() - gone:
        span = _source(text, cells[number - 1])
        try:
            edits.append(Edit(*span, _respelled(text[span.start : span.end], sources[number])))
        except CannotRestore as reason:
            raise CannotRestore(f"cell {number}: {reason}") from None
    return apply_edits(text, edits).encode(encoding, "surrogatepass")


def _has_no_outputs(text: str, cell: Span) -> bool:
    outputs = _members(text, cell.start).get("outputs")
    return outputs is None or not _DECODER.raw_decode(text, outputs.start)[0]


def _with_commas(cells: Sequence[Span], gone: Set[int]) -> Iterator[Span]:
    """The cells with these numbers, with what parts them from the others."""
    last = max(number for number in range(1, len(cells) + 1) if number not in gone)
    for number in gone:
        if number < last:
            yield Span(cells[number - 1].start, cells[number].start)
    if last < len(cells):
        yield Span(cells[last - 1].end, cells[-1].end)


def _cells(text: str) -> Iterator[Span]:
    notebook = _members(text, _skip(text, 0))
    if "cells" in notebook:
        return _elements(text, notebook["cells"].start)
    sheet = next(_elements(text, notebook["worksheets"].start))  # nbformat 3
    return _elements(text, _members(text, sheet.start)["cells"].start)


def _source(text: str, cell: Span) -> Span:
    members = _members(text, cell.start)
    return members["source"] if "source" in members else members["input"]


def _skip(text: str, index: int) -> int:
    match = _SPACE.match(text, index)
    assert match is not None  # it matches nothing at all, too
    return match.end()


def _members(text: str, start: int) -> dict[str, Span]:
    """The values of an object by key; of a key given twice the last one counts, as when it is decoded."""
    members = {}
    index = _skip(text, start + 1)
    while text[index] != "}":
        key, index = _DECODER.raw_decode(text, index)
        value = _skip(text, _skip(text, index) + 1)  # behind the colon
        end = _DECODER.raw_decode(text, value)[1]
        members[key] = Span(value, end)
        index = _next(text, end)
    return members


def _elements(text: str, start: int) -> Iterator[Span]:
    index = _skip(text, start + 1)
    while text[index] != "]":
        end = _DECODER.raw_decode(text, index)[1]
        yield Span(index, end)
        index = _next(text, end)


def _next(text: str, end: int) -> int:
    """The start of the next member or element, or the closing bracket."""
    index = _skip(text, end)
    return _skip(text, index + 1) if text[index] == "," else index


def _respelled(raw: str, source: str) -> str:
    """A source as JSON in the form of the one it replaces: one string, or a list of lines."""
    ascii_only = raw.isascii()
    spans = list(_elements(raw, 0)) if raw.startswith("[") else [Span(0, len(raw))]
    spelled = [raw[span.start : span.end] for span in spans]
    before = [_DECODER.decode(element) for element in spelled]
    if not all(isinstance(line, str) for line in before):
        raise CannotRestore("its source is no text")
    source = _with_newlines_of("".join(before), source)
    if not raw.startswith("["):
        return json.dumps(source, ensure_ascii=ascii_only)
    after = re.findall(r"[^\n]*\n|[^\n]+", source)
    elements: list[str] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, start, stop, new_start, new_stop in matcher.get_opcodes():
        if tag == "equal":
            elements += spelled[start:stop]
        else:
            elements += [json.dumps(line, ensure_ascii=ascii_only) for line in after[new_start:new_stop]]
    opening = raw[1 : spans[0].start] if spans else ""
    between = raw[spans[0].end : spans[1].start] if len(spans) > 1 else f",{opening or ' '}"
    closing = raw[spans[-1].end : -1] if spans else ""
    return f"[{opening}{between.join(elements)}{closing}]"


def _with_newlines_of(before: str, after: str) -> str:
    """A text whose newlines are "\\n" with those of another text."""
    found = set(re.findall(r"\r\n|\r|\n", before))
    if len(found) > 1:
        raise CannotRestore("it mixes line ends")
    return after.replace("\n", found.pop()) if found else after
