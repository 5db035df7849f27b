"""The pages beside the README tell the truth, too: their links, their flags, their settings."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "fixtures", ROOT / "bench")
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
DOCS = sorted((ROOT / "docs").glob("*.md"))
# [text](path#heading); links to elsewhere have a colon
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its blocks of code, where `#` begins a comment."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page is called on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    broken = []
    for target, heading in LINK.findall(prose(page)):
        file = page if not target else page.parent / target
        if not file.exists() or (heading and heading not in anchors(file)):
            broken.append(f"{target}#{heading}")
    assert broken == []


def test_every_page_of_docs_is_linked_from_the_readme():
    linked = {target for target, _ in LINK.findall(prose(ROOT / "README.md"))}
    assert {name(page) for page in DOCS} <= linked


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_flags_that_docs_name_exist(page: Path):
    from oomfix.cli import main

    context = click.Context(main)
    commands = [main.get_command(context, command) for command in main.list_commands(context)]
    flags = {flag for command in commands for option in command.params for flag in option.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8"))) <= flags


def test_the_preset_of_the_page_on_apply_is_accepted(tmp_path: Path):
    from oomfix.config import Configuration, Flags

    (settings,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "apply.md").read_text(), re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(settings)
    configuration = Configuration(Flags(), [])
    assert configuration.settings(str(tmp_path)).presets["lab"].preset.budget_gib == 20.0
    assert configuration.problems == []
