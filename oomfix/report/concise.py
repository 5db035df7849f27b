"""One line for each finding: `path:line:column CODE message`, for editors, grep and people in a hurry."""

from __future__ import annotations

from oomfix.report import Report, Statistic, place, printable


def render(report: Report) -> str:
    """A line for each finding."""
    return "".join(
        f"{place(path, finding)} {finding.code} {printable(finding.message)}\n" for path, finding in report.findings()
    )


def render_statistics(statistics: list[Statistic]) -> str:
    """A line for each rule: how often, its code, its severity, its name."""
    width = max((len(str(row.times)) for row in statistics), default=0)
    return "".join(f"{row.times:>{width}}  {row.code}  {row.severity:<7}  {row.name}\n" for row in statistics)
