"""Every example runs as it stands."""

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomfix.cli import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_trains(example, capsys):
    """An example prints what it promises: a loss that went down, or the figures it is about."""
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_every_example_is_listed():
    listed = (EXAMPLES[0].parent / "README.md").read_text()
    assert [example.name for example in EXAMPLES if f"]({example.name})" not in listed] == []


def test_the_auditor_has_no_warning_for_the_examples():
    found = CliRunner().invoke(main, ["audit", "--format", "concise", "--fail-on", "warning", str(EXAMPLES[0].parent)])
    assert found.exit_code == 0, found.output
