"""Starts a recorder in every Python process of a command, as soon as the process imports torch.

A `sitecustomize` module on PYTHONPATH, which Python imports when it starts, calls `install`. Processes that never
import torch are left as they are; each that makes an optimizer step writes a file of its own.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from oomfix.equivalence.comparison import Recording, Step

SEED = 0

SITECUSTOMIZE = """\
import sys

try:
    import oomfix
except ImportError:
    sys.path.append({root!r})
from oomfix.equivalence.recorder_hook import install

install({here!r}, {folder!r})
"""


def sitecustomize(here: str, folder: str) -> str:
    """The source of a `sitecustomize` module that lies in `here` and lets processes record into `folder`."""
    root = str(Path(__file__).resolve().parents[2])
    return SITECUSTOMIZE.format(root=root, folder=folder, here=here)


def install(here: str, folder: str) -> None:
    """Seed Python's random numbers, wait for torch, and run the `sitecustomize` that the one in `here` hides."""
    random.seed(SEED)
    sys.meta_path.insert(0, _TorchFinder(folder))
    sys.path.remove(here)
    hidden = PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


def read_recordings(folder: str) -> list[Recording]:
    """What the processes of a command recorded; by rank, then by the time of their first step."""
    return [_read(path) for path in sorted(Path(folder).iterdir())]


def _read(path: Path) -> Recording:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = tuple(Step.from_json(line) for line in lines if "digest" in line)
    killed: dict[str, Any] = {"seen": [], "calls_in_parts": 0, "files": []}
    end = next((line for line in lines if "seen" in line), killed)
    return Recording(steps, frozenset(end["seen"]), end["calls_in_parts"], frozenset(end["files"]))


class _TorchFinder(MetaPathFinder):
    """Finds torch as others do, and starts a recorder behind its import."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Starting(spec.loader, self._folder)
        return spec


class _Starting(Loader):
    """Loads a module with another loader, then starts a recorder."""

    def __init__(self, loader: Loader, folder: str) -> None:
        self._loader = loader
        self._folder = folder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # whoever asks the module for its loader means the real one
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _start(self._folder)


def _start(folder: str) -> None:
    import torch

    from oomfix.equivalence.recorder import Recorder

    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    file = _RecordFile(folder)
    recorder = Recorder(file.add)
    recorder.__enter__()
    atexit.register(lambda: file.end(recorder.recording))


class _RecordFile:
    """The steps of this process as lines of JSON; a forked process has its own file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: int | None = None
        self._script: str | None = None
        self._file: IO[str] | None = None

    def add(self, step: Step) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            # Python forgets it before the process ends
            self._script = getattr(sys.modules["__main__"], "__file__", None)
            rank = int(os.environ.get("RANK", "0"))
            name = f"{rank:06}-{time.monotonic_ns():020}-{self._process}.jsonl"
            self._file = open(os.path.join(self._folder, name), "w", encoding="utf-8")  # noqa: SIM115  until the end
        self._write(step.to_json())

    def end(self, recording: Recording) -> None:
        """Add what is known only at the end of the process."""
        if self._process == os.getpid():
            files = {self._script, *(getattr(module, "__file__", None) for module in list(sys.modules.values()))}
            self._write(
                {
                    "seen": sorted(recording.seen),
                    "calls_in_parts": recording.calls_in_parts,
                    "files": sorted(os.path.realpath(file) for file in files if file),
                }
            )

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        print(json.dumps(line), file=self._file, flush=True)
