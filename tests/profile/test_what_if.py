"""`oomfix profile --preset` runs a script as `apply` would rewrite it, and leaves every file as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomfix.presets import PRESETS
from oomfix.profile.command import profile

RUN = CliRunner()
SCRIPT = """\
import sys

import torch
from torch import nn

layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(int(sys.argv[1]), 1024).cuda()
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
WHOLE_ROWS = 65536  # 20 KiB of activations in each of 8 blocks for each row: 16 GiB
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("what_if")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "pyproject.toml").write_text("[tool.oomfix.presets.mine]\nbase = '16gb'\nbudget_gib = 6.0\n")
    return folder


def found(folder: Path, *options: str) -> dict:
    done = RUN.invoke(profile, ["--format", "json", *options, str(folder / "train.py"), "--", str(WHOLE_ROWS)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_it_needs_less_and_nothing_is_written(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    unmodified, rewritten = found(folder, "--gpu", "t4"), found(folder, "--preset", "16gb")
    assert unmodified["peak_allocated_bytes"] > 16 * GIB
    assert rewritten["peak_reserved_bytes"] <= PRESETS["16gb"].budget_gib * GIB
    assert rewritten["out_of_memory"] is None and len(rewritten["steps"]) == 2
    assert rewritten["card"]["name"] == "T4"
    assert rewritten["rewritten"] == {
        "preset": "16gb",
        "loops": [
            {
                "path": str(folder / "train.py"),
                "line": 9,
                "end_line": 14,
                "rewrite": "micro-batched",
                "reason": None,
            }
        ],
    }
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_preset_of_ones_own_has_the_card_of_its_base_and_a_budget_of_its_own(folder):
    rewritten = found(folder, "--preset", "mine")
    assert rewritten["card"]["name"] == "T4"
    assert rewritten["peak_reserved_bytes"] <= 6 * GIB


def test_gpu_and_budget_win(folder):
    rewritten = found(folder, "--preset", "mine", "--gpu", "a100", "--budget", "80gb")
    assert rewritten["card"]["name"] == "A100 40GB"
    assert rewritten["peak_reserved_bytes"] > 6 * GIB


def test_the_text_says_what_would_be_done_and_whether_the_preset_is_enough(folder):
    done = RUN.invoke(profile, ["--preset", "16gb", str(folder / "train.py"), "--", "64"])
    assert done.output.startswith(f"{folder / 'train.py'}:9  micro-batched\n\n1 file would be rewritten")
    assert done.output.endswith("  gets by with the 13.4 GiB of 16gb\n")


@pytest.mark.parametrize(
    ("preset", "source", "said"),
    [("17gb", "x = 1\n", "did you mean '16gb'?"), ("16gb", "print 1\n", "cannot parse: line 1")],
)
def test_what_cannot_be_rewritten_is_told_in_words(tmp_path, preset, source, said):
    (tmp_path / "train.py").write_text(source)
    done = RUN.invoke(profile, ["--preset", preset, str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert said in done.output


def test_the_command_still_imports_no_torch(folder):
    code = "import sys, oomfix.rewrite.what_if; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}).returncode == 0
