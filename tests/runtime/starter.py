"""A process that runs scripts, each in one of its own that is forked with everything imported.

It reads a request from each line of its standard input, and answers it with a line that holds the exit status.
"""

import gc
import importlib
import json
import os
import random
import runpy
import signal
import sys
import traceback
from typing import NamedTuple


class Request(NamedTuple):
    """A script to run.

    Attributes:
        script: its path.
        arguments: those of its command line.
        limit_s: when it is ended, with all that it started.
        printed, said: files that take what it writes to standard output and standard error.
    """

    script: str
    arguments: list[str]
    limit_s: float
    printed: str
    said: str


def keep_what_lives() -> None:
    """What was imported lives on: no collection after an error of memory need go through it."""
    gc.collect()
    gc.freeze()


def _run(request: Request) -> None:
    os.setsid()
    for number, path in ((0, os.devnull), (1, request.printed), (2, request.said)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    random.seed()  # no two processes begin alike
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, os.path.dirname(request.script))
    status = 0
    try:
        runpy.run_path(request.script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(request: Request) -> int:
    child = os.fork()
    if child == 0:
        _run(request)

    def end(*_: object) -> None:
        os.killpg(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, request.limit_s)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")
    keep_what_lives()
    for line in sys.stdin:
        print(_status(Request(*json.loads(line))), flush=True)
