"""Runs of scripts in this process, and in others that start at once."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import starter


@pytest.fixture
def simulate(tmp_path, monkeypatch):
    from oomfix.profile.run import run

    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def of(source, **options):
        script = tmp_path / "train.py"
        script.write_text(source)
        return run(str(script), [], **options)

    return of


@pytest.fixture
def forked(monkeypatch):
    """The command simulates scripts in processes that need not import torch."""

    def run(command, env, stdin, stderr):
        _python, _m, module, *arguments = command
        request = starter.Request(module, arguments, env, os.getcwd())
        return SimpleNamespace(returncode=starter.WITH_TORCH.run(request, [stdin, 1, stderr.fileno()]))

    monkeypatch.setattr("oomfix.profile.process.subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
