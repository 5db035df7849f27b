"""Techniques on two processes under DDP: the gradients that DDP exchanges are those of the plain step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_gradients_under_ddp_are_those_of_the_plain_step(tmp_path):
    """One run for all techniques, since starting two processes takes most of it; one that hangs is ended."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "meeting")],
        capture_output=True, text=True, timeout=300, check=False, cwd=SCRIPT.parents[2],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )  # fmt: skip
    errors = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert errors.keys() == {"checkpointing", "offloading", "chunks", "linear loss"}, run.stderr
    assert all(float(error) < 1e-12 for error in errors.values()), errors
