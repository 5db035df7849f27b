"""Every example runs as it stands."""

import ast
import doctest
import runpy
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomfix.cli import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_prints_what_it_says(example, capsys):
    """What stands under "Prints:", where three dots are any text."""
    promised = ast.get_docstring(ast.parse(example.read_text())).split("Prints:\n\n", 1)[1]
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(textwrap.dedent(promised) + "\n", printed, doctest.ELLIPSIS), printed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_fits_a_page(example):
    assert len(example.read_text().splitlines()) <= 80


def test_every_example_is_listed():
    listed = (EXAMPLES[0].parent / "README.md").read_text()
    assert [example.name for example in EXAMPLES if f"]({example.name})" not in listed] == []


def test_the_auditor_has_no_warning_for_the_examples():
    found = CliRunner().invoke(main, ["audit", "--format", "concise", "--fail-on", "warning", str(EXAMPLES[0].parent)])
    assert found.exit_code == 0, found.output
