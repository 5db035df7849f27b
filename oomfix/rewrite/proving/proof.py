"""`oomfix apply --prove`: the peak of a script before and after the rewrite, on the simulated card of the preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, NamedTuple

from oomfix.presets import Preset
from oomfix.profile.cards import budget_options, card_options
from oomfix.profile.process import INDEPENDENT, run_script
from oomfix.profile.text import size
from oomfix.rewrite.files import FileOutcome, contents_of

_SIGKILL = 9  # has no name on Windows
_KEPT = ("peak_allocated_bytes", "peak_reserved_bytes", "breakdown", "out_of_memory")


class CannotProve(Exception):
    """A run that came to no result; the message is one plain line, and what the script said has been shown."""


class Proof(NamedTuple):
    """Two simulated runs of one script.

    Attributes:
        script: the script, as it was given.
        name: the preset's name, as it was given.
        preset: the preset.
        before: what `oomfix.profile.run` found of the script as it was, on a card without a limit.
        after: what it found of the rewritten one within the preset's budget, less the margin of the estimate.
        whole: the same where the samples of a batch depend on each other, so that no batch is split; None where that
            makes no difference. No number of a simulated run can tell.
    """

    script: str
    name: str
    preset: Preset
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    whole: Mapping[str, Any] | None = None

    @property
    def fits(self) -> bool:
        """Whether the rewritten script gets by with the budget of the preset."""
        return self.after["out_of_memory"] is None

    def lines(self) -> list[str]:
        """Both runs side by side, and whether the preset is met."""
        before, after = self.before, self.after
        card = before["card"]
        text = [
            f"{self.script} on a simulated {card['name']} ({card['capacity_gib']:.2f} GiB)",
            f"  {'':<18}{'before':>12}{'after':>12}",
        ]
        rows = [("allocated", "peak_allocated_bytes"), ("reserved", "peak_reserved_bytes")]
        text += [_row(label, before[key], after[key]) for label, key in rows]
        text.append(_row("in the last step", _last_step(before), _last_step(after)))
        text.append("  at the peak")
        names = dict.fromkeys((*before["breakdown"], *after["breakdown"]))
        text += [_row(f"  {name}", before["breakdown"].get(name, 0), after["breakdown"].get(name, 0)) for name in names]
        return [*text, self.verdict, *self._unsplit_line()]

    @property
    def verdict(self) -> str:
        """One line: the peaks, and whether the rewritten script fits."""
        peaks = f"peak {_gib(self.before)} -> {_gib(self.after)}"
        if self.preset.budget_gib is None:
            return peaks
        label = f"{self.name.removesuffix('gb')} GiB" if self.name == self.preset.name else self.name
        share = f"{self.preset.budget_gib:.1f} GiB of it for tensors, less a margin of {100 * self._margin:.0f} %"
        return f"{peaks}, {'fits' if self.fits else 'does not fit'} {label} ({share})"

    def _unsplit_line(self) -> list[str]:
        if self.whole is None:
            return []
        then = f"peak {_gib(self.whole)}, fits" if self.whole["out_of_memory"] is None else "does not fit"
        whole = "if training finds that samples depend on each other, they stay whole"
        return [f"batches are split there; {whole}: {then}"]

    @property
    def _margin(self) -> float:
        margin: float = self.before["margin_fraction"]
        return margin

    def as_json(self) -> dict[str, Any]:
        """The numbers: bytes by run, the budget, and whether the rewritten script gets by with it."""
        return {
            "script": self.script,
            "preset": self.name,
            "card": self.before["card"],
            "budget_gib": self.preset.budget_gib,
            "margin_fraction": self._margin,
            "before": {key: self.before[key] for key in _KEPT},
            "after": {key: self.after[key] for key in _KEPT},
            "after_unsplit": self.whole and {key: self.whole[key] for key in _KEPT},
            "fits": self.fits,
        }


def prove(script: str, args: Sequence[str], name: str, preset: Preset, outcomes: Sequence[FileOutcome]) -> Proof:
    """Run a script as it is and with files as they would be rewritten; nothing is written.

    Args:
        script: the script to run.
        args: its arguments.
        name: the preset's name, as it was given.
        preset: the preset.
        outcomes: what becomes of the script and of files that it imports.

    Raises:
        CannotProve: the script cannot be simulated, or failed.
    """
    before = _run(script, args, card_options(preset), {}, "before")
    options = [*card_options(preset), *budget_options(preset, before["margin_fraction"])]
    contents = contents_of(outcomes)
    after = _run(script, args, options, contents, "after")
    splits = after["out_of_memory"] is None and any(said.startswith(INDEPENDENT) for said in after["assumptions"])
    whole = _unsplit(script, args, options, contents) if splits else None
    return Proof(script, name, preset, before, after, whole)


def _unsplit(script: str, args: Sequence[str], options: list[str], contents: Mapping[str, bytes]) -> Mapping[str, Any]:
    """The rewritten script where no batch may be split: what `_run` finds, or only that memory ran out."""
    # a script that dies of its own answer to the error has run out of memory, too; its traceback would mislead
    with redirect_stderr(StringIO()):
        found, _ = run_script(script, list(args), [*options, "--coupled"], contents)
    if found is None or found["error"]:
        return dict.fromkeys(_KEPT, None) | {"out_of_memory": "the script failed"}
    return found


def _run(
    script: str, args: Sequence[str], options: list[str], contents: Mapping[str, bytes], when: str
) -> Mapping[str, Any]:
    found, code = run_script(script, list(args), options, contents)
    if found is None or found["error"]:
        killed = "" if code != -_SIGKILL else ": it was killed, as when the memory of the host is full"
        raise CannotProve(f"{script}: nothing is proven: the run {when} the rewrite came to no result{killed}")
    return found


def _row(label: str, before: int, after: int) -> str:
    return f"  {label:<18}" + "".join(f"{size(nbytes) if nbytes else '-':>12}" for nbytes in (before, after))


def _last_step(found: Mapping[str, Any]) -> int:
    """The most that was allocated during the last step (bytes), when the runtime has found its sizes; 0: no step."""
    return found["steps"][-1]["peak_allocated_bytes"] if found["steps"] else 0


def _gib(found: Mapping[str, Any]) -> str:
    nbytes = found["peak_allocated_bytes"]
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else size(nbytes)
