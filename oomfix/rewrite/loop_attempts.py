"""The loops of one file rewritten, behind what makes more of them: attempts of which the one counts that splits most.

Each attempt edits the script first, in ways that change nothing of what it does, and then has all of its loops
rewritten; what is said of them has the lines of the script as it was.

What few scripts need is imported where it is needed: `oomfix audit --format json` asks all of this of each script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from oomfix.rewrite.dataflow.step_functions import StepFunction, step_functions
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import LoopOutcome, Verdict
from oomfix.rewrite.loop_rewriter import LoopRewriter
from oomfix.rewrite.options import Options
from oomfix.rewrite.preparations.autocast_end import end_autocast_edits
from oomfix.rewrite.preparations.metrics_apart import metric_edits
from oomfix.rewrite.text.edits import line_before, with_lines
from oomfix.rewrite.text.header import other_preset_in
from oomfix.rules.base import Edit

MENDED = {
    "OOM301": "the loss is divided by the size of its window",
    "OOM302": "the last window of an epoch is stepped",
    "OOM303": "gradients are unscaled before they are clipped",
    "OOM304": "losses in fp16 are scaled",
}
"""What is said of findings that rewriting mends."""


class Fixed(NamedTuple):
    """A finding that was fixed: its line, as in the file before (in a notebook, the cell), and what was done."""

    code: str
    line: int
    message: str
    cell: int | None = None


class Rewritten(NamedTuple):
    """A file with its training loops rewritten.

    Attributes:
        written: gives the file; who only asks what becomes of the loops has no use for it.
        loops: what became of each, by line.
        fixed: what that mended.
    """

    written: Callable[[], Reading]
    loops: tuple[LoopOutcome, ...]
    fixed: tuple[Fixed, ...]


def rewrite_loops(reading: Reading, options: Options) -> Rewritten:
    """A script with its training loops rewritten and nothing else.

    Raises:
        RecursionError: the source is nested absurdly.
    """
    return _without_apex(reading, options) or _with_methods_as_backwards(reading, options)


def _without_apex(reading: Reading, options: Options) -> Rewritten | None:
    """The loops rewritten once apex is taken out of the script; None where one of them is left alone then."""
    if "apex" not in reading.source.text:
        return None
    from oomfix.rewrite.preparations.apex import NOTE, apex_edits

    edits = apex_edits(reading)
    if not edits:
        return None
    found = _rewritten_behind(edits, reading, options)
    if not found.loops or len(found.loops) != len(reading.loops) or any(loop.rewrite == "none" for loop in found.loops):
        return None
    return found._replace(loops=tuple(loop._replace(notes=(*loop.notes, NOTE)) for loop in found.loops))


def _with_methods_as_backwards(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten, with functional backwards of one tensor made its methods if that makes more."""
    found = _with_helpers_written_out(reading, options)
    if "autograd" not in reading.source.text:
        return found
    from oomfix.rewrite.preparations.functional_backwards import functional_backward_edits

    return _behind_if_more(functional_backward_edits(reading), found, reading, options)


def _with_helpers_written_out(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten, with helpers that run the backward written out where they are called if that makes more."""
    found = _rewritten(reading, options)
    if _are_all_split(found):
        return found
    from oomfix.rewrite.preparations.inlined_helpers import inlined_helper_edits

    inlined = inlined_helper_edits(reading)
    notes = [f"`{name}` is written out where it was called" for name in inlined]
    return _behind_if_more([edit for edits in inlined.values() for edit in edits], found, reading, options, notes)


def _are_all_split(found: Rewritten) -> bool:
    return all(loop.rewrite == "micro-batched" for loop in found.loops)


def _is_more(loops: Sequence[LoopOutcome], others: Sequence[LoopOutcome]) -> bool:
    """Whether more became of some of the loops than of the others, and no less of any."""
    forms = ("none", "in-place", "micro-batched")
    pairs = [(forms.index(one.rewrite), forms.index(other.rewrite)) for one, other in zip(loops, others, strict=False)]
    return len(loops) == len(others) and all(one >= other for one, other in pairs) and any(a > b for a, b in pairs)


def _behind_if_more(
    edits: list[Edit], found: Rewritten, reading: Reading, options: Options, notes: Sequence[str] = ()
) -> Rewritten:
    """The loops rewritten behind edits if that makes more of them, with what is said of those; else as they were."""
    other = _rewritten_behind(edits, reading, options) if edits else found
    if not _is_more(other.loops, found.loops):
        return found
    told = (
        new if new.rewrite == old.rewrite else new._replace(notes=(*new.notes, *notes))
        for new, old in zip(other.loops, found.loops, strict=True)
    )
    return other._replace(loops=tuple(told))


def _rewritten_behind(edits: list[Edit], reading: Reading, options: Options) -> Rewritten:
    """A script rewritten behind edits of its whole, told with the lines that it had before them."""
    text = reading.source.text

    def line(number: int) -> int:
        return line_before(text, edits, number)

    found = _rewritten(reading.edited(edits), options)
    loops = (
        loop._replace(
            line=line(loop.line),
            end_line=line(loop.end_line),
            reason=loop.reason and with_lines(loop.reason, line),
            notes=tuple(with_lines(note, line) for note in loop.notes),
        )
        for loop in found.loops
    )
    return Rewritten(found.written, tuple(loops), tuple(one._replace(line=line(one.line)) for one in found.fixed))


def _rewritten(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten; backwards leave autocast blocks first. Lines keep their numbers."""
    if not options.wants("OOM305") or "autocast" not in reading.source.text:
        return _with_resets_apart(reading, options)
    edits = end_autocast_edits(reading)
    found = _with_resets_apart(reading.edited(edits.values()), options)
    ended = tuple(Fixed("OOM305", line, "backward runs inside autocast") for line in edits)
    return found._replace(fixed=ended + found.fixed)


def _with_resets_apart(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten; resets of gradients leave the branch of the forward if that makes more of them."""
    found = _without_dropped_gradients(reading, options)
    if _are_all_split(found):
        return found
    from oomfix.rewrite.preparations.resets_apart import reset_edits

    return _behind_if_more(reset_edits(reading), found, reading, options)


def _without_dropped_gradients(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten; losses whose gradients are dropped in part do without that part if it makes more of them."""
    found = _with_metrics_apart(reading, options)
    if _are_all_split(found):
        return found
    from oomfix.rewrite.preparations.dropped_gradients import dropped_gradients

    dropped = dropped_gradients(reading)
    edits = [edit for one in dropped for edit in one.edits]
    return _behind_if_more(edits, found, reading, options, [one.note for one in dropped])


def _with_metrics_apart(reading: Reading, options: Options) -> Rewritten:
    """The loops rewritten; metrics leave the blocks around the forwards of those that are split."""
    found = _as_it_stands(reading, options)
    lines = set(metric_edits(reading))
    while lines:
        other = _as_it_stands(_metrics_apart(reading, lines), options)
        split = {loop.line for loop in other.loops if loop.rewrite == "micro-batched"}
        if lines <= split:
            return other
        lines &= split
    return found


def _metrics_apart(reading: Reading, lines: Set[int]) -> Reading:
    """A script whose metrics stand behind the blocks around forwards, for the loops in these lines."""
    while edits := [edit for line, of_loop in metric_edits(reading).items() if line in lines for edit in of_loop]:
        reading = reading.edited(edits)
    return reading


def _as_it_stands(reading: Reading, options: Options) -> Rewritten:
    """The loops of a script rewritten with nothing moved ahead of that."""
    if not reading.loops:
        return Rewritten(lambda: reading, tuple(_out_of_sight(reading)), ())
    rewriter = LoopRewriter(reading, options.preset, options.overrides, options.wants)
    written = rewriter.rewrite()
    fixed = tuple(Fixed(code, line, MENDED[code]) for code, line in rewriter.mended)
    kept = other_preset_in(reading.script, options.preset)
    return Rewritten(written, tuple(_outcome(rewriter, verdict, kept) for verdict in rewriter.verdicts), fixed)


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
