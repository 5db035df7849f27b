"""How findings are shown: rich, concise, json, sarif and github."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from oomfix.results import Located

SEVERITIES = ("error", "warning", "note")


class AuditedFile(NamedTuple):
    """A path and what is to be shown of it; a path that could not be audited has only errors.

    Attributes:
        known: the number of findings that a baseline leaves out.
    """

    path: str
    findings: Sequence[Located] = ()
    loops: Sequence[dict[str, Any]] = ()
    errors: Sequence[str] = ()
    known: int = 0


class Report(NamedTuple):
    """A run of the audit, as every format shows it."""

    files: Sequence[AuditedFile]

    def findings(self) -> Iterator[tuple[str, Located]]:
        """Every finding with its path, in the order in which they are shown."""
        return ((file.path, finding) for file in self.files for finding in file.findings)

    def errors(self) -> Iterator[tuple[str, str]]:
        """The path and the message of everything that could not be audited."""
        return ((file.path, message) for file in self.files for message in file.errors)

    def counts(self) -> Counter[str]:
        """How many findings there are of each severity."""
        return Counter(finding.severity for _, finding in self.findings())


class Statistic(NamedTuple):
    """How often a rule was reported with a severity."""

    times: int
    code: str
    name: str
    severity: str


def statistics(report: Report) -> list[Statistic]:
    """The rules that were reported, most frequent first."""
    counts = Counter((finding.code, finding.name, finding.severity) for _, finding in report.findings())
    rows = (Statistic(count, *key) for key, count in counts.items())
    return sorted(rows, key=lambda row: (-row.times, row.code))


def place(path: str, finding: Located) -> str:
    """`path:line:column`, or `path:cell N:line:column` in a notebook."""
    cell = "" if finding.cell is None else f"cell {finding.cell}:"
    return f"{printable(path)}:{cell}{finding.line}:{finding.column}"


def printable(text: str) -> str:
    """A text without what would move a terminal's cursor or change its colours."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
