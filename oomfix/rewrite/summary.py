"""What `oomfix apply` says: a line for each loop, the diffs, JSON."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from oomfix.report import printable
from oomfix.rewrite.facts.verdict import Form
from oomfix.rewrite.files import Change, FileOutcome
from oomfix.rewrite.proving import trial_text
from oomfix.script.syntax.patterns import Pattern
from oomfix.spelling import counted
from oomfix.terminal import broken

if TYPE_CHECKING:
    from oomfix.rewrite.proving.proof import Proof
    from oomfix.rewrite.proving.trial import Trial

CHANGING = ("OOM104", "OOM301", "OOM302", "OOM303", "OOM304")
"""Codes whose fixes make the training another one: what they mend trained wrongly."""

_LINE = Pattern(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_FORMS: dict[Form, str] = {"micro-batched": "micro-batched", "in-place": "in place", "none": "left alone"}


def as_text(
    outcomes: Sequence[FileOutcome],
    proof: Proof | None = None,
    trial: Trial | None = None,
    *,
    written: bool,
    loops: bool = True,
    width: int | None = None,
) -> str:
    """A line for each loop and for each kind of local fix, the totals, and what runs of the scripts found.

    Args:
        outcomes: what became of the files.
        proof, trial: what runs found.
        written: whether the files were written.
        loops: whether loops were looked at, and not local fixes alone.
        width: the columns of a terminal, where lines are broken; None: nowhere.
    """
    lines = [line for outcome in outcomes for line in _lines(outcome)]
    if lines:
        lines.append("")
    lines.append(_totals(outcomes, written, loops))
    if written and any(loop.rewrite != "none" for outcome in outcomes if outcome.changed for loop in outcome.loops):
        lines.append("OOMFIX_PRESET=off in the environment trains as before, in whole batches")
    if proof is not None:
        lines += ["", *proof.lines()]
    if trial is not None:
        lines += ["", *trial_text.lines(trial, mended(outcomes))]
    return "".join(f"{part}\n" for line in lines for part in broken(line, width))


def _totals(outcomes: Sequence[FileOutcome], written: bool, looked_at: bool) -> str:
    loops = Counter(loop.rewrite for outcome in outcomes for loop in outcome.loops)
    elsewhere = sum(loop.function is not None for outcome in outcomes for loop in outcome.loops)
    changed = sum(outcome.changed for outcome in outcomes)
    fixes = sum(len(outcome.fixed) for outcome in outcomes)
    forms = ", ".join(f"{loops[form]} {said}" for form, said in _FORMS.items() if loops[form])
    forms += f"; {elsewhere} in other files" if elsewhere else ""
    found = f"{counted(sum(loops.values()), 'training loop')} ({forms})" if loops else "no training loop"
    failed = sum(bool(outcome.errors) and not outcome.changed for outcome in outcomes)
    if not changed and failed and not loops:
        return f"nothing {'rewritten' if written else 'to rewrite'}: {counted(failed, 'file')} failed"
    if not changed:
        return f"nothing to rewrite: {found}" if looked_at else "no local fix to make; training loops stay as they are"
    verb = "rewritten" if written else "would be rewritten"
    done = [*([found] if loops else []), *([f"{counted(fixes, 'finding')} fixed"] if fixes else [])]
    return ": ".join(filter(None, (f"{counted(changed, 'file')} {verb}", ", ".join(done))))


def diffs(outcomes: Sequence[FileOutcome], *, colour: bool) -> str:
    """Unified diffs of all files that change."""
    return "".join(
        _coloured(line) if colour else line
        for outcome in outcomes
        for change in outcome.changes
        for line in _diff(printable(outcome.path), change)
    )


def as_json(outcomes: Sequence[FileOutcome], proof: Proof | None = None, trial: Trial | None = None) -> str:
    """Files with their edits, loops and errors; lines are those of the files before, 1-based, `end_line` included.

    In a notebook, loops and edits have a "cell", its 1-based number, and lines count within it. What runs of the
    scripts found stands under "proof" and "equivalence".
    """
    report: dict[str, Any] = {
        "version": 1,
        "files": [
            {
                "path": outcome.path,
                "changed": outcome.changed,
                "edits": [edit for change in outcome.changes for edit in _edits(change)],
            }
            for outcome in outcomes
            if outcome.changed or not outcome.errors
        ],
        "loops": loops_as_json(outcomes),
        "errors": [{"path": outcome.path, "message": error} for outcome in outcomes for error in outcome.errors],
    }
    if proof is not None:
        report["proof"] = proof.as_json()
    if trial is not None:
        report["equivalence"] = trial_text.as_json(trial)
    return json.dumps(report, indent=2) + "\n"


def loops_as_json(outcomes: Sequence[FileOutcome]) -> list[dict[str, Any]]:
    """Every training loop: where it is, its form after the rewrite, and why not more, or why its window stays."""
    return [
        {
            "path": outcome.path,
            **({} if loop.cell is None else {"cell": loop.cell}),
            "line": loop.line,
            "end_line": loop.end_line,
            "rewrite": loop.rewrite,
            "reason": "; ".join(filter(None, (loop.reason, loop.why_window_stays))) or None,
        }
        for outcome in outcomes
        for loop in outcome.loops
        if loop.function is None
    ]


def mended(outcomes: Sequence[FileOutcome]) -> list[str]:
    """What was mended that changes what is trained."""
    found = []
    for outcome in outcomes:
        path = printable(outcome.path)
        found += [f"{path}: {fix.code}: {fix.message}" for fix in outcome.fixed if fix.code in CHANGING]
    return found


def _lines(outcome: FileOutcome) -> Iterator[str]:
    path = printable(outcome.path)
    said_before: set[str] = set()
    for loop in outcome.loops:
        because = f": {loop.reason}" if loop.reason else ""
        cell = "" if loop.cell is None else f"cell {loop.cell}:"
        form = _FORMS[loop.rewrite]
        said = form if loop.function is None else f"{form}, in `{loop.function}`, whose loop is in another file"
        yield f"{path}:{cell}{loop.line}  {said}{because}"
        # one manager serves the file: what holds for all of its loops is said once
        for note in (note for note in loop.notes if note not in said_before):
            said_before.add(note)
            if any(left.message.endswith(note) for left in outcome.unfixed):
                continue
            yield f"{path}:{cell}{loop.line}  {note}"
    for code in sorted({fix.code for fix in outcome.fixed}):
        yield _fixed(path, code, sorted({(fix.cell, fix.line) for fix in outcome.fixed if fix.code == code}))
    for left in outcome.unfixed:
        cell = "" if left.cell is None else f"cell {left.cell}:"
        yield f"{path}:{cell}{left.line}  {left.code} not fixed: {left.message}"
    for note in outcome.notes:
        yield f"{path}  {note}"


def _fixed(path: str, code: str, places: Sequence[tuple[int | None, int]]) -> str:
    where = [str(line) if cell is None else f"cell {cell}:{line}" for cell, line in places]
    if len(where) == 1:
        return f"{path}:{where[0]}  {code} fixed"
    return f"{path}  {code} fixed in {'lines ' if places[0][0] is None else ''}{', '.join(where)}"


def _diff(path: str, change: Change) -> Iterator[str]:
    name = path.lstrip("/") if change.cell is None else f"{path.lstrip('/')}, cell {change.cell}"
    before, after = _LINE.findall(change.before), _LINE.findall(change.after)
    yield f"--- a/{name}\n"
    yield f"+++ b/{name}\n"
    for group in _matcher(before, after).get_grouped_opcodes():
        _, start, _, new_start, _ = group[0]
        _, _, stop, _, new_stop = group[-1]
        yield f"@@ -{_range(start, stop)} +{_range(new_start, new_stop)} @@\n"
        for tag, start, stop, new_start, new_stop in group:
            if tag == "equal":
                yield from _marked(" ", before[start:stop])
            else:
                yield from _marked("-", before[start:stop])
                yield from _marked("+", after[new_start:new_stop])


def _matcher(before: Sequence[str], after: Sequence[str]) -> difflib.SequenceMatcher[str]:
    # autojunk would take the blank lines of long files out and put them in again
    return difflib.SequenceMatcher(None, before, after, autojunk=False)


def _range(start: int, stop: int) -> str:
    """Lines as a unified diff counts them; of none, the line ahead of them is named."""
    count = stop - start
    return f"{start + 1}" if count == 1 else f"{start + (count > 0)},{count}"


def _marked(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield mark + line if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"


def _coloured(line: str) -> str:
    if line.startswith(("+++", "---")):
        return click.style(line, bold=True)
    colours = {"+": "green", "-": "red", "@": "cyan"}
    return click.style(line, fg=colours[line[0]]) if line[:1] in colours else line


def _edits(change: Change) -> Iterator[dict[str, Any]]:
    """Runs of lines that are replaced; an insertion has an `end_line` before its `line`."""
    before, after = _LINE.findall(change.before), _LINE.findall(change.after)
    for tag, start, stop, new_start, new_stop in _matcher(before, after).get_opcodes():
        if tag != "equal":
            edit = {"line": start + 1, "end_line": stop, "replacement": "".join(after[new_start:new_stop])}
            yield edit if change.cell is None else {"cell": change.cell, **edit}
