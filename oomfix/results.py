"""What an audit yields: findings at their place in a file with all that a report shows, and loops."""

from __future__ import annotations

from typing import Any, NamedTuple

from oomfix.parsing import split_lines
from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules.base import Edit, Finding
from oomfix.source import Source

CONTEXT_LINES = 2
"""How many lines a report shows above and below the line of a finding."""


class Change(NamedTuple):
    """An edit as lines and columns of the file or cell: 1-based, in characters, end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int
    replacement: str


class Located(NamedTuple):
    """A finding at its place in a file. Lines count within the cell where `cell` is a number.

    Attributes:
        severity: "error", "warning" or "note".
        fix: "local", "runtime" or None, as in `Finding.fix`.
        changes: the edits of a local fix.
        context_line: the number of the first line in `context`.
        context: the lines around the finding's line, `CONTEXT_LINES` on each side where the file has them.
        fixed: the lines at the finding after its local fix, without their indentation.
        silenced_by: the indices of the `# oomfix:` comments of the file that name it.
    """

    code: str
    name: str
    severity: str
    message: str
    cell: int | None
    line: int
    column: int
    end_line: int
    end_column: int
    fix: str | None
    changes: tuple[Change, ...]
    context_line: int
    context: tuple[str, ...]
    fixed: tuple[str, ...]
    silenced_by: tuple[int, ...]

    @property
    def text(self) -> str:
        """The finding's first line, without its indentation."""
        return self.context[self.line - self.context_line].strip()


class Silencer(NamedTuple):
    """A `# oomfix:` comment: the codes it names (none: all), and the finding it is if it silences nothing."""

    codes: tuple[str, ...]
    problem: str | None
    unused: Located


class FileReport(NamedTuple):
    """What the audit found in one file.

    Attributes:
        findings: every finding of every rule, those that a comment silences too, by line and column.
        loops: the training loops as `TrainingLoop.to_json` gives them, with "cell" in a notebook.
        errors: what could not be read, one plain line each.
        silencers: the file's `# oomfix:` comments.
        parsed: False where the file holds no word that any rule needs, and was not parsed.
        foreign: what the file is if it is no Python, which is an error only where it was named.
    """

    findings: tuple[Located, ...] = ()
    loops: tuple[dict[str, Any], ...] = ()
    errors: tuple[str, ...] = ()
    silencers: tuple[Silencer, ...] = ()
    parsed: bool = True
    foreign: str | None = None


def locate(source: Source, finding: Finding, silenced_by: tuple[int, ...] = ()) -> Located:
    """The finding at its place in the file, with the lines that a report shows."""
    cell, line = source.locate(finding.line)
    above = min(CONTEXT_LINES, line - 1)
    context = [
        source.written(number)
        for number in range(finding.line - above, finding.line + CONTEXT_LINES + 1)
        if _is_line_of(source, cell, number)
    ]
    return Located(
        code=finding.code,
        name=finding.name,
        severity=finding.severity.value,
        message=finding.message,
        cell=cell,
        line=line,
        column=source.written_column(finding.line, finding.column),
        end_line=source.locate(finding.end_line)[1],
        end_column=source.written_column(finding.end_line, finding.end_column),
        fix=finding.fix,
        changes=tuple(_change(source, *edit) for edit in finding.edits),
        context_line=line - above,
        context=tuple(context),
        fixed=_fixed_lines(source, finding),
        silenced_by=silenced_by,
    )


def _is_line_of(source: Source, cell: int | None, number: int) -> bool:
    """Whether a file or cell has this line; what follows its last newline is none."""
    if number > len(source.lines) or source.locate(number)[0] != cell:
        return False
    is_last = number == len(source.lines) or source.locate(number + 1)[0] != cell
    return not is_last or bool(source.written(number))


def _change(source: Source, start: int, end: int, replacement: str) -> Change:
    line, column = source.position(start)
    end_line, end_column = source.position(end)
    return Change(
        source.locate(line)[1],
        source.written_column(line, column),
        source.locate(end_line)[1],
        source.written_column(end_line, end_column),
        replacement,
    )


def _fixed_lines(source: Source, finding: Finding) -> tuple[str, ...]:
    """What the finding's own lines become; where they stay as they are, what is put around them.

    Edits elsewhere that belong to the same fix (an import at the top) are not shown.
    """
    first = source.line_starts[finding.line - 1]
    last = source.line_starts[finding.end_line - 1] + len(source.lines[finding.end_line - 1])
    here = [edit for edit in finding.edits if edit.start <= last and edit.end >= first]
    return _changed_lines(source, here, first, last) or _changed_lines(source, list(finding.edits), first, last)


def _changed_lines(source: Source, edits: list[Edit], first: int, last: int) -> tuple[str, ...]:
    """The lines that edits make of a span, without those that only move."""
    start = min(first, *(edit.start for edit in edits)) if edits else first
    end = max(last, *(edit.end for edit in edits)) if edits else last
    moved = [edit._replace(start=edit.start - start, end=edit.end - start) for edit in edits]
    before = {line.strip() for line in split_lines(source.text[start:end])}
    after = [line.strip() for line in split_lines(apply_edits(source.text[start:end], moved))]
    return tuple(line for line in after if line and line not in before)
