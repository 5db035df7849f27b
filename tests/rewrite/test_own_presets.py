"""Presets of one's own are written into scripts by their values."""

import ast

import pytest
from click.testing import CliRunner

from oomfix.cli import main
from oomfix.rewrite.command import apply
from oomfix.runtime import preset as manager

RUN = CliRunner()
SCRIPT = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
MINE = """\
[tool.oomfix.presets.mine]
base = "24gb"
budget-gib = 20.5
micro_batches = 3
precision = "fp32"
pin-memory = false

[tool.oomfix.presets.plain]
clip_norm = 1
"""


def written(folder, *options: str, pyproject: str = MINE) -> str:
    (folder / "pyproject.toml").write_text(pyproject)
    (folder / "train.py").write_text(SCRIPT)
    done = RUN.invoke(apply, [*options, str(folder / "train.py")])
    if done.exit_code:
        return done.output
    module = ast.parse((folder / "train.py").read_text())
    (made,) = [text for text in map(ast.unparse, module.body) if text.startswith("memory =")]
    return made


def test_its_values_are_written_not_its_name(tmp_path):
    line = written(tmp_path, "--preset", "mine")
    assert line == (
        "memory = runtime.preset('24gb', budget_gib=20.5, micro_batches=3, precision='fp32', pin_memory=False)"
    )
    values = {"budget_gib": 20.5, "micro_batches": 3, "precision": "fp32", "pin_memory": False}
    assert manager("24gb", **values).preset.budget_gib == 20.5


def test_without_a_base_the_other_fields_are_those_of_auto(tmp_path):
    assert written(tmp_path, "--preset", "plain") == "memory = runtime.preset('auto', clip_norm=1)"


def test_flags_win(tmp_path):
    line = written(tmp_path, "--preset", "mine", "--micro-batches", "5")
    assert "micro_batches=5" in line and "micro_batches=3" not in line


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[tool.oomfix.presets.mine]\nbudget = 3", "mine: preset override: got 'budget', expected one of"),
        ("[tool.oomfix.presets.mine]\nmicro-batches = 0", "mine: micro_batches: got 0, expected"),
        ("[tool.oomfix.presets.mine]\npin-memory = 1", "mine: pin_memory: got 1, expected True or False"),
        ("[tool.oomfix.presets.mine]\nbase = '17gb'", "mine: preset: got '17gb', expected"),
        ("[tool.oomfix.presets.mine]\nbase = 'off'", "mine: base: got 'off', which is no preset to change"),
        ("[tool.oomfix.presets.mine]\nbase = 17", "mine: preset: got 17, expected"),
        ("[tool.oomfix.presets.16gb]\nclip_norm = 1", "16gb: is a preset already"),
        ("[tool.oomfix]\npresets = 3", "got 3, expected a table for each preset"),
        ("[tool.oomfix.presets]\nmine = 3", "mine: got 3, expected a table of fields"),
    ],
)
def test_what_is_wrong_in_the_table_is_said_where_the_preset_is_not_known(tmp_path, table, said):
    output = written(tmp_path, "--preset", "mine", pyproject=table)
    assert "preset: got 'mine', expected one of" in output
    assert f"pyproject.toml: [tool.oomfix] presets: {said}" in output
    assert (tmp_path / "train.py").read_text() == SCRIPT


def test_an_unknown_name_is_refused_with_the_nearest_of_both_kinds(tmp_path):
    output = written(tmp_path, "--preset", "mime")
    assert "preset: got 'mime', expected one of '8gb'" in output
    assert "'off', 'mine', 'plain'; did you mean 'mine'?" in output


def test_off_is_no_memory_to_train_in(tmp_path):
    assert "preset: got 'off', which is the script as it was" in written(tmp_path, "--preset", "off")


def test_each_project_has_its_own(tmp_path):
    for name, norm in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
        (tmp_path / name / "pyproject.toml").write_text(f"[tool.oomfix.presets.mine]\nclip_norm = {norm}\n")
    done = RUN.invoke(apply, ["--preset", "mine", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "clip_norm=1.0" in (tmp_path / "a" / "train.py").read_text()
    assert "clip_norm=2.0" in (tmp_path / "b" / "train.py").read_text()


def test_nothing_is_written_where_one_project_does_not_know_the_preset(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
        (tmp_path / name / ".git").mkdir()
    (tmp_path / "a" / "pyproject.toml").write_text(MINE)
    done = RUN.invoke(apply, ["--preset", "mine", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 2
    assert (tmp_path / "a" / "train.py").read_text() == SCRIPT


def test_they_are_listed_behind_the_others(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    lines = RUN.invoke(main, ["presets"]).output.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["off", "mine", "plain"]
    assert "RTX 3090" in lines[-2] and "20.5 GiB" in lines[-2]
    (tmp_path / "pyproject.toml").write_text("[tool.oomfix.presets.mine]\nclip_norm = -1\n")
    done = RUN.invoke(main, ["presets"])
    assert "pyproject.toml: [tool.oomfix] presets: mine: clip_norm: got -1" in done.stderr
    assert "mine" not in done.stdout
    assert done.exit_code == 2
