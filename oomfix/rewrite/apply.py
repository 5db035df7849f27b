"""`oomfix apply` for one file: its loops, what they need around them, its local fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from oomfix.rewrite.apex import NOTE, apex_edits
from oomfix.rewrite.autocast_end import end_autocast_edits
from oomfix.rewrite.edits import apply_edits, line_before, with_lines, with_text
from oomfix.rewrite.evaluation_calls import evaluation_call_edits
from oomfix.rewrite.header import Overrides, other_preset_in
from oomfix.rewrite.inlined_helpers import inlined_helper_edits
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.local import Fixed, findings_in, fix_locally
from oomfix.rewrite.long_lines import long_line_edits
from oomfix.rewrite.loop_rewriter import LoopRewriter
from oomfix.rewrite.metrics_apart import metric_edits
from oomfix.rewrite.reading import Reading
from oomfix.rewrite.step_functions import StepFunction, step_functions
from oomfix.rewrite.unused import unused_amp_imports
from oomfix.rewrite.verdict import Form, Verdict
from oomfix.rules.base import Edit, Finding, Rule, Severity
from oomfix.script import Script
from oomfix.source import Source

_MENDED = {
    "OOM301": "the loss is divided by the size of its window",
    "OOM302": "the last window of an epoch is stepped",
    "OOM303": "gradients are unscaled before they are clipped",
    "OOM304": "losses in fp16 are scaled",
}
_NOT_COUNTED_HERE = ("OOM202", "OOM203", "OOM301", "OOM302", "OOM305")
"""What is counted where it is mended, and what the preset decides only when the script runs."""


class Options(NamedTuple):
    """What to do with a file.

    Attributes:
        preset: the preset's name.
        overrides: fields of `oomfix.presets.Preset` that the script is to change.
        runtime: rewrite loops; False makes local fixes alone.
        only: codes or prefixes to fix; empty for all but notes, which are hygiene and would bloat the diff.
        ignore: codes or prefixes not to fix.
        target_torch: the oldest torch that the script must run on.
    """

    preset: str
    overrides: Overrides = {}  # noqa: RUF012  a default that nobody changes
    runtime: bool = True
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target_torch: tuple[int, int] | None = None

    def wants(self, code: str) -> bool:
        """Whether findings with this code are to be fixed."""
        return (not self.only or code.startswith(self.only)) and not (self.ignore and code.startswith(self.ignore))

    def wants_finding(self, finding: Finding) -> bool:
        """Whether a finding is to be fixed."""
        return self.wants(finding.code) and (bool(self.only) or finding.severity is not Severity.NOTE)


class LoopOutcome(NamedTuple):
    """What became of a training loop, or of a function that is the iteration of one.

    Attributes:
        line, end_line: as in the file before; in a notebook, as in the cell.
        rewrite: the form.
        reason: why not more, None where nothing stood in the way.
        cell: the 1-based number of its cell in a notebook, else None.
        notes: what else is to be known of it, one clause each.
        function: the name of a function that makes a step each time it is called, by a loop in another file; None for
            a loop of this file.
    """

    line: int
    end_line: int
    rewrite: Form
    reason: str | None
    cell: int | None = None
    notes: tuple[str, ...] = ()
    function: str | None = None


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
        unfixed: what neither a local fix nor the runtime could mend.
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
    script = Script.read(source, options.target_torch)
    current = source
    ended: tuple[Fixed, ...] = ()
    loops: tuple[LoopOutcome, ...] = ()
    if options.runtime:
        current, loops, ended = rewrite_loops(script, options)
        unused = unused_amp_imports(source.tree, current.tree, Layout(current))
        current = with_text(current, apply_edits(current.text, unused))
    last = fix_locally(current, rules, options.wants_finding, options.target_torch)
    text = last.text
    found = last.found
    if current is not source:
        found = findings_in(script, rules)
        wanted = [one for one in found if options.wants_finding(one) and one.code not in _NOT_COUNTED_HERE]
        ended += tuple(_gone(wanted, source, last.found, current))
    changed = with_text(current, text)
    wanted = [one for one in found if options.wants_finding(one) and one.fix != "runtime"]
    left = [one for one in last.left if one.fix != "runtime"]
    unfixed = tuple(Unfixed(one.line, one.code, one.message) for one in _still_there(wanted, source, left, changed))
    if any(loop.rewrite != "none" for loop in loops):
        text = apply_edits(text, evaluation_call_edits(Reading(Script.read(changed, options.target_torch))))
    text = apply_edits(text, long_line_edits(Layout(source), text))
    return Applied(text, loops, ended + last.fixed, unfixed)


def _gone(found: Sequence[Finding], before: Source, left: Sequence[Finding], after: Source) -> Iterator[Fixed]:
    """What the audit found in a script and no longer finds once its loops are rewritten."""
    still = {id(finding) for finding in _still_there(found, before, left, after)}
    for finding in found:
        if id(finding) not in still:
            yield Fixed(finding.code, finding.line, _MENDED.get(finding.code, finding.message))


def _still_there(found: Sequence[Finding], before: Source, left: Sequence[Finding], after: Source) -> list[Finding]:
    """Those findings that a changed script still has: by the words of their lines, then by as many as are left."""
    words = Counter((finding.code, after.lines[finding.line - 1].strip()) for finding in left)
    codes = Counter(finding.code for finding in left)
    still: set[int] = set()
    for finding in found:
        here = (finding.code, before.lines[finding.line - 1].strip())
        if words[here] > 0:
            words[here] -= 1
            codes[finding.code] -= 1
            still.add(id(finding))
    for finding in found:
        # one whose line was written anew
        if id(finding) not in still and codes[finding.code] > 0:
            codes[finding.code] -= 1
            still.add(id(finding))
    return [finding for finding in found if id(finding) in still]


# -- loops ---------------------------------------------------------------------------------------------------------

_Rewritten = tuple[Source, tuple[LoopOutcome, ...], tuple[Fixed, ...]]


def rewrite_loops(script: Script, options: Options) -> _Rewritten:
    """A script with its training loops rewritten and nothing else; what became of each, and what that mended.

    Raises:
        RecursionError: the source is nested absurdly.
    """
    reading = Reading(script)
    if "apex" in script.source.text and (edits := apex_edits(reading)):
        rewritten, loops, fixed = _rewritten_behind(edits, reading, options)
        if loops and len(loops) == len(reading.loops) and all(loop.rewrite != "none" for loop in loops):
            return rewritten, tuple(loop._replace(notes=(*loop.notes, NOTE)) for loop in loops), fixed
    found = _rewrite_read(reading, options)
    if any(loop.rewrite != "micro-batched" for loop in found[1]) and (inlined := inlined_helper_edits(reading)):
        edits = [edit for of_helper in inlined.values() for edit in of_helper]
        rewritten, loops, fixed = _rewritten_behind(edits, reading, options)
        if _is_more(loops, found[1]):
            notes = tuple(f"`{name}` is written out where it was called" for name in inlined)
            pairs = zip(loops, found[1], strict=True)
            told = (
                new._replace(notes=(*new.notes, *notes)) if new.rewrite != old.rewrite else new for new, old in pairs
            )
            return rewritten, tuple(told), fixed
    return found


def _is_more(loops: Sequence[LoopOutcome], others: Sequence[LoopOutcome]) -> bool:
    """Whether more became of some of the loops than of the others, and no less of any."""
    forms = ("none", "in-place", "micro-batched")
    pairs = [(forms.index(one.rewrite), forms.index(other.rewrite)) for one, other in zip(loops, others, strict=False)]
    return len(loops) == len(others) and all(one >= other for one, other in pairs) and any(a > b for a, b in pairs)


def _rewritten_behind(edits: list[Edit], reading: Reading, options: Options) -> _Rewritten:
    """A script rewritten behind edits of its whole, told with the lines that it had before them."""
    text = reading.source.text

    def line(number: int) -> int:
        return line_before(text, edits, number)

    current = with_text(reading.source, apply_edits(text, edits))
    rewritten, loops, fixed = _rewrite_read(Reading(Script.read(current, options.target_torch)), options)
    told = (
        loop._replace(
            line=line(loop.line),
            end_line=line(loop.end_line),
            reason=loop.reason and with_lines(loop.reason, line),
            notes=tuple(with_lines(note, line) for note in loop.notes),
        )
        for loop in loops
    )
    return rewritten, tuple(told), tuple(one._replace(line=line(one.line)) for one in fixed)


def _rewrite_read(reading: Reading, options: Options) -> _Rewritten:
    script = reading.script
    ended: tuple[Fixed, ...] = ()
    if options.wants("OOM305"):
        current, ended = _end_autocast(reading)
        if current is not script.source:
            reading = Reading(Script.read(current, options.target_torch))
    current, loops, folded = _with_metrics_apart(reading, options)
    return current, loops, ended + folded


def _end_autocast(reading: Reading) -> tuple[Source, tuple[Fixed, ...]]:
    """Backwards out of autocast blocks, so that loops can be rewritten; lines keep their numbers."""
    source = reading.source
    if "autocast" not in source.text:
        return source, ()
    edits = end_autocast_edits(reading)
    fixed = tuple(Fixed("OOM305", line, "backward inside of autocast") for line in edits)
    return with_text(source, apply_edits(source.text, edits.values())), fixed


def _with_metrics_apart(reading: Reading, options: Options) -> _Rewritten:
    """The loops rewritten; metrics leave the blocks around the forwards of those that are split."""
    found = _rewrite_loops(reading, options)
    lines = set(metric_edits(reading))
    while lines:
        other = _rewrite_loops(_metrics_apart(reading, lines, options), options)
        split = {loop.line for loop in other[1] if loop.rewrite == "micro-batched"}
        if lines <= split:
            return other
        lines &= split
    return found


def _metrics_apart(reading: Reading, lines: Set[int], options: Options) -> Reading:
    """A script whose metrics stand behind the blocks around forwards, for the loops in these lines."""
    while edits := [edit for line, of_loop in metric_edits(reading).items() if line in lines for edit in of_loop]:
        moved = with_text(reading.source, apply_edits(reading.source.text, edits))
        reading = Reading(Script.read(moved, options.target_torch))
    return reading


def _rewrite_loops(reading: Reading, options: Options) -> _Rewritten:
    if not reading.loops:
        return reading.source, tuple(_out_of_sight(reading)), ()
    rewriter = LoopRewriter(reading, options.preset, options.overrides, options.wants)
    rewritten = rewriter.rewrite()
    fixed = tuple(Fixed(code, line, _MENDED[code]) for code, line in rewriter.mended)
    kept = other_preset_in(reading.script, options.preset)
    return rewritten, tuple(_outcome(rewriter, verdict, kept) for verdict in rewriter.verdicts), fixed


def _out_of_sight(reading: Reading) -> Iterator[LoopOutcome]:
    """What is said of a file that only steps."""
    for function in step_functions(reading.script):
        why = "it is not seen which network its loss goes through"
        yield LoopOutcome(function.line, function.end_line, "none", why, function=function.name)


def _outcome(rewriter: LoopRewriter, verdict: Verdict, kept: str | None) -> LoopOutcome:
    function = verdict.loop.name if isinstance(verdict.loop, StepFunction) else None
    line, end_line = rewriter.lines_of(verdict)
    notes = (*verdict.notes, *([] if kept is None else [kept]))
    return LoopOutcome(line, end_line, verdict.form, verdict.reason, notes=notes, function=function)
