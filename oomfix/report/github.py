"""Workflow commands that GitHub Actions turns into annotations of the changed lines."""

from __future__ import annotations

from oomfix.report import Report
from oomfix.results import Located

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MESSAGE_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY_ESCAPES = _MESSAGE_ESCAPES | {":": "%3A", ",": "%2C"}


def render(report: Report) -> str:
    """A line for each finding and each error."""
    lines = [_annotation(path, finding) for path, finding in report.findings()]
    lines += [f"::error file={_property(path)}::{_message(message)}" for path, message in report.errors()]
    return "".join(line + "\n" for line in lines)


def _annotation(path: str, finding: Located) -> str:
    title = f"{finding.code} {finding.name}"
    if finding.cell is not None:
        # GitHub counts the lines of the JSON file, so that a line of a cell would point to another place
        where = f"cell {finding.cell}, line {finding.line}, column {finding.column}: "
        properties = f"file={_property(path)},title={_property(title)}"
        return f"::{_LEVELS[finding.severity]} {properties}::{_message(where + finding.message)}"
    properties = f"file={_property(path)},line={finding.line},endLine={finding.end_line}"
    if finding.line == finding.end_line:  # GitHub refuses columns over several lines
        properties += f",col={finding.column},endColumn={finding.end_column}"
    properties += f",title={_property(title)}"
    return f"::{_LEVELS[finding.severity]} {properties}::{_message(finding.message)}"


def _message(text: str) -> str:
    return "".join(_MESSAGE_ESCAPES.get(char, char) for char in text)


def _property(text: str) -> str:
    return "".join(_PROPERTY_ESCAPES.get(char, char) for char in text)
