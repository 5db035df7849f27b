"""Python programs, each in a process that is forked from one with most imported: that takes longer than most run.

What two programs share is what was imported, not where their random numbers begin. The order of sets they share too:
what repeats itself here need not in a process that is started.
"""

import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]


class Request(NamedTuple):
    """A program to run.

    Attributes:
        program: the path of a script, or the name of a module, as behind `python -m`.
        arguments: those of its command line.
        environment: all of it.
        folder: where it runs.
    """

    program: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


class Starter:
    """Runs programs. The process that they are forked from ends when nobody is left who could ask it for anything.

    Args:
        imports: modules that it imports before.
    """

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._started: tuple[socket.socket, IO[str]] | None = None

    def run(self, request: Request, files: Sequence[int], limit_s: float = 400) -> int:
        """The exit status of a program.

        Args:
            request: which one.
            files: what it gets as standard input, output and error.
            limit_s: when it is killed with all that it started.

        Raises:
            TimeoutExpired: it was.
        """
        self._started = self._started or self._start()
        connection, answers = self._started
        socket.send_fds(connection, [json.dumps(request).encode()], list(files))
        process = int(answers.readline())
        connection.settimeout(limit_s)
        try:
            return int(answers.readline())
        except TimeoutError as late:
            os.killpg(process, signal.SIGKILL)
            # nothing can be read from it any more
            self._started = None
            raise subprocess.TimeoutExpired(request.program, limit_s) from late
        finally:
            connection.settimeout(None)

    def _start(self) -> tuple[socket.socket, IO[str]]:
        mine, its = socket.socketpair()
        with its:
            subprocess.Popen(
                [sys.executable, "-m", "tests.starter", str(its.fileno()), *self._imports],
                cwd=ROOT, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return mine, mine.makefile("r")


WITH_TORCH = Starter("torch._dynamo")  # which the first optimizer imports


def keep_what_lives() -> None:
    """What was imported lives on: no collection after an error of memory need go through it."""
    gc.collect()
    gc.freeze()


def _become(request: Request, files: list[int]) -> None:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    random.seed()
    sys.argv = [request.program, *request.arguments]
    is_script = request.program.endswith(".py")
    begins = os.path.dirname(os.path.abspath(request.program)) if is_script else request.folder
    sys.path[:1] = [begins, *filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))]
    status = 0
    try:
        if is_script:
            runpy.run_path(request.program, run_name="__main__")
        else:
            runpy.run_module(request.program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(connection: socket.socket) -> None:
    """Run what is asked for, one after the other: a line says which process it is, the next one how it ended."""
    keep_what_lives()
    while True:
        asked, files, *_ = socket.recv_fds(connection, 2**20, 3)
        if not asked:
            return
        child = os.fork()
        if child == 0:
            connection.close()
            _become(Request(*json.loads(asked)), files)
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
