"""Running a script of cases under torchrun; a run that hangs is ended, and fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, limit_s: float = 400) -> tuple[int, str, str]:
    """Run `script`, a path below the root of the repository, as two processes, and end them when time is up.

    The limit is far from what a slow machine takes: processes that wait for each other wait for half an hour.

    Returns:
        The exit status, and what they wrote to standard output and standard error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*command, str(ROOT / script), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        printed, said = started.communicate(timeout=limit_s)
    finally:
        # torchrun and what it started: whoever waits for another process would wait on
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    return started.returncode, printed, said


def cases(script: str, *names: str) -> dict[str, list[dict]]:
    """What each process found in each case, by the name of the case; the first process comes first."""
    status, printed, said = run(script, *names)
    assert status == 0, said[-4000:]
    text, decoder, found = printed.lstrip(), json.JSONDecoder(), {}
    while text:
        # lines of two processes may come out as one
        result, end = decoder.raw_decode(text)
        found.setdefault(result["case"], {})[result["rank"]] = result
        text = text[end:].lstrip()
    return {name: [of_rank[0], of_rank[1]] for name, of_rank in found.items()}
