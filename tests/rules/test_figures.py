"""The figures on the pages of the rules are those that bench/rules.py has measured."""

from __future__ import annotations

import re

import pytest

from bench.rules import FIGURES, written
from oomfix.pages import Page, pages
from oomfix.rules import all_rules

SOURCE = "bench/results/rules.md"
FIGURE = re.compile(r"\d[\d.]*(?:e-\d+)?(?: ?(?:MiB|%|times))?")
DEFINITIONS = {"8", "256", "512", "103", "4", "3", "32768", "65536"}
"""Numbers of what was measured, not of what came out; all of them stand in bench/results/rules.md as well."""
QUOTING = [page for page in pages(all_rules()) if SOURCE in page.text]


def quoted(page: Page) -> list[str]:
    """The figures in the sentence that names the source."""
    text = " ".join(page.text.split())
    sentences = [sentence for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z`])", text) if SOURCE in sentence]
    return [found.rstrip(".") for sentence in sentences for found in FIGURE.findall(sentence)]


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.code)
def test_a_page_quotes_what_was_measured(page: Page) -> None:
    figures = [figure for figure in quoted(page) if figure not in DEFINITIONS]
    assert figures
    assert [figure for figure in figures if figure not in written()[page.code]] == []


def test_every_figure_is_quoted_by_the_page_of_its_rule() -> None:
    assert {page.code for page in QUOTING} == set(FIGURES) == set(written())


@pytest.mark.parametrize("code", ["OOM301", "OOM302", "OOM303", "OOM304", "OOM501"])
def test_the_figures_come_out_the_same_again(code: str) -> None:
    assert FIGURES[code]() == written()[code]
