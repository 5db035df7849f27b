"""The README tells the truth: its screen, its table of rules, its commands, its settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click

from oomfix.rules import all_rules

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_screen_and_the_table_are_what_the_code_makes():
    command = [sys.executable, "-m", "bench.readme", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_rule_is_in_the_table_once():
    codes = re.findall(r"^\| (OOM\d+) \|", README, re.MULTILINE)
    assert codes == ["OOM001", *(rule.code for rule in all_rules())]


def test_every_flag_and_command_it_names_exists():
    from oomfix.cli import main

    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    flags = {flag for command in commands.values() for option in command.params for flag in option.opts}
    of_the_script = set(re.findall(r"^oomfix profile .* -- (--\S+)$", README, re.MULTILINE))
    of_others = re.sub(r"python -m pytest .*", "", README)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", of_others)) - of_the_script
    assert named <= flags
    assert set(re.findall(r"(?:`|&& |\$ |```sh\n)oomfix ([a-z]+)", README)) == {*commands}


def test_its_settings_are_accepted(tmp_path: Path):
    from oomfix.config import Configuration, Flags

    (tmp_path / ".git").mkdir()
    (settings,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(settings)
    configuration = Configuration(Flags(), [rule.code for rule in all_rules()])
    values = configuration.settings(str(tmp_path))
    assert configuration.problems == []
    assert (values.ignore, values.fail_on, values.target_torch) == (("OOM203",), "error", (2, 1))


def test_its_python_is_python():
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_ci_finds_the_command_it_runs():
    assert len(re.findall(r"^pip install .* && python -m pytest( .*)?$", README, re.MULTILINE)) == 1
