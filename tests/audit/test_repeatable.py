"""An audit says the same each time, however Python happens to order its sets."""

import os
import subprocess
import sys

SCRIPT = """
import torch
from utils import collect, synchronise

def train(model, first, second, batches, optimizer, criterion):
    for batch in batches:
        kept = synchronise(model)
        first[0] = second[0] = kept
        outputs = collect(model, first, second, batch)
        loss = criterion(outputs, batch)
        loss.backward()
        optimizer.step()
"""


def test_json_is_the_same_under_every_order_of_sets(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "oomfix", "audit", "--no-cache", "--format", "json", "train.py"]
    said = {
        subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for seed in range(6)
    }
    assert len(said) == 1
    assert "made outside of the slice" in said.pop()
