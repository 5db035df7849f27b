"""Reading a snippet as a script."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from oomfix.rules import all_rules
from oomfix.script import Script
from oomfix.source import Source

Read = Callable[[str], Script]
Report = Callable[[str], list[tuple[str, int]]]


def read_script(code: str) -> Script:
    return Script.read(Source.from_bytes("train.py", dedent(code).lstrip("\n").encode()))


@pytest.fixture
def read() -> Read:
    """Read a snippet; its first line is line 1."""
    return read_script


@pytest.fixture
def report() -> Report:
    """The codes and lines that all rules report for a snippet, without the notes on bare `zero_grad()`."""

    def run(code: str) -> list[tuple[str, int]]:
        script = read_script(code)
        findings = [finding for rule in all_rules() for finding in rule.check(script)]
        return sorted({(finding.code, finding.line) for finding in findings if finding.code != "OOM203"})

    return run
