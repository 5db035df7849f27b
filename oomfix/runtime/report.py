"""What the manager found out and did, for a log."""

from collections.abc import Iterable
from dataclasses import dataclass

from oomfix.presets import Preset
from oomfix.runtime.known import Known


@dataclass(frozen=True)
class Report:
    """A summary of the run so far; `str` of it is a few lines of text.

    Attributes:
        preset: name of the preset.
        retries: calls that ran out of memory and started again.
        skipped_steps: optimizer steps left out because fp16 gradients overflowed.
        largest: for each forward by name, the largest micro-batch (samples) known to fit; None: batches run whole.
        whole_because: for each forward that may not be split, why.
    """

    preset: str
    retries: int
    skipped_steps: int
    largest: dict[str, int | None]
    whole_because: dict[str, str]

    @classmethod
    def of(cls, preset: Preset, forwards: Iterable[Known], retries: int, skipped_steps: int) -> "Report":
        """The report of a manager."""
        forwards = list(forwards)
        return cls(
            preset.name,
            retries,
            skipped_steps,
            {known.name: known.sizing.largest for known in forwards},
            {k.name: k.verdict.reason for k in forwards if k.verdict is not None and k.verdict.rule is None},
        )

    def __str__(self) -> str:
        counts = f"{self.retries} retries after out of memory, {self.skipped_steps} skipped steps"
        lines = [f"preset {self.preset}: {counts}"]
        for name, rows in self.largest.items():
            size = "whole batches" if rows is None else f"micro-batches of up to {rows} samples"
            why = f" ({self.whole_because[name]})" if name in self.whole_because else ""
            lines.append(f"  {name}: {size}{why}")
        return "\n".join(lines)
