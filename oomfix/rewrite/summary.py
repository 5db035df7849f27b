"""What `oomfix apply` says: a line for each loop, the diffs, JSON."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from oomfix.rewrite.files import FileOutcome
from oomfix.rewrite.loops import Form

_FORMS: dict[Form, str] = {"micro-batched": "micro-batched", "in-place": "in place", "none": "left alone"}


def as_text(outcomes: Sequence[FileOutcome], *, written: bool) -> str:
    """One line for each loop and for each kind of local fix, then the totals."""
    lines = [line for outcome in outcomes for line in _lines(outcome)]
    loops = Counter(loop.rewrite for outcome in outcomes for loop in outcome.loops)
    changed = sum(outcome.changed for outcome in outcomes)
    fixes = sum(len(outcome.fixed) for outcome in outcomes)
    if lines:
        lines.append("")
    counted = ", ".join(f"{loops[form]} {said}" for form, said in _FORMS.items() if loops[form])
    verb = "rewritten" if written else "would be rewritten"
    total = f"{_many(changed, 'file')} {verb}: {_many(sum(loops.values()), 'training loop')}"
    lines.append(f"{total}{f' ({counted})' if counted else ''}, {_many(fixes, 'local fix', 'local fixes')}")
    return "".join(f"{line}\n" for line in lines)


def diffs(outcomes: Sequence[FileOutcome], *, colour: bool) -> str:
    """Unified diffs of all files that change."""
    return "".join(
        _coloured(line) if colour else line for outcome in outcomes if outcome.changed for line in _diff(outcome)
    )


def as_json(outcomes: Sequence[FileOutcome]) -> str:
    """Files with their edits, loops and errors; lines are those of the files before, 1-based, `end_line` included."""
    report = {
        "version": 1,
        "files": [
            {"path": outcome.path, "changed": outcome.changed, "edits": list(_edits(outcome))}
            for outcome in outcomes
            if not outcome.errors
        ],
        "loops": [
            {
                "path": outcome.path,
                "line": loop.line,
                "end_line": loop.end_line,
                "rewrite": loop.rewrite,
                "reason": loop.reason,
            }
            for outcome in outcomes
            for loop in outcome.loops
        ],
        "errors": [{"path": outcome.path, "message": error} for outcome in outcomes for error in outcome.errors],
    }
    return json.dumps(report, indent=2) + "\n"


def _lines(outcome: FileOutcome) -> Iterator[str]:
    for loop in outcome.loops:
        because = f": {loop.reason}" if loop.reason else ""
        yield f"{outcome.path}:{loop.line}  {_FORMS[loop.rewrite]}{because}"
    for code, count in sorted(Counter(fix.code for fix in outcome.fixed).items()):
        yield f"{outcome.path}  {code} fixed" + (f" {count} times" if count > 1 else "")
    if outcome.backup is not None:
        yield f"{outcome.path}  old content kept in {outcome.backup}"


def _many(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def _diff(outcome: FileOutcome) -> Iterator[str]:
    before, after = outcome.before.splitlines(keepends=True), outcome.after.splitlines(keepends=True)
    for line in difflib.unified_diff(before, after, f"a/{outcome.path}", f"b/{outcome.path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _coloured(line: str) -> str:
    if line.startswith(("+++", "---")):
        return click.style(line, bold=True)
    colours = {"+": "green", "-": "red", "@": "cyan"}
    return click.style(line, fg=colours[line[0]]) if line[:1] in colours else line


def _edits(outcome: FileOutcome) -> Iterator[dict[str, Any]]:
    """Runs of lines that are replaced; an insertion has an `end_line` before its `line`."""
    before, after = outcome.before.splitlines(keepends=True), outcome.after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, start, stop, new_start, new_stop in matcher.get_opcodes():
        if tag != "equal":
            yield {"line": start + 1, "end_line": stop, "replacement": "".join(after[new_start:new_stop])}
