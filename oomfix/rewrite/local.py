"""The local fixes of a file's findings, all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from oomfix.rewrite.edits import apply_edits
from oomfix.rules.base import Edit, Finding, Rule
from oomfix.script import Script
from oomfix.source import Source, Unreadable, parse

_MOST_PASSES = 5
"""A fix may uncover another (a nested `with`); more passes than this would mean that fixes undo each other."""


class Fixed(NamedTuple):
    """A finding that was fixed, with its line in the text it was found in."""

    code: str
    line: int
    message: str


class LocalFixes(NamedTuple):
    """The text after its local fixes, and what they were."""

    text: str
    fixed: tuple[Fixed, ...]


def fix_locally(
    source: Source,
    rules: Sequence[Rule],
    wants: Callable[[str], bool] = lambda code: True,
    target_torch: tuple[int, int] | None = None,
) -> LocalFixes:
    """Make the local edits of every wanted finding, until none is left to make.

    Fixes that overlap are made one after the other, each on the result of the one before. The edits of one finding
    are made together or not at all. A fix whose result does not parse is left out.

    Args:
        source: the file.
        rules: the rules to ask.
        wants: whether findings of a code are to be fixed; those silenced by a comment are not passed on.
        target_torch: the oldest torch that the script must run on.
    """
    fixed: list[Fixed] = []
    refused: set[tuple[str, str]] = set()
    current = source
    for _ in range(_MOST_PASSES):
        findings = [
            finding
            for finding in findings_of(current, rules, target_torch)
            if finding.edits and wants(finding.code) and (finding.code, _line(current, finding)) not in refused
        ]
        if not findings:
            break
        made, text = _compatible(current, findings)
        try:
            tree = parse(text)
        except Unreadable:
            made, text, tree = _one_that_parses(current, made)
        refused |= {(finding.code, _line(current, finding)) for finding in findings if finding.edits and not made}
        if not made:
            break
        fixed += [Fixed(finding.code, finding.line, finding.message) for finding in made]
        current = Source(source.path, text, tree, encoding=source.encoding, bom=source.bom)
    return LocalFixes(current.text, tuple(fixed))


def findings_of(source: Source, rules: Sequence[Rule], target_torch: tuple[int, int] | None = None) -> list[Finding]:
    """What the rules find in a source and no `# oomfix: ignore` comment silences, by line and column."""
    from oomfix.suppressions import Statements, comments

    data = source.text.encode("utf-8", "surrogatepass")
    script = Script.read(source, target_torch)
    silencers = [comment for comment in comments(source) if not comment.problem]
    statements = Statements(source.tree) if silencers else None
    findings: list[Finding] = []
    for rule in rules:
        if any(word in data for word in rule.needs):
            findings += rule.check(script)
    if statements is not None:
        findings = [
            finding
            for finding in findings
            if not any(
                comment.names(finding.code) and (comment.whole_file or comment.line in statements.lines(finding.line))
                for comment in silencers
            )
        ]
    return sorted(dict.fromkeys(findings), key=lambda finding: (finding.line, finding.column, finding.code))


def _line(source: Source, finding: Finding) -> str:
    return source.lines[finding.line - 1].strip()


def _compatible(source: Source, findings: Sequence[Finding]) -> tuple[list[Finding], str]:
    """The findings whose edits can be made at once, first come first served, and the text after them."""
    made: list[Finding] = []
    edits: list[Edit] = []
    text = source.text
    for finding in findings:
        if any(_collide(edit, other) for edit in finding.edits for other in edits):
            continue
        try:
            text = apply_edits(source.text, [*edits, *finding.edits])
        except ValueError:
            continue
        edits += finding.edits
        made.append(finding)
    return made, text


def _collide(edit: Edit, other: Edit) -> bool:
    """Whether one of two different edits changes what the other one stands on."""
    if edit is other or (edit == other and edit.start < edit.end):
        return False
    return edit.start < other.end and other.start < edit.end


def _one_that_parses(source: Source, findings: Sequence[Finding]) -> tuple[list[Finding], str, object]:
    for finding in findings:
        text = apply_edits(source.text, finding.edits)
        try:
            return [finding], text, parse(text)
        except Unreadable:
            continue
    return [], source.text, source.tree
