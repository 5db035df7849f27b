"""The preparations of what cannot be lifted yet, one after the other: the first that finds something to do."""

from __future__ import annotations

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.preparations.branches_that_leave import end_branches
from oomfix.rewrite.preparations.computed_again import compute_again
from oomfix.rewrite.preparations.diverged_losses import run_backwards_first
from oomfix.rewrite.preparations.fetched_batches import name_batches
from oomfix.rewrite.preparations.forwards_into_branches import forwards_into_branches
from oomfix.rewrite.preparations.kept_losses import name_losses
from oomfix.rewrite.preparations.logs_of_branches import log_behind_branches
from oomfix.rewrite.preparations.logs_of_rounds import log_behind
from oomfix.rewrite.preparations.losses_in_turn import compute_in_turn, part_backwards
from oomfix.rewrite.preparations.numbers_of_rounds import name_numbers
from oomfix.rewrite.preparations.parted_autocast import part_autocast
from oomfix.rewrite.preparations.read_before import name_what_is_read
from oomfix.rewrite.preparations.resets_in_skips import reset_in_skips
from oomfix.script.syntax.edits import Edit

_PREPARATIONS = (
    end_branches,
    name_losses,
    name_batches,
    log_behind_branches,
    name_numbers,
    log_behind,
    name_what_is_read,
    reset_in_skips,
    run_backwards_first,
    part_autocast,
    part_backwards,
    compute_in_turn,
    compute_again,
    forwards_into_branches,
)
"""What may make a slice of what is none yet: each gives edits that change nothing of what a script does."""


def prepare(reading: Reading, manager: str) -> tuple[list[Edit], bool]:
    """The edits of the first preparation that finds something to do in a script, and whether they give losses names."""
    for way in _PREPARATIONS:
        if edits := way(reading, manager):
            return edits, way is name_losses
    return [], False
