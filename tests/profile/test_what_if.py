"""`oomfix profile --preset` runs a script as `apply` would rewrite it, and leaves every file as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomfix.presets import PRESETS
from oomfix.profile import command
from oomfix.profile.cards import budget
from oomfix.profile.command import profile
from oomfix.profile.process import INDEPENDENT

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


def test_it_runs_in_the_memory_of_the_preset_and_nothing_is_written(folder):
    """The whole batch would take 19.5 GiB."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = ["--preset", "mine", "--format", "json"]
    done = RUN.invoke(profile, [*options, str(folder / "train.py"), "--", str(WHOLE_ROWS)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["out_of_memory"] is None and len(found["steps"]) == 2
    assert found["peak_reserved_bytes"] <= 6 * GIB
    assert found["card"]["name"] == "T4"
    loop = {"path": str(folder / "train.py"), "line": 9, "end_line": 14, "rewrite": "micro-batched", "reason": None}
    assert found["rewritten"] == {"preset": "mine", "loops": [loop]}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # the runtime's checks compare no numbers, for there are none
    assert len(found["assumptions"]) == 1 and found["assumptions"][0].startswith(INDEPENDENT)


class Simulator:
    """Takes the place of the process that runs a script: notes what it is asked for, and answers."""

    def __init__(self, monkeypatch, **found: object) -> None:
        monkeypatch.setattr(command, "run_script", self)
        self.found = {**found, "error": None, "out_of_memory": found.get("out_of_memory")}

    def __call__(self, script, args, options, contents):
        # of options given twice the last one counts
        self.options = dict(zip(options[::2], options[1::2], strict=True))
        self.contents = contents
        return self.found, 0


def test_the_card_and_the_budget_are_those_of_the_preset(folder, monkeypatch):
    simulator = Simulator(monkeypatch)
    RUN.invoke(profile, ["--preset", "16gb", "--format", "json", str(folder / "train.py")])
    assert simulator.options["--gpu"] == "t4"
    assert budget(simulator.options["--budget"]) == pytest.approx(PRESETS["16gb"].budget_gib * GIB, abs=1)
    ((path, content),) = simulator.contents.items()
    assert path == os.path.realpath(folder / "train.py") and b'runtime.preset("16gb")' in content


def test_gpu_and_budget_win(folder, monkeypatch):
    simulator = Simulator(monkeypatch)
    options = ["--preset", "16gb", "--gpu", "a100", "--budget", "80gb", "--format", "json"]
    RUN.invoke(profile, [*options, str(folder / "train.py")])
    assert (simulator.options["--gpu"], simulator.options["--budget"]) == ("a100", "80gb")


def test_without_a_preset_the_script_runs_as_it_is(folder, monkeypatch):
    simulator = Simulator(monkeypatch)
    RUN.invoke(profile, ["--format", "json", str(folder / "train.py")])
    assert simulator.options["--gpu"] == "a100-40gb" and "--budget" not in simulator.options
    assert simulator.contents == {}


@pytest.mark.parametrize(("out_of_memory", "verb"), [(None, "fits"), ("CUDA out of memory", "runs out of")])
def test_the_text_says_what_would_be_done_and_whether_the_preset_is_enough(folder, monkeypatch, out_of_memory, verb):
    Simulator(monkeypatch, out_of_memory=out_of_memory)
    monkeypatch.setattr(command, "lines", lambda found: ["the estimate"])
    output = RUN.invoke(profile, ["--preset", "16gb", str(folder / "train.py")]).output
    assert output.startswith(f"{folder / 'train.py'}:9  micro-batched\n\n1 file would be rewritten")
    assert output.endswith(f"the estimate\n  {verb} the 13.4 GiB of 16gb\n")


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
