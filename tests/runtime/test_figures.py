"""Figures in docstrings are those of the committed results."""

import inspect
import re
from pathlib import Path

import pytest

from oomfix import runtime

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "techniques-cpu.md"
QUOTING = [name for name in runtime.__all__ if RESULTS.name in (inspect.getdoc(getattr(runtime, name)) or "")]


@pytest.mark.parametrize("name", QUOTING)
def test_every_figure_is_in_the_results(name):
    figures = re.findall(r"(?<!torch )\b\d+\.\d\d\b", inspect.getdoc(getattr(runtime, name)))
    assert figures
    assert [figure for figure in figures if f"| {figure} |" not in RESULTS.read_text()] == []


def test_techniques_quote_what_they_save():
    assert len(QUOTING) >= 7
