"""Techniques on two processes under DDP: the gradients that DDP exchanges are those of the plain step."""

import pytest
import torch

from tests.runtime import torchrun


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_gradients_under_ddp_are_those_of_the_plain_step(tmp_path):
    """One run for all techniques, since starting two processes takes most of it; one that hangs is ended."""
    _, printed, said = torchrun.forked("tests/runtime/two_processes.py", str(tmp_path / "meeting"))
    errors = dict(line.rsplit(" ", 1) for line in printed.splitlines())
    assert errors.keys() == {"checkpointing", "offloading", "chunks", "linear loss"}, said
    assert all(float(error) < 1e-12 for error in errors.values()), errors
