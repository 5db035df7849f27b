"""Damaged real files: reported or refused, never a crash."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomfix.audit import Auditor
from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules import all_rules
from oomfix.rules.base import Edit
from oomfix.script import Script
from oomfix.source import Source

FIXTURES = sorted((Path(__file__).resolve().parents[2] / "fixtures").rglob("*.py"))
EXAMPLES = [invalid.code.encode() for rule in all_rules() for invalid in rule.INVALID]
FILES = EXAMPLES + [path.read_bytes() for path in FIXTURES]
AUDITOR = Auditor(all_rules())
SNIPPETS = [
    b"\0",
    b"\xff",
    b"\r",
    b"\t",
    b"\f",
    b"(",
    b")",
    b"]",
    b":",
    b"'''",
    b"\\\n",
    b"await ",
    b"*",
    b"lambda: ",
    b"=",
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real file with lines dropped, doubled or moved, and bytes put in or cut out."""
    lines = draw(st.sampled_from(FILES)).splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(lines) - 1, 0)))
        other = draw(st.integers(0, max(len(lines) - 1, 0)))
        kind = draw(st.sampled_from(["drop", "double", "swap", "put", "cut", "dedent"]))
        if not lines:
            break
        if kind == "drop":
            del lines[at]
        elif kind == "double":
            lines.insert(other, lines[at])
        elif kind == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == "put":
            column = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + draw(st.sampled_from(SNIPPETS)) + lines[at][column:]
        elif kind == "cut":
            column = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + b"\n"
        else:
            lines[at] = lines[at][4:] if lines[at].startswith(b"    ") else b"    " + lines[at]
    return b"".join(lines)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=damaged(), as_notebook=st.booleans())
def test_a_damaged_file_is_reported_or_refused_in_plain_lines(data: bytes, as_notebook: bool):
    if as_notebook:
        cells = data.decode("utf-8", "replace").split("\n\n")
        data = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()
    report = AUDITOR.audit("a.ipynb" if as_notebook else "a.py", data, parse_always=True)
    for message in report.errors:
        assert "internal error" not in message
        assert "\n" not in message
    for finding in report.findings:
        assert 1 <= finding.line <= finding.end_line
        assert finding.column >= 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=damaged(), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_every_local_fix_of_a_damaged_file_leaves_python_and_every_other_byte(data: bytes, newline: bytes):
    data = b"\n".join(data.splitlines()).replace(b"\n", newline)
    report = AUDITOR.audit("a.py", data, parse_always=True)
    if report.errors:
        return
    source = Source.from_bytes("a.py", data)
    script = Script.read(source, None)
    for rule in AUDITOR.rules:
        for finding in rule.check(script):
            edits: tuple[Edit, ...] = finding.edits
            fixed = apply_edits(source.text, edits)
            ast.parse(fixed)
            first = min((edit.start for edit in edits), default=0)
            last = max((edit.end for edit in edits), default=0)
            assert fixed.startswith(source.text[:first])
            assert fixed.endswith(source.text[last:])
