"""`oomfix profile` as it is typed: batch sizes, plots, stages, and what it says about wrong arguments."""

import json
import os
import sys
import time

import pytest
from click.testing import CliRunner

from oomfix.profile.command import profile

LINEAR = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

rows = int(sys.argv[1].removeprefix("rows="))
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.zeros(1, 4096).expand(100_000, 4096)), batch_size=rows)
for (x,) in LOADER:
    model(x.cuda()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

FOUND = {"batch_size": None, "samples": None, "out_of_memory": None, "error": None, "budget_bytes": None}


@pytest.fixture
def command(tmp_path, forked):
    def of(loader, *arguments):
        script = tmp_path / "train.py"
        script.write_text(LINEAR.replace("LOADER", loader))
        result = CliRunner().invoke(profile, [*arguments[:-1], str(script), "--", arguments[-1]])
        return result, json.loads(result.stdout) if "json" in arguments and result.exit_code == 0 else None

    return of


def test_the_largest_batch_fits_and_one_a_little_larger_does_not(command):
    result, found = command("loader", "--gpu", "rtx4060-laptop", "--find-batch-size", "--format", "json", "rows=16384")
    assert result.exit_code == 0, result.stderr
    sizes = {trial["batch_size"]: trial["fits"] for trial in found["batch_sizes"]}
    largest = found["largest_batch_size"]
    assert sizes[largest] and any(not fits and largest < size <= 17 / 16 * largest for size, fits in sizes.items())
    # eleven tensors of [rows, 4096] in fp32, beside 1 GiB of weights and gradients
    assert 30_000 < largest < 36_000
    # the report is of the script's own batches
    assert found["batch_size"] == 16384
    assert f"batch size {largest}: fits" in result.stderr


def test_the_size_takes_the_place_of_braces_in_the_script_s_arguments(monkeypatch, tmp_path):
    """A card for 100 samples, 1 MiB each; the search begins at 8."""
    given = []

    def run_script(script, args, options, rewritten):
        given.append(args)
        size = int(args[1].removeprefix("rows="))
        fit = {"fits": size <= 100, "budget_bytes": 100 * 2**20}
        return {**FOUND, "peak_reserved_bytes": size * 2**20, "fits": {"card": fit}}, 0

    monkeypatch.setattr("oomfix.profile.command.run_script", run_script)
    (tmp_path / "train.py").touch()
    arguments = ["--find-batch-size", "--format", "json", str(tmp_path / "train.py"), "--", "fast", "rows={}"]
    found = json.loads(CliRunner().invoke(profile, arguments).stdout)
    assert 95 <= found["largest_batch_size"] <= 100
    assert given[0] == ["fast", "rows=8"] and ["fast", f"rows={found['largest_batch_size']}"] in given
    # without a size of the script's own, the report is of the largest that fits
    assert found["peak_reserved_bytes"] == found["largest_batch_size"] * 2**20


def test_without_a_loader_it_asks_for_the_argument_that_names_the_size(command):
    result, _ = command("[loader.dataset[:rows]] * 3", "--find-batch-size", "rows=8")
    assert result.exit_code == 2 and "put {} where its arguments name one" in result.output


def test_a_plot_is_written_beside_the_report(command, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "mem.svg"
    result, _ = command("loader", "--stage", "1", "--plot", str(picture), "rows=64")
    assert result.exit_code == 0 and "largest at the peak" in result.output
    assert picture.read_text().startswith("<?xml")


def test_a_plot_of_another_kind_is_refused_before_the_script_runs(command, tmp_path):
    result, _ = command("loader", "--plot", str(tmp_path / "mem.pdf"), "rows=none")
    assert result.exit_code == 2 and "got 'mem.pdf', expected a name that ends in .png, .svg, .html" in result.output


@pytest.mark.parametrize("size", ["0.3", "17gb", "auto", "inf", "nan"])
def test_a_budget_that_is_none_is_refused_before_the_script_runs(command, size):
    result, _ = command("loader", "--budget", size, "rows=none")
    assert result.exit_code == 2
    assert f"Error: --budget: got '{size}', expected one of 8gb, 12gb" in result.output
    assert "the GiB of a card (above 0.59)" in result.output


def test_a_notebook_is_refused_with_what_to_do(tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    result = CliRunner().invoke(profile, [str(notebook)])
    assert result.exit_code == 2
    assert "is a notebook, expected a Python file: jupyter nbconvert --to script" in result.output


PACKAGED = """
import torch
from .layers import make
model = make().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.zeros(8, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("name", ["pkg.train", "pkg"])
def test_a_module_runs_as_python_m_runs_it(tmp_path, monkeypatch, forked, name):
    """1 MiB of weights, made by the module beside; the file is named, so that other commands find it."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layers.py").write_text("import torch\ndef make(): return torch.nn.Linear(512, 512, bias=False)\n")
    file = package / ("train.py" if "." in name else "__main__.py")
    file.write_text(PACKAGED)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(profile, ["--format", "json", "-m", name])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["breakdown"]["weights"] == 2**20 and found["script"] == str(file.relative_to(tmp_path))


def test_a_module_that_is_not_there_is_looked_for_by_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(profile, ["-m", "pkg.train"])
    assert result.exit_code == 2
    assert "no file pkg/train.py or pkg/train/__main__.py below the current folder" in " ".join(result.output.split())


TERMINAL = """
import os
import torch
lines, columns = os.popen("stty size").read().split()
assert (lines, columns) == ("24", "80")
for _ in range(2):
    try:
        input("continue? ")
    except EOFError:
        torch.ones(3).cuda()
"""


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has such terminals")
def test_scripts_ask_a_terminal_for_its_size_and_wait_for_nobody(tmp_path):
    """The progress bar of many scripts for CIFAR-10 takes its width from `stty size`."""
    script = tmp_path / "train.py"
    script.write_text(TERMINAL)
    result = CliRunner().invoke(profile, ["--format", "json", str(script)])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["peak_allocated_bytes"] == 512


LEFT_BEHIND = """
import subprocess
import sys
import torch
torch.ones(3).cuda()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], stdin=subprocess.DEVNULL)
"""


def test_what_a_script_leaves_running_holds_nothing_up(tmp_path):
    """The process that stays inherits the script's output."""
    script = tmp_path / "train.py"
    script.write_text(LEFT_BEHIND)
    started = time.monotonic()
    result = CliRunner().invoke(profile, ["--format", "json", str(script)])
    assert result.exit_code == 0 and time.monotonic() - started < 90


def test_without_torch_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("oomfix.profile.process.find_spec", lambda name: None)
    (tmp_path / "train.py").write_text("import torch")
    result = CliRunner().invoke(profile, [str(tmp_path / "train.py")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"train.py: cannot be simulated: torch is not installed for {sys.executable}" in result.stderr


def test_a_script_that_fails_at_once_is_given_no_estimate(tmp_path, forked):
    (tmp_path / "train.py").write_text("import torch\n1 / 0\n")
    result = CliRunner().invoke(profile, [str(tmp_path / "train.py")])
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert result.stdout.endswith("failed before anything was on the card: the error above is its own\n")
    assert result.stdout.count("\n") == 1


READING = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.zeros(8, 512, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def test_lines_of_the_script_are_named_as_seen_from_here(tmp_path, monkeypatch, forked):
    (tmp_path / "train.py").write_text(READING)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(profile, ["train.py"]).stdout.splitlines()
    assert said[-1] == "    a number read from the card is 1 at train.py:9"
