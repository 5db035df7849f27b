"""What `oomfix apply` would make of the training loops of a file, for those who only ask."""

from __future__ import annotations

from typing import NamedTuple

from oomfix.parsing import Unreadable
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import Form, LoopOutcome
from oomfix.rewrite.loop_attempts import rewrite_loops
from oomfix.rewrite.options import Options
from oomfix.rewrite.text.edits import EditsBreakSource, EditsOverlap
from oomfix.script import Script

# the form of a loop is the same for every preset, which only sets the numbers that the runtime goes by
_ANY_PRESET = "16gb"


class LoopForm(NamedTuple):
    """The form that `apply` would give a training loop, and why not more; None where nothing stands in the way."""

    rewrite: Form
    reason: str | None


def loop_forms(script: Script, data: bytes, count: int, target_torch: tuple[int, int] | None) -> list[LoopForm]:
    """The form of each training loop of a script, in the order of `Script.loops`.

    Args:
        script: the file.
        data: its bytes.
        count: how many training loops it has.
        target_torch: the oldest torch that the script must run on; None: unknown.

    Raises:
        RecursionError: the source is nested absurdly.
    """
    try:
        outcomes = _outcomes(script, data, target_torch)
    except Unreadable as problem:
        return [LoopForm("none", str(problem))] * count
    except EditsOverlap:
        return [LoopForm("none", "its changes get in each other's way")] * count
    except EditsBreakSource as problem:
        return [LoopForm("none", f"the result would be no Python ({problem})")] * count
    if len(outcomes) != count:
        return [LoopForm("none", "the loops of this file are not told apart once some are rewritten")] * count
    return [LoopForm(outcome.rewrite, outcome.reason) for outcome in outcomes]


def _outcomes(script: Script, data: bytes, target_torch: tuple[int, int] | None) -> tuple[LoopOutcome, ...]:
    options = Options(_ANY_PRESET, target_torch=target_torch)
    if script.source.cells is None:
        return _of_loops(rewrite_loops(Reading(script), options).loops)
    # imported here: most scripts are no notebooks
    from oomfix.rewrite.cells import NotebookText, in_cells

    notebook = NotebookText(script.source.path, data)
    outcomes = rewrite_loops(Reading(Script.read(notebook.source, target_torch)), options).loops
    return tuple(in_cells(outcome, notebook) for outcome in _of_loops(outcomes))


def _of_loops(outcomes: tuple[LoopOutcome, ...]) -> tuple[LoopOutcome, ...]:
    """The outcomes of loops, without those of functions that are the iteration of one."""
    return tuple(outcome for outcome in outcomes if outcome.function is None)
