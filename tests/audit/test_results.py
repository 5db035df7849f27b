"""Findings at their place, with what a report shows of them."""

from __future__ import annotations

import json

from oomfix.results import Change, locate
from oomfix.rules.base import Edit, Finding, Severity
from oomfix.source import Source


def finding(source: Source, line: int, *edits: Edit, end_line: int | None = None) -> Finding:
    end_line = end_line or line
    end = len(source.lines[end_line - 1]) + 1
    return Finding("OOM901", "mark", Severity.NOTE, "a mark", line, 1, end_line, end, edits=edits)


def test_the_context_ends_with_the_cell():
    cells = [{"cell_type": "code", "source": text} for text in ("a = 1\nb = 2", "c = 3", "d = 4")]
    source = Source.from_bytes("a.ipynb", json.dumps({"cells": cells}).encode())
    found = locate(source, finding(source, 3))
    assert (found.cell, found.line, found.context_line, found.context) == (2, 1, 1, ("c = 3",))


def test_the_context_ends_with_the_file():
    source = Source.from_bytes("a.py", b"a\nb\nc\nd\ne\nf\ng")
    assert locate(source, finding(source, 1)).context == ("a", "b", "c")
    middle = locate(source, finding(source, 4))
    assert (middle.context_line, middle.context, middle.text) == (2, ("b", "c", "d", "e", "f"), "d")
    assert locate(source, finding(source, 7)).context == ("e", "f", "g")


def test_what_follows_the_last_newline_is_no_line():
    source = Source.from_bytes("a.py", b"a\nb\n\n")
    assert locate(source, finding(source, 1)).context == ("a", "b", "")
    assert locate(Source.from_bytes("a.py", b"a\n"), finding(source, 1)).context == ("a",)
    cells = [{"cell_type": "code", "source": text} for text in ("a = 1\n", "b = 2\n\n")]
    source = Source.from_bytes("a.ipynb", json.dumps({"cells": cells}).encode())
    assert locate(source, finding(source, 1)).context == ("a = 1",)
    assert locate(source, finding(source, 3)).context == ("b = 2", "")


def test_the_fix_shows_the_line_of_the_finding_not_the_import_above():
    source = Source.from_bytes("a.py", b"import os\r\n\r\nif x:\r\n    y += z\r\n")
    start = source.text.index("z")
    found = locate(source, finding(source, 4, Edit(0, 0, "import torch\r\n"), Edit(start + 1, start + 1, ".detach()")))
    assert found.fixed == ("y += z.detach()",)
    assert found.changes == (Change(1, 1, 1, 1, "import torch\r\n"), Change(4, 11, 4, 11, ".detach()"))


def test_a_fix_of_several_lines_shows_those_that_change():
    source = Source.from_bytes("a.py", b"x = f(\n    a,\n    b,\n)\n")
    start = source.text.index("b,")
    found = locate(source, finding(source, 1, Edit(start, start + 1, "b.detach()"), end_line=4))
    assert found.fixed == ("b.detach(),",)


def test_a_removal_leaves_no_line_to_show():
    source = Source.from_bytes("a.py", b"for x in y:\n    f()\n    g()\n")
    start = source.line_starts[2]
    assert locate(source, finding(source, 3, Edit(start, len(source.text), ""))).fixed == ()
