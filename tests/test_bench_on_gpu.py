"""The benches for a GPU are walked on a simulated card, so that none ends at its first line on a real one.

Nothing is computed there and every step takes as long: what is held is that each path runs to its row.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import comparison, on_gpu, techniques, workloads
from bench import runtime as runtime_bench
from oomfix.profile.cards import find_card
from oomfix.profile.checks import answer_checks
from oomfix.profile.simulated_gpu import SimulatedGPU
from oomfix.runtime.compat import OutOfMemoryError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run them on")
TINY = workloads.Workload(
    "two layers",
    lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))),
    lambda: (torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)),
    lambda model, batch, kind: nn.functional.cross_entropy(model(batch[0]), batch[1]),
)


@pytest.fixture
def card():
    card = SimulatedGPU(find_card("a100-80gb"))
    with card.running() as trace:
        answer_checks(card.patches, trace, independent=True)
        yield trace.allocator


def cells(rows):
    return {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in rows if line[:3] != "|--"}


@pytest.mark.slow
def test_every_technique_gets_a_row(card, monkeypatch):
    monkeypatch.setattr(techniques, "FULL", {"tiny": TINY})
    found = cells(techniques.rows_on_gpu("tiny", 1))
    for technique in techniques.techniques_for(TINY):
        peak, saved, step, time = found[technique.name]
        assert float(peak) >= 0 and saved.endswith(" %") and float(step) > 0 and float(time) > 0


def test_a_technique_that_does_not_fit_keeps_no_other_from_its_row(monkeypatch, capsys):
    """Without the plain loop there is nothing to compare with."""

    def measure(technique, workload, rounds):
        if technique in (techniques.PLAIN, techniques.TECHNIQUES[1]):
            raise OutOfMemoryError("CUDA out of memory.")
        return 2.0, 50.0

    monkeypatch.setattr(techniques, "FULL", {"tiny": TINY})
    monkeypatch.setattr(techniques, "gpu_peak_and_time", measure)
    rows = techniques.rows_on_gpu("tiny", 1)
    assert "| plain loop | out of memory | | | |" in rows
    assert "| `use_lean_step` | out of memory | | | |" in rows
    assert "| `enable_checkpointing` | 2.00 | - | 50.0 | - |" in rows
    assert "plain loop: CUDA out of memory." in capsys.readouterr().err


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(ZeroDivisionError), on_gpu.told_if_out_of_memory("plain loop"):
        raise ZeroDivisionError


@pytest.mark.slow
def test_every_contender_of_the_comparison_gets_a_row(card, monkeypatch):
    """But for the other libraries, which look for their own kind of card."""
    of_others = ("Accelerate", "Fabric", "oomfix, preset 12", "oomfix, preset 24", "oomfix, preset 4")
    every = comparison.contenders("cuda", half=True)
    mine = [contender for contender in every if not contender.name.startswith(of_others)]
    monkeypatch.setattr(comparison, "contenders", lambda device, half: mine)
    monkeypatch.setattr(comparison, "FULL", {"tiny": TINY})
    monkeypatch.setattr(comparison, "TRAINED", 1)
    found = cells(comparison.measured_rows("tiny", "cuda", 1))
    for contender in mine:
        peak, step, ratio, _ = found[contender.name]
        assert float(peak) >= 0 and float(step) > 0 and float(ratio) > 0


@pytest.mark.slow
def test_the_bench_of_the_runtime_gets_its_rows(card, monkeypatch):
    for name in ("STEPS", "PAIRS"):
        monkeypatch.setattr(runtime_bench, name, 1)
    workload = replace(runtime_bench.CUDA, width=16, depth=1, length=4, samples=8)
    for contender in runtime_bench.contenders(workload):
        if contender.name in ("oomfix, bf16, micro_batches=2", "oomfix, preset 8gb"):
            row = runtime_bench.compare(contender, workload, 1)
            assert row.startswith(f"| {contender.name} | ")


def test_calibration_measures_a_case_and_every_overhead(card, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(techniques.__file__).parent))
    import profile_calibration as calibration

    case = calibration.Case(
        "tiny", lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), calibration.images(2, 4),
        calibration.classification,
    )  # fmt: skip
    for precision in calibration.DTYPES:
        measured = calibration.measure(case, precision)
        assert 0 < measured["allocated"] <= measured["reserved"]
    names = [name for name, *_ in calibration.measured_overheads((8, 0))]
    assert len(names) == len(set(names)) == 16
    sys.modules.pop("profile_calibration")
