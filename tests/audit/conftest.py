"""The command line as users run it: real processes over real files, with a cache of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


class CommandLine:
    """Runs `python -m oomfix` in a folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache

    def __call__(self, *args: str, input: bytes | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OOMFIX_CACHE_DIR": str(self.cache), "PYTHONPATH": _REPOSITORY, **environ}
        command = [sys.executable, "-m", "oomfix", *args]
        done = subprocess.run(command, cwd=self.folder, env=env, input=input, capture_output=True, timeout=60)
        return subprocess.CompletedProcess(
            command, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
        )

    def json(self, *args: str, **options) -> dict:
        """What `oomfix audit --format json` prints."""
        return json.loads(self("audit", "--format", "json", *args, **options).stdout)


_REPOSITORY = str(Path(__file__).resolve().parents[2])


@pytest.fixture
def oomfix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / ".git").mkdir()  # requirement files and settings outside of the test are not looked at
    return CommandLine(folder, tmp_path / "cache")


@pytest.fixture
def notebook() -> Callable[..., bytes]:
    """Makes a notebook of (type, source) cells."""

    def make(*cells: tuple[str, str], **metadata: object) -> bytes:
        rows = [{"cell_type": kind, "source": source.splitlines(keepends=True)} for kind, source in cells]
        return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": rows}).encode()

    return make
