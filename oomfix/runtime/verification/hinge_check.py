"""Hinges that a few rows leave closed are opened: what is behind them shows then (`hinges`)."""

from dataclasses import replace

from oomfix.runtime.verification.evidence import Runs
from oomfix.runtime.verification.few_rows import FewRows
from oomfix.runtime.verification.judging import judge
from oomfix.runtime.verification.result_check import Found
from oomfix.runtime.verification.verdict import Verdict


def by_hinges(few: FewRows, found: Found, how: Runs, count: int) -> Verdict | None:
    """The verdict that refuses a split with closed hinges open; None if nothing does."""
    # fewer rows than the verdict was given on: those did not fit again
    closed = found.closed_hinges if count == found.rows else few.compared(count, how).closed_hinges
    if not closed:
        return None
    how = replace(how, opened=closed)
    # a mean over targets that count and one over samples, which is not 0 any more, are one where all targets count
    refused = _judged(few, how, count)
    return refused and _judged(few, replace(how, holds_out=False), count)


def _judged(few: FewRows, how: Runs, count: int) -> Verdict | None:
    """The verdict of these runs if they refuse a split; None if they do not, or the forward fails."""
    evidence = few.compared(count, how)
    verdict = judge(evidence)
    return None if evidence.failure or verdict.rule is not None or verdict.undecided else verdict
