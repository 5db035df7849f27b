"""Running scripts, and cases of a script, on two processes; a run that hangs is ended, and fails."""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import multiprocessing

from oomfix import runtime
from tests import starter

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
Case = Callable[[int], dict]


def run(*command: str, limit_s: float = 400) -> tuple[int, str, str]:
    """Run Python with `command` in the root of the repository, and end all that it started when time is up.

    The limit is far from what a slow machine takes: processes that wait for each other wait for half an hour.

    Returns:
        The exit status, and what they wrote to standard output and standard error.
    """
    started = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    try:
        printed, said = started.communicate(timeout=limit_s)
    finally:
        # what it started too: whoever waits for another process would wait on
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    return started.returncode, printed, said


def forked(script: str, *arguments: str, limit_s: float = 400) -> tuple[int, str, str]:
    """As `run`, of a script, by `starter`."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said, open(os.devnull) as nothing:
        files = [file.fileno() for file in (nothing, printed, said)]
        request = starter.Request(script, arguments, {**os.environ, **ENVIRONMENT}, str(ROOT))
        status = starter.WITH_TORCH.run(request, files, limit_s)
        printed.seek(0)
        said.seek(0)
        return status, printed.read().decode(), said.read().decode()


def cases(script: str, *names: str) -> dict[str, list[dict]]:
    """What each process found in each case of `script`, by the name of the case; the first process comes first."""
    status, printed, said = forked(script, *names)
    assert status == 0, said[-4000:]
    text, decoder, found = printed.lstrip(), json.JSONDecoder(), {}
    while text:
        # lines of two processes may come out as one
        result, end = decoder.raw_decode(text)
        found.setdefault(result["case"], {})[result["rank"]] = result
        text = text[end:].lstrip()
    return {name: [of_rank[0], of_rank[1]] for name, of_rank in found.items()}


def answer(cases: dict[str, Case], names: Sequence[str]) -> None:
    """Run cases on two processes, and print what each process found, a line each."""
    logging.getLogger("oomfix").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    starter.keep_what_lives()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_answer, (f"{folder}/meeting", cases, names), nprocs=2, start_method="fork")


def _answer(rank: int, meeting: str, cases: dict[str, Case], names: Sequence[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for name in names:
        found = cases[name](rank)
        runtime.reset()
        print(json.dumps({"case": name, "rank": rank, **found}), flush=True)
    dist.destroy_process_group()
