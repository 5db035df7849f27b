"""The calibration for machines with a GPU, as far as it can be tested without one: cases, cards, arithmetic."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20


@pytest.fixture(scope="module")
def calibration():
    # a script among scripts: it imports its neighbour by its bare name
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import profile_calibration
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return profile_calibration


@pytest.mark.parametrize(
    ("name", "capability", "capacity_gib", "card"),
    [
        ("Tesla T4", (7, 5), 14.74, "t4"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 79.14, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, "a100-40gb"),
        ("NVIDIA H200", (9, 0), 139.7, "h200"),
        ("NVIDIA GeForce RTX 3090", (8, 6), 23.6, "rtx3090"),
        # not in the list: an Ada card of 20 GB, and one of a generation to come
        ("NVIDIA RTX 4000 Ada Generation", (8, 9), 19.6, "l4"),
        ("NVIDIA X900", (12, 0), 180.0, "h200"),
    ],
)
def test_a_real_card_is_predicted_for_by_its_like(calibration, name, capability, capacity_gib, card):
    assert calibration.nearest_card(name, capability, capacity_gib) == card


def test_errors_are_those_of_the_prediction_and_margins_are_held_against_them(calibration):
    rows = [
        ("right", 100 * MIB, 120 * MIB, 0.04, {"allocated": 100 * MIB, "reserved": 120 * MIB}),
        ("over", 110 * MIB, 120 * MIB, 0.04, {"allocated": 100 * MIB, "reserved": 100 * MIB}),
        ("under, within the margin", 97 * MIB, 120 * MIB, 0.04, {"allocated": 100 * MIB, "reserved": 120 * MIB}),
        ("under, beyond it", 95 * MIB, 120 * MIB, 0.04, {"allocated": 100 * MIB, "reserved": 120 * MIB}),
    ]
    lines = calibration.table(rows)
    assert "| over | 110.0 | 100.0 | +10.00 % | 120.0 | 100.0 | +20.00 % | 4 % |" in lines
    assert calibration.summary(rows) == (
        "mean absolute error of the allocated peak 4.50 %, most under 5.00 %, 1 of 4 beyond the margin"
    )


def test_the_unet_is_the_one_of_31_million_parameters(calibration):
    assert sum(parameter.numel() for parameter in calibration.UNet().parameters()) == pytest.approx(31.04e6, rel=0.001)


def test_a_case_is_predicted_in_its_precisions(calibration):
    (case,) = [case for case in calibration.CASES if case.name == "LSTM b64 s256"]
    (fp32, *_), (fp16, *_) = (calibration.predict(case, precision, "t4") for precision in case.precisions)
    assert 0.5 * fp32 < fp16 < fp32
    assert len(calibration.CASES) == 10 and all(len(case.precisions) == 2 for case in calibration.CASES)


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    command = [sys.executable, str(ROOT / "bench" / "profile_calibration.py")]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "", "HOME": "/"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device here; --predict" in done.stderr


@pytest.mark.slow
def test_a_case_that_fails_leaves_the_others_their_table(calibration, capfd, monkeypatch):
    """As on a card that is too small for it; here there is none at all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert calibration.in_a_process(calibration.CASES[0], "fp32") is None
    assert f"{calibration.CASES[0].name} fp32 was not measured: " in capfd.readouterr().err
