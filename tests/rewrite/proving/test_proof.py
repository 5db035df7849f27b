"""`apply --prove`: both peaks, side by side, and whether the preset is met."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oomfix.presets import PRESETS
from oomfix.rewrite.command import apply
from oomfix.rewrite.proving import proof
from oomfix.rewrite.proving.proof import Proof

RUN = CliRunner()
TRAIN = """\
import argparse

import torch
from engine import train_one
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, required=True)
layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_one(model, optimizer, parser.parse_args().rows)
"""
ENGINE = """\
import torch


def train_one(model, optimizer, rows):
    for _ in range(2):
        x = torch.randn(rows, 1024).cuda()
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
"""
PYPROJECT = "[tool.oomfix.presets.tiny]\nbase = '16gb'\nbudget_gib = 0.2\ncheckpointing = 'off'\n"
GIB = 2**30


def apply_to(folder: Path, *arguments: str) -> Result:
    (folder / "train.py").write_text(TRAIN)
    (folder / "engine.py").write_text(ENGINE)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return RUN.invoke(apply, [str(folder / "train.py"), str(folder / "engine.py"), *arguments])


def found(peak_gib: float, out_of_memory: str | None = None, **breakdown: int) -> dict[str, object]:
    return {
        "card": {"name": "T4", "capacity_gib": 14.74},
        "peak_allocated_bytes": int(peak_gib * GIB),
        "peak_reserved_bytes": int((peak_gib + 0.5) * GIB),
        "breakdown": breakdown,
        "margin_fraction": 0.04,
        "out_of_memory": out_of_memory,
        "assumptions": [],
        "steps": [] if out_of_memory else [{"peak_allocated_bytes": int((peak_gib - 1) * GIB)}],
    }


def test_both_runs_stand_side_by_side():
    before, after = found(23.4, weights=GIB, gradients=GIB), found(6.4, weights=GIB, temporaries=2**20)
    assert Proof("train.py", "16gb", PRESETS["16gb"], before, after).lines() == [
        "train.py on a simulated T4 (14.74 GiB)",
        "                          before       after",
        "  allocated            23.40 GiB    6.40 GiB",
        "  reserved             23.90 GiB    6.90 GiB",
        "  in the last step     22.40 GiB    5.40 GiB",
        "  at the peak",
        "    weights             1.00 GiB    1.00 GiB",
        "    gradients           1.00 GiB           -",
        "    temporaries                -     1.0 MiB",
        "peak 23.4 GiB -> 6.4 GiB, fits 16 GiB (13.4 GiB of it for tensors, less a margin of 4 %)",
    ]
    failed = Proof("train.py", "mine", PRESETS["16gb"], before, found(13.0, "CUDA out of memory"))
    assert failed.verdict.startswith("peak 23.4 GiB -> 13.0 GiB, does not fit mine (13.4 GiB")
    assert Proof("train.py", "auto", PRESETS["auto"], before, after).verdict == "peak 23.4 GiB -> 6.4 GiB"


def test_a_batch_that_was_split_is_told_with_what_becomes_of_it_unsplit(tmp_path, monkeypatch):
    split = {**found(6.4), "assumptions": ["samples do not depend on each other at engine.py:10, 2 times"]}
    answers, given = [found(23.4), split, found(13.0, "CUDA out of memory")], []

    def run_script(script, args, options, contents):
        given.append("--coupled" in options)
        return {**answers.pop(0), "error": None}, 0

    monkeypatch.setattr(proof, "run_script", run_script)
    done = apply_to(tmp_path, "--preset", "16gb", "--prove")
    assert done.exit_code == 0, done.output
    assert given == [False, False, True]
    assert done.output.splitlines()[-1] == (
        "batches are split there; if training finds that samples depend on each other, they stay whole: does not fit"
    )
    unsplit = Proof("train.py", "16gb", PRESETS["16gb"], found(23.4), split, found(9.1))
    assert unsplit.lines()[-1].endswith("they stay whole: peak 9.1 GiB, fits")
    assert unsplit.as_json()["after_unsplit"]["out_of_memory"] is None


@pytest.mark.parametrize("answer", [None, {"error": "AttributeError: use_checkpointing"}])
def test_a_script_that_fails_unsplit_is_proven_split_all_the_same(tmp_path, monkeypatch, answer):
    split = {**found(6.4), "assumptions": ["samples do not depend on each other at engine.py:10"]}
    answers = [{**found(23.4), "error": None}, {**split, "error": None}, answer]
    monkeypatch.setattr(proof, "run_script", lambda *_: (answers.pop(0), 1))
    done = apply_to(tmp_path, "--preset", "16gb", "--prove")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith("they stay whole: does not fit")


def test_a_loop_in_a_module_is_run_as_rewritten_and_check_writes_nothing(tmp_path):
    done = apply_to(tmp_path, "--preset", "16gb", "--check", "--format", "json", "--prove", "--", "--rows", "65536")
    assert done.exit_code == 1, done.output
    numbers = json.loads(done.stdout)["proof"]
    assert numbers["fits"] is True
    assert numbers["before"]["peak_allocated_bytes"] > 19 * GIB
    assert numbers["after"]["peak_reserved_bytes"] <= numbers["budget_gib"] * GIB / (1 + numbers["margin_fraction"])
    assert numbers["after_unsplit"] is not None
    assert numbers["before"]["breakdown"]["weights"] == numbers["after"]["breakdown"]["weights"]
    assert (tmp_path / "engine.py").read_text() == ENGINE


def test_what_does_not_fit_is_not_written_so_that_another_preset_can_be_tried(tmp_path, monkeypatch):
    answers = [found(23.4), found(0.2, "CUDA out of memory")]
    monkeypatch.setattr(proof, "run_script", lambda *_: ({**answers.pop(0), "error": None}, 0))
    done = apply_to(tmp_path, "--preset", "tiny", "--prove", "--backup")
    assert done.exit_code == 1, done.output
    *_, verdict, last = done.output.splitlines()
    assert verdict.startswith("peak 23.4 GiB -> 204.8 MiB, does not fit tiny (0.2 GiB")
    assert last == "nothing is written; without --prove, it would be"
    assert "1 file would be rewritten" in done.output
    assert (tmp_path / "engine.py").read_text() == ENGINE
    assert not list(tmp_path.glob("*.orig"))


def test_what_fits_is_written(tmp_path, monkeypatch):
    answers = [found(23.4), found(6.4)]
    monkeypatch.setattr(proof, "run_script", lambda *_: ({**answers.pop(0), "error": None}, 0))
    done = apply_to(tmp_path, "--preset", "16gb", "--prove")
    assert done.exit_code == 0, done.output
    assert "1 file rewritten" in done.output
    assert "memory.forward_backward" in (tmp_path / "engine.py").read_text()


@pytest.mark.parametrize(
    ("answers", "when"), [([None], "before"), ([{"error": "KeyError"}], "before"), ([found(1.0), None], "after")]
)
def test_a_script_that_cannot_be_simulated_is_told_and_stays(tmp_path, monkeypatch, answers, when):
    answers = [answer and {"error": None, **answer} for answer in answers]
    monkeypatch.setattr(proof, "run_script", lambda *_: (answers.pop(0), 2))
    done = apply_to(tmp_path, "--preset", "16gb", "--prove")
    assert done.exit_code == 2
    assert f"train.py: nothing is proven: the run {when} the rewrite came to no result\n" in done.output
    assert "nothing is written; without --prove, it would be\n" in done.output
    assert (tmp_path / "engine.py").read_text() == ENGINE


def test_a_run_that_the_system_kills_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "run_script", lambda *_: (None, -9))
    done = apply_to(tmp_path, "--preset", "16gb", "--prove")
    assert "came to no result: it was killed, as when the memory of the host is full" in done.output


def test_a_folder_cannot_be_proven(tmp_path):
    done = RUN.invoke(apply, ["--preset", "16gb", "--prove", str(tmp_path)])
    assert done.exit_code == 2
    assert "--prove: runs a script, expected a Python file as the first PATH" in done.output


def test_without_prove_what_follows_the_dashes_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-train.py").write_text(ENGINE)
    done = RUN.invoke(apply, ["--preset", "16gb", "--", "-train.py"])
    assert done.exit_code == 0, done.output
    assert "memory.forward_backward" in (tmp_path / "-train.py").read_text()
