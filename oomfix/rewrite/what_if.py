"""What `profile` and `apply --prove` run: scripts as they would be rewritten for a preset, with nothing written."""

from __future__ import annotations

from typing import Any, NamedTuple

from oomfix.presets import Preset
from oomfix.profile.cards import budget_options, card_options
from oomfix.rewrite import summary
from oomfix.rewrite.files import FileOutcome, Rewriter, contents_of
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules


class CannotRewrite(Exception):
    """A script that cannot be read or rewritten; the message is one plain line that says why."""


class WhatIf(NamedTuple):
    """A script as it would be rewritten.

    Attributes:
        name: the preset's name, as it was given.
        preset: the preset.
        outcome: what would become of the script.
    """

    name: str
    preset: Preset
    outcome: FileOutcome

    @property
    def options(self) -> list[str]:
        """The options of `oomfix.profile.run` for the card and the budget of the preset."""
        return [*card_options(self.preset), *budget_options(self.preset)]

    @property
    def contents(self) -> dict[str, bytes]:
        """What `oomfix.profile.process.run_script` is to run in place of files."""
        return contents_of([self.outcome])

    def lines(self) -> list[str]:
        """What would be done to the script: a line for each loop, and the totals."""
        said = summary.as_text([self.outcome], written=False).splitlines()
        return [*said, "lines of the script below are those of the rewritten one", ""] if self.outcome.changed else said

    def verdict(self, found: dict[str, Any]) -> list[str]:
        """Whether a run within the preset's budget, as `oomfix.profile.run` found it, came to its end: one line.

        No line where the preset has no budget.
        """
        if self.preset.budget_gib is None:
            return []
        verb = "runs out of" if found["out_of_memory"] else "fits"
        return [f"  {verb} the {self.preset.budget_gib:.1f} GiB of {self.name}"]

    def as_json(self) -> dict[str, Any]:
        """The preset's name and what would be done to the script's loops."""
        return {"preset": self.name, "loops": summary.loops_as_json([self.outcome])}


def rewrite_for(script: str, preset: str) -> WhatIf:
    """A script as `oomfix apply --preset PRESET SCRIPT` would rewrite it.

    Raises:
        ValueError: no preset has this name.
        CannotRewrite: the script cannot be read or parsed.
    """
    rewriter = Rewriter(all_rules(), Options(preset))
    chosen = rewriter.chosen(script).preset
    outcomes = rewriter.rewrite([script])
    if errors := [f"{outcome.path}: {error}" for outcome in outcomes for error in outcome.errors]:
        raise CannotRewrite("\n".join(errors))
    return WhatIf(preset, chosen, outcomes[0])
