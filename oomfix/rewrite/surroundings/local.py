"""The local fixes of a file's findings, all together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from oomfix.parsing import Unreadable, parse
from oomfix.rewrite.text.edits import apply_edits, merge
from oomfix.rules.base import Finding, Rule, holds
from oomfix.script import Script
from oomfix.source import Source
from oomfix.suppressions import Statements, comments

_MOST_PASSES = 8
"""A fix may uncover another (a nested `with`); more passes than this would mean that fixes undo each other."""

_FIRST = (("OOM201", "OOM207"), ("OOM101", "OOM104"))
"""Fixes that make others needless, most of all first: under no_grad nothing has to be detached."""


class LocalFixes(NamedTuple):
    """A file after its local fixes.

    Attributes:
        script: the file.
        found: all findings of the text before.
        left: all findings of the text after.
    """

    script: Script
    found: list[Finding]
    left: list[Finding]


def fix_locally(script: Script, rules: Sequence[Rule], wants: Callable[[Finding], bool]) -> LocalFixes:
    """Make the local edits of every wanted finding, until none is left to make.

    Fixes that overlap are made one after the other, each on the result of the one before. The edits of one finding
    are made together or not at all. A fix whose result does not parse, or still has the finding, is left out.

    Args:
        script: the file.
        rules: the rules to ask.
        wants: whether a finding is to be fixed; those silenced by a comment are not asked for.
    """
    refused: set[_Place] = set()
    current = script
    left = found = findings_in(script, rules)
    for _ in range(_MOST_PASSES):
        findings = _of_first_stage(
            [one for one in left if one.edits and wants(one) and _place(current.source, one) not in refused]
        )
        if not findings:
            break
        before = current.source
        made, after = _made_together(before, findings)
        if not made:
            refused |= {_place(before, finding) for finding in findings}
            continue
        changed = Script.read(after, script.target_torch)
        found_then = findings_in(changed, rules)
        were, are = _counted(before, left), _counted(after, found_then)
        if in_vain := _in_vain(_counted(before, made), were, are):
            refused |= in_vain
            continue
        current, left = changed, found_then
    return LocalFixes(current, found, left)


_Place = tuple[str, str, str]
"""A code, the words of the line that a finding is in, and of the line that its edits begin in."""


def _counted(source: Source, findings: Sequence[Finding]) -> Counter[_Place]:
    return Counter(_place(source, finding) for finding in findings)


def _in_vain(made: Counter[_Place], before: Counter[_Place], after: Counter[_Place]) -> set[_Place]:
    """What was edited and is found again: by the same edit, or by none, as in a function that is called elsewhere."""
    found: set[_Place] = set()
    for place, number in made.items():
        without_edit = (*place[:2], "")
        if after[place] > before[place] - number or after[without_edit] > before[without_edit]:
            found.add(place)
    return found


def _place(source: Source, finding: Finding) -> _Place:
    first = min((edit.start for edit in finding.edits), default=None)
    edited = "" if first is None else source.lines[source.position(first)[0] - 1].strip()
    return finding.code, words_of(source, finding), edited


def _of_first_stage(findings: list[Finding]) -> list[Finding]:
    for codes in _FIRST:
        if chosen := [finding for finding in findings if finding.code in codes]:
            return chosen
    return findings


def findings_of(source: Source, rules: Sequence[Rule], target_torch: tuple[int, int] | None = None) -> list[Finding]:
    """What the rules find in a source and no `# oomfix: ignore` comment silences, by line and column."""
    return findings_in(Script.read(source, target_torch), rules)


def findings_in(script: Script, rules: Sequence[Rule]) -> list[Finding]:
    """What the rules find in a script that was read already."""
    source = script.source
    data = source.text.encode("utf-8", "surrogatepass")
    silencers = [comment for comment in comments(source) if not comment.problem]
    statements = Statements(source.tree) if silencers else None
    findings: list[Finding] = []
    for rule in rules:
        if any(holds(data, need) for need in rule.needs):
            findings += rule.check(script)
    if findings and script.is_of_another_library:
        return []
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


def words_of(source: Source, finding: Finding) -> str:
    """The line of a finding, without its margin."""
    return source.lines[finding.line - 1].strip()


def _made_together(source: Source, findings: Sequence[Finding]) -> tuple[list[Finding], Source]:
    """The findings whose edits can be made, and the source with these: all that fit together, else the first one.

    No findings where no result would be Python.
    """
    merged = merge(findings)
    attempts = [(merged.findings, merged.edits), *(([finding], list(finding.edits)) for finding in merged.findings)]
    for made, edits in attempts:
        text = apply_edits(source.text, edits)
        try:
            tree = parse(text)
        except Unreadable:
            continue
        return made, Source(source.path, text, tree, encoding=source.encoding, bom=source.bom)
    return [], source
