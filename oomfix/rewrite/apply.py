"""`oomfix apply` for one file: its loops, what they need around them, its local fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import LoopOutcome
from oomfix.rewrite.loop_attempts import MENDED, Fixed, rewrite_loops
from oomfix.rewrite.options import Options
from oomfix.rewrite.surroundings.evaluation_calls import evaluation_call_edits
from oomfix.rewrite.surroundings.local import findings_in, fix_locally, words_of
from oomfix.rewrite.text.edits import apply_edits
from oomfix.rewrite.text.layout import Layout
from oomfix.rewrite.text.long_lines import long_line_edits
from oomfix.rewrite.text.unused import unused_amp_imports, unused_flags
from oomfix.rules.base import Finding, Rule
from oomfix.script import Script
from oomfix.source import Source

_NOT_COUNTED_HERE = ("OOM202", "OOM203", "OOM301", "OOM302", "OOM305")
"""What is counted where it is mended, and what the preset decides only when the script runs."""


class Unfixed(NamedTuple):
    """What is left to be fixed by hand: its line, as in the file before (in a notebook, the cell), and what it is."""

    line: int
    code: str
    message: str
    cell: int | None = None


class Applied(NamedTuple):
    """A file after `apply`.

    Attributes:
        text: the new text, newlines as in the file.
        loops: by line.
        fixed: what was fixed.
        unfixed: what neither a local fix nor the runtime could mend, and what a rewritten file still trains wrongly.
    """

    text: str
    loops: tuple[LoopOutcome, ...]
    fixed: tuple[Fixed, ...]
    unfixed: tuple[Unfixed, ...]


def apply_to(source: Source, rules: Sequence[Rule], options: Options) -> Applied:
    """Rewrite a source for a preset.

    Raises:
        RecursionError: the source is nested absurdly.
    """
    current = reading = Reading(Script.read(source, options.target_torch))
    ended: tuple[Fixed, ...] = ()
    loops: tuple[LoopOutcome, ...] = ()
    if options.runtime:
        written, loops, ended = rewrite_loops(reading, options)
        current = written()
        for unused in (unused_amp_imports, unused_flags):
            current = current.edited(unused(reading.script.imports, current.script.imports, current.layout))
    last = fix_locally(current.script, rules, options.wants_finding)
    found = last.found if current is reading else findings_in(reading.script, rules)
    wanted = [one for one in found if options.wants_finding(one)]
    with_loops = _still_there(wanted, source, last.found, current.source)
    changed = last.script.source
    left = _still_there(with_loops, source, last.left, changed)
    gone = [one for one in _without(wanted, with_loops) if one.code not in _NOT_COUNTED_HERE]
    gone += [one for one in _without(with_loops, left) if one.fix == "local"]
    fixed = (Fixed(one.code, one.line, MENDED.get(one.code, one.message)) for one in gone)
    unfixed = tuple(
        Unfixed(one.line, one.code, one.message + _why_it_stays(one, loops))
        for one in left
        if one.fix != "runtime" or (options.runtime and one.code in MENDED)
    )
    text = changed.text
    if any(loop.rewrite != "none" for loop in loops):
        text = apply_edits(text, evaluation_call_edits(Reading(last.script)))
    text = apply_edits(text, long_line_edits(Layout(source), text))
    return Applied(text, loops, (*ended, *fixed), unfixed)


def _why_it_stays(finding: Finding, loops: Sequence[LoopOutcome]) -> str:
    """What is said of the window that a finding is about, where that stays as it is."""
    if finding.code not in ("OOM301", "OOM302"):
        return ""
    around = (loop for loop in loops if loop.line <= finding.line <= loop.end_line)
    return next((f"; {loop.why_window_stays}" for loop in around if loop.why_window_stays is not None), "")


def _without(found: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """Those of the findings that are not among the others."""
    these = set(map(id, others))
    return [finding for finding in found if id(finding) not in these]


def _still_there(found: Sequence[Finding], before: Source, left: Sequence[Finding], after: Source) -> list[Finding]:
    """Those findings that a changed script still has: by the words of their lines, then by as many as are left.

    Of findings on lines of the same words, those that are told in the same words are meant first.
    """
    still: set[int] = set()
    rest = [(finding.code, words_of(after, finding), finding.message) for finding in left]
    # a line may be written anew, and what is said of it may change
    counted = {known: Counter(place[:known] for place in rest) for known in (3, 2, 1)}
    for known in counted:
        for finding in found:
            place = (finding.code, words_of(before, finding), finding.message)
            if id(finding) not in still and counted[known][place[:known]] > 0:
                still.add(id(finding))
                for less in range(1, known + 1):
                    counted[less][place[:less]] -= 1
    return [finding for finding in found if id(finding) in still]
