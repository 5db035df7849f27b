"""Runs of scripts in this process."""

import sys

import pytest


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
