"""`oomfix apply` without a path asks first, on a terminal; its options."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomfix.rewrite import files
from oomfix.rewrite.command import apply
from oomfix.rewrite.text.edits import apply_edits, with_text
from oomfix.rules.base import Edit

RUN = CliRunner()
TRAIN = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss
model.load_state_dict(torch.load("a.pt"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/engine.py"):
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "util.py").write_text("import torch\n\ncheckpoint = torch.load('a.pt')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def on_a_terminal(folder: Path, answer: str) -> tuple[str, int]:
    """What the command without a path writes to a terminal, and its exit code."""
    mine, its = os.openpty()
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "COLUMNS": "90"}
    command = [sys.executable, "-m", "oomfix", "apply", "--preset", "16gb"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    os.write(mine, f"{answer}\n".encode())
    said = b""
    while True:
        try:
            data = os.read(mine, 1024)
        except OSError:  # Linux says so when the other side is closed
            break
        if not data:
            break
        said += data
    os.close(mine)
    return said.decode().replace("\r\n", "\n"), process.wait()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
@pytest.mark.parametrize(("answer", "rewritten"), [("y", True), ("n", False), ("", False)])
def test_without_a_path_the_files_that_train_are_rewritten_after_a_yes(folder, answer, rewritten):
    said, code = on_a_terminal(folder, answer)
    assert code == 0
    assert "package/engine.py\ntrain.py\nRewrite these 2 files for 16gb? [y/N]: " in said
    assert ("2 files rewritten: 2 training loops" in said) is rewritten
    for name in ("train.py", "package/engine.py"):
        assert ("memory.step" in (folder / name).read_text()) is rewritten
    assert "map_location" not in (folder / "util.py").read_text()


def test_without_a_path_check_and_diff_ask_nothing_and_look_at_files_that_train(folder):
    done = RUN.invoke(apply, ["--preset", "16gb", "--check", "--format", "json"])
    assert done.exit_code == 1
    assert [file["path"] for file in json.loads(done.stdout)["files"]] == ["package/engine.py", "train.py"]


def test_codes_add_up_and_are_told_when_they_are_none(folder):
    done = RUN.invoke(apply, ["--preset", "16gb", "--only", "OOM101", "--only", "OOM205", "train.py"])
    assert done.exit_code == 0, done.output
    text = (folder / "train.py").read_text()
    assert "total += loss.detach()" in text and 'map_location="cpu"' in text
    (folder / "train.py").write_text(TRAIN)
    RUN.invoke(apply, ["--preset", "16gb", "--ignore", "OOM101", "--ignore", "OOM205", "--no-runtime", "train.py"])
    assert (folder / "train.py").read_text() == TRAIN
    assert "did you mean" in RUN.invoke(apply, ["--preset", "16gb", "--ignore", "OOM1O1", "train.py"]).output


def test_json_is_alone_on_standard_output_and_errors_stand_in_it(folder):
    (folder / "broken.py").write_text("x = (\n")
    done = RUN.invoke(apply, ["--preset", "16gb", "--format", "json", "."])
    assert done.exit_code == 2
    report = json.loads(done.stdout)
    assert list(report) == ["version", "files", "loops", "errors"]
    assert report["version"] == 1
    assert [set(loop) for loop in report["loops"]] == [{"path", "line", "end_line", "rewrite", "reason"}] * 2
    assert [set(file) for file in report["files"]] == [{"path", "changed", "edits"}] * 3
    assert report["errors"] == [{"path": "broken.py", "message": "cannot parse: line 1: '(' was never closed"}]
    assert done.stderr == ""


def test_a_terminal_without_the_characters_of_a_file_is_no_reason_to_fail(folder):
    text = TRAIN.replace("model(x), y)", "model(x), y)  # \u8a9e")
    (folder / "train_\u8a9e.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "oomfix", "apply", "--preset", "16gb", "--diff", "train_\u8a9e.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "y)  # \\u8a9e\n" in done.stdout and "train_\\u8a9e.py:7  micro-batched" in done.stderr


def test_a_defect_in_the_changes_of_one_file_stops_no_other(folder, monkeypatch):
    original = files.apply_to

    def overlapping(source, rules, options):
        if source.path == "train.py":
            apply_edits(source.text, [Edit(0, 5, ""), Edit(3, 3, "x")])
        return original(source, rules, options)

    monkeypatch.setattr(files, "apply_to", overlapping)
    done = RUN.invoke(apply, ["--preset", "16gb", "."])
    assert done.exit_code == 2
    assert "train.py: left as it is: its changes get in each other's way; please report it" in done.output
    assert (folder / "train.py").read_text() == TRAIN
    assert "memory.step" in (folder / "package" / "engine.py").read_text()


def test_changes_that_leave_no_python_are_our_fault_not_that_of_the_file(folder, monkeypatch):
    def breaking(source, rules, options):
        return with_text(source, source.text.replace("for ", "for\\ "))

    monkeypatch.setattr(files, "apply_to", breaking)
    done = RUN.invoke(apply, ["--preset", "16gb", "train.py"])
    assert done.exit_code == 2
    assert "train.py: left as it is: the result would be no Python (cannot parse: line" in done.output
    assert done.output.endswith("; please report it\n")
    assert (folder / "train.py").read_text() == TRAIN


def test_standard_input_is_no_file_to_change():
    done = RUN.invoke(apply, ["--preset", "16gb", "-"], input=TRAIN)
    assert done.exit_code == 2
    assert "-: expected a file or folder; scripts are rewritten in place, not from a stream" in done.output


@pytest.mark.parametrize("path", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_a_name_of_standard_input_does_not_rewrite_the_file_that_is_redirected_there(folder, path):
    with open(folder / "train.py") as script:
        command = [sys.executable, "-m", "oomfix", "apply", "--preset", "16gb", path]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, stdin=script, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"{path}: expected a file or folder" in done.stderr
    assert (folder / "train.py").read_text() == TRAIN


@pytest.mark.parametrize("command", ["", "  "])
def test_an_empty_command_to_compare_writes_nothing_either(folder, command):
    done = RUN.invoke(apply, ["--preset", "16gb", "train.py", "--check-equivalence", command])
    assert done.exit_code == 2
    assert f"--check-equivalence: got {command!r}, expected a command that trains" in done.output
    assert (folder / "train.py").read_text() == TRAIN


def test_what_python_warns_of_in_a_script_is_not_said_of_the_result(folder):
    (folder / "train.py").write_text(TRAIN.replace("total = 0", "total = 0\nassert total is not 1"))
    command = [sys.executable, "-W", "error", "-m", "oomfix", "apply", "--preset", "16gb", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "memory.step" in (folder / "train.py").read_text()


def test_without_a_preset_all_are_named(folder):
    done = RUN.invoke(apply, ["train.py"])
    assert done.exit_code == 2
    assert "--preset: none given, expected one of 8gb, 12gb, 16gb" in done.output
    assert (folder / "train.py").read_text() == TRAIN


def test_local_fixes_alone_deny_no_training_loop(folder):
    (folder / "train.py").write_text(TRAIN.replace("+= loss", "+= loss.item()").replace('"a.pt"', '"a.pt", "cpu"'))
    done = RUN.invoke(apply, ["--preset", "16gb", "--no-runtime", "--check", "train.py"])
    assert (done.exit_code, done.output) == (0, "no local fix to make; training loops stay as they are\n")
