"""What `oomfix apply` is to do with a file."""

from __future__ import annotations

from typing import NamedTuple

from oomfix.rewrite.text.header import Overrides
from oomfix.rules.base import Finding, Severity


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
