"""Everything a program may want to know: findings, training loops and errors in one JSON object."""

from __future__ import annotations

import json
from typing import Any

from oomfix.report import Report, Statistic
from oomfix.results import Located

VERSION = 1


def render(report: Report) -> str:
    """The report as `{"version": 1, "findings": [...], "loops": [...], "errors": [...]}`.

    In a notebook findings and loops have a "cell" as well, and lines count within it.
    """
    return _document(
        findings=[_finding(path, finding) for path, finding in report.findings()],
        loops=[{"path": file.path, **loop} for file in report.files for loop in file.loops],
        errors=[{"path": path, "message": message} for path, message in report.errors()],
    )


def render_statistics(report: Report, statistics: list[Statistic]) -> str:
    """The number of findings of each rule in place of the findings, and the errors."""
    return _document(
        statistics=[
            {"code": row.code, "name": row.name, "severity": row.severity, "count": row.times} for row in statistics
        ],
        errors=[{"path": path, "message": message} for path, message in report.errors()],
    )


def _document(**content: list[dict[str, Any]]) -> str:
    return json.dumps({"version": VERSION, **content}, indent=2) + "\n"


def _finding(path: str, finding: Located) -> dict[str, Any]:
    row = {
        "path": path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "message": finding.message,
        "fix": finding.fix,
    }
    return row if finding.cell is None else row | {"cell": finding.cell}
