"""`apply --check-equivalence`: a user's command before and after, compared by every optimizer step."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oomfix.equivalence.comparison import Recording, Step
from oomfix.equivalence.recorder_hook import sitecustomize
from oomfix.rewrite.command import apply
from oomfix.rewrite.proving import trial
from oomfix.rewrite.proving.trial import CannotCompare, Versions, try_out
from oomfix.rewrite.proving.trial_text import lines

RUN = CliRunner()
PYTHON = shlex.quote(sys.executable)
TRAIN = """\
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(6):
    x, y = torch.randn(12, 8), torch.randint(4, (12,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
open("log.txt", "w").write("a run was here")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "log.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OOMFIX_PRESET", raising=False)
    return tmp_path


def check(command: str, *options: str) -> Result:
    return RUN.invoke(apply, ["--preset", "16gb", "train.py", *options, "--check-equivalence", command])


# -- real runs ---------------------------------------------------------------------------------------------------


def test_a_rewritten_script_is_the_same_to_the_bit_when_off_and_to_rounding_when_split(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = check(f"{PYTHON} train.py 0.1", "--format", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["equivalence"]
    assert found["same"] is True
    off, split = found["versions"]
    assert (off["name"], off["steps"], off["largest_difference"], off["tolerance"]) == ("off", 6, 0.0, 0.0)
    assert (split["name"], split["steps"], split["notes"]) == ("16gb", 6, ["6 batches were split"])
    assert 0 < split["largest_difference"] < split["tolerance"] == 1e-5
    assert len(found["losses"]) == 6
    for losses in found["losses"]:
        assert losses["off"] == losses["before"] == pytest.approx(losses["16gb"], rel=1e-5)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_command_that_fails_shows_its_last_lines(folder):
    done = check(f"""{PYTHON} -c 'float("fast")'""")
    assert done.exit_code == 2
    assert "failed with exit code 1, run before the rewrite in a copy of this folder" in done.output
    assert "ValueError: could not convert string to float: 'fast'" in done.output


def test_a_sitecustomize_of_the_user_still_runs(tmp_path):
    hook, own = tmp_path / "hook", tmp_path / "own"
    for path in (hook, own):
        path.mkdir()
    (hook / "sitecustomize.py").write_text(sitecustomize(str(hook), str(tmp_path)))
    (own / "sitecustomize.py").write_text("print('mine')\n")
    environment = {**os.environ, "PYTHONPATH": f"{hook}{os.pathsep}{own}"}
    code = "import sys; print(len(sys.path) == len(set(sys.path)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("mine\nTrue False\n", "")


# -- verdicts, with runs made up ---------------------------------------------------------------------------------


def recording(*digests: str, seen: tuple[str, ...] = (), files: tuple[str, ...] = ("train.py",)) -> list[Recording]:
    steps = tuple(Step(0, (1.0,), digest, (float(digest == "b"), 1.0)) for digest in digests)
    return [Recording(steps, frozenset(seen), 0, frozenset(files))]


class Runs:
    """Answers for the runs of a trial: before, and again; off, and without mends; the preset, and in whole batches."""

    def __init__(self, before, off, preset, again=None, without=None, whole=None) -> None:
        self.answers = {b"": [before, again or before], b"off": [off], b"without": [without], b"fp32": [preset, whole]}
        self.made: list[tuple[bool, bool]] = []

    def run(self, contents, preset):
        version = contents.get("train.py", b"")
        assert preset == ("off" if version in (b"off", b"without") else None)
        return self.answers[version].pop(0)

    def in_fp32(self, mends: bool, split: bool) -> dict[str, bytes]:
        self.made.append((mends, split))
        return {"train.py": b"fp32"}

    def result(self, monkeypatch, mend: bool = False) -> trial.Trial:
        monkeypatch.setattr(trial, "_Runner", lambda command: self)
        written = {True: {"train.py": b"off"}, False: {"train.py": b"without"}}
        return try_out("train", Versions("16gb", mend, written.__getitem__, self.in_fp32), lambda said: None)


@pytest.mark.parametrize(
    ("seen", "split", "note"),
    [
        ((), True, "batches stayed whole"),
        (("batch statistics",), False, "batches stayed whole, since BatchNorm normalises by them"),
    ],
)
def test_batches_are_split_only_where_that_can_be_compared(monkeypatch, seen, split, note):
    runs = Runs(recording("a"), recording("a", seen=seen), recording("a"))
    result = runs.result(monkeypatch)
    assert result.same and result.mends and runs.made == [(True, split)]
    assert result.sides[1].notes == (note,)


def test_batches_stay_whole_where_parts_draw_other_numbers(monkeypatch):
    """Noise is that of the whole batch in parts too, masks of dropout are not."""
    drawing = recording("a", seen=("random draws",))
    noise = Runs(recording("a"), drawing, recording("a"))
    result = noise.result(monkeypatch)
    assert result.same and noise.made == [(True, True)]
    assert result.sides[1].notes == ("batches stayed whole",)  # for another reason

    dropout = Runs(recording("a"), drawing, recording("b"), whole=recording("a"))
    result = dropout.result(monkeypatch)
    assert result.same and dropout.made == [(True, True), (True, False)]
    assert result.sides[1].notes == ("batches stayed whole, since the forward draws random numbers",)
    assert not Runs(recording("a"), drawing, recording("b"), whole=recording("b")).result(monkeypatch).same


def test_a_version_that_trains_otherwise_is_told_by_its_first_step(monkeypatch):
    result = Runs(recording("a", "a"), recording("a", "b"), recording("b", "b"), recording("a", "a")).result(
        monkeypatch
    )
    assert not result.same
    assert [side.found.difference for side in result.sides] == [
        "weights differ by 1.0e+00 after step 2",
        "weights differ by 1.0e+00 after step 1",
    ]


def test_what_changes_the_training_is_left_out_of_the_comparison_and_named(monkeypatch):
    runs = Runs(recording("a", "a"), recording("a", "b"), recording("a", "a"), without=recording("a", "a"))
    result = runs.result(monkeypatch, mend=True)
    assert result.same and not result.mends and runs.made == [(False, True)]
    assert lines(result, ["train.py: OOM302: the last window of an epoch is stepped"])[-4:] == [
        "off: the same weights, to the bit, after each of 2 steps",
        "16gb: the same weights, to the bit, after each of 2 steps; batches stayed whole",
        "left out, since it changes what is trained: train.py: OOM302: the last window of an epoch is stepped",
        "the rewritten scripts train the same, but for what they mend",
    ]


def test_mends_that_change_nothing_are_compared_too(monkeypatch):
    runs = Runs(recording("a"), recording("a"), recording("a"))
    result = runs.result(monkeypatch, mend=True)
    assert result.mends and runs.made == [(True, True)]
    assert lines(result)[-1] == "the rewritten scripts train the same"


def test_losses_stand_side_by_side_the_first_ones_and_some_up_to_the_last(monkeypatch):
    steps = [recording(*"a" * count) for count in (25, 25, 24)]
    text = lines(Runs(*steps).result(monkeypatch))
    assert text[0] == "loss   step          before      after, off     after, 16gb"
    assert [line.split()[0] for line in text[1:11]] == ["1", "2", "3", "4", "5", "9", "13", "17", "21", "25"]
    assert text[1].split()[1:] == ["1", "1", "1"]
    assert text[10].split()[1:] == ["1", "1", "-"]
    assert text[-2:] == [
        "16gb: differs: 25 steps before and 24 after; batches stayed whole",
        "the rewritten scripts do not train the same",
    ]


def test_scripts_in_mixed_precision_of_their_own_are_compared_more_coarsely(monkeypatch):
    runs = Runs(recording("a"), recording("a", seen=("mixed precision",)), recording("a"))
    assert runs.result(monkeypatch).sides[1].tolerance == 1e-2


def test_a_command_that_does_not_repeat_itself_proves_nothing(monkeypatch):
    with pytest.raises(CannotCompare, match=r"does not repeat itself.*after step 2"):
        Runs(recording("a", "a"), recording("a", "b"), recording("a"), recording("a", "b")).result(monkeypatch)


def test_a_command_that_trains_nothing_is_refused(monkeypatch):
    with pytest.raises(CannotCompare, match="no optimizer step was seen"):
        Runs([], [], []).result(monkeypatch)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("other.py", "/usr/lib/train.py"), "ran none of the files that would be rewritten"),
        (("{here}/train.py",), "runs train.py by an absolute path or as an installed package"),
    ],
)
def test_a_command_that_runs_other_files_is_refused(folder, monkeypatch, files, said):
    files = tuple(name.format(here=folder.resolve()) for name in files)
    with pytest.raises(CannotCompare, match=said):
        Runs(recording("a", files=files), recording("a"), recording("a")).result(monkeypatch)


# -- copies ------------------------------------------------------------------------------------------------------


def test_a_copy_holds_what_code_needs_and_links_lead_where_they_led(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "data.txt").write_text("data")
    for name in (".git", "venv", "package/__pycache__"):
        (folder / name).mkdir(parents=True)
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (folder / "package" / "module.py").write_text("")
    (folder / "inside").symlink_to("package/module.py")
    (folder / "data").symlink_to(os.path.relpath(outside, folder))
    copy = folder.parent / "copy" / "deeper"
    copy.parent.mkdir()
    trial._Runner("true")._copy(str(copy))
    found = sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))
    assert found == ["data", "inside", "log.txt", "package", "package/module.py", "train.py"]
    assert (copy / "data" / "data.txt").read_text() == "data"
    assert (copy / "inside").resolve() == (copy / "package" / "module.py").resolve()


def test_a_folder_that_is_too_large_to_copy_is_refused(folder, monkeypatch):
    monkeypatch.setattr(trial, "MOST_BYTES", 100)
    done = check("true")
    assert done.exit_code == 2
    assert "GiB and is copied for every run, expected at most" in done.output


def test_nothing_to_rewrite_and_files_elsewhere_are_refused(folder, tmp_path_factory):
    (folder / "train.py").write_text("x = 1\n")
    assert "nothing would be rewritten" in check("true").output
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "train.py"
    elsewhere.write_text(TRAIN)
    done = RUN.invoke(apply, ["--preset", "16gb", str(elsewhere), "--check-equivalence", "true"])
    assert done.exit_code == 2
    assert "lies outside of the current folder" in done.output


def test_it_runs_alone(folder):
    done = check("true", "--diff")
    assert done.exit_code == 2
    assert "expected no --diff, --check or --prove beside it" in done.output
