"""The command line as users run it: real processes over real files, with a cache of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import starter


class CommandLine:
    """Runs `python -m oomfix` in a folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache

    def __call__(self, *args: str, input: bytes | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OOMFIX_CACHE_DIR": str(self.cache), "PYTHONPATH": _REPOSITORY, **environ}
        start = _start if _READ_AT_START & environ.keys() else _fork
        status, out, err = start(list(args), env, self.folder, input or b"")
        return subprocess.CompletedProcess(args, status, out.decode("utf-8"), err.decode("utf-8"))

    def json(self, *args: str, **options) -> dict:
        """What `oomfix audit --format json` prints."""
        return json.loads(self("audit", "--format", "json", *args, **options).stdout)


_REPOSITORY = str(Path(__file__).resolve().parents[2])
_READ_AT_START = {"LC_ALL", "PYTHONIOENCODING"}  # by Python, not by the command
_STARTER = starter.Starter("oomfix.pipeline", "oomfix.rules", "oomfix.cli")


def _start(args: list[str], env: dict[str, str], folder: Path, input: bytes) -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-m", "oomfix", *args]
    done = subprocess.run(command, cwd=folder, env=env, input=input, capture_output=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def _fork(args: list[str], env: dict[str, str], folder: Path, input: bytes) -> tuple[int, bytes, bytes]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input)
        given.seek(0)
        request = starter.Request("oomfix", args, env, str(folder))
        status = _STARTER.run(request, [file.fileno() for file in (given, out, err)], limit_s=60)
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


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
