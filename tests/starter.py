"""Python programs, each in a process that is forked from one with torch imported: that takes longer than most run.

What two programs share is what was imported, not where their random numbers begin. The order of sets they share too:
what repeats itself here need not in a process that is started.
"""

import functools
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]


class Request(NamedTuple):
    """A program to run.

    Attributes:
        program: the path of a script, or the name of a module whose `main` takes the arguments.
        arguments: those of its command line.
        environment: all of it.
        folder: where it runs.
    """

    program: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


class _Server(NamedTuple):
    connection: socket.socket
    answers: IO[str]


def run(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str | Path,
    files: Sequence[int],
    limit_s: float = 400,
) -> int:
    """The exit status of a program, see `Request`.

    Args:
        files: what it gets as standard input, output and error.
        limit_s: when it is killed with all that it started.

    Raises:
        TimeoutExpired: it was.
    """
    server = _started()
    request = Request(program, list(arguments), dict(environment), str(folder))
    socket.send_fds(server.connection, [json.dumps(request).encode() + b"\n"], list(files))
    process = int(server.answers.readline())
    server.connection.settimeout(limit_s)
    try:
        return int(server.answers.readline())
    except TimeoutError as late:
        os.killpg(process, signal.SIGKILL)
        # nothing can be read from it any more
        _started.cache_clear()
        raise subprocess.TimeoutExpired(program, limit_s) from late
    finally:
        server.connection.settimeout(None)


@functools.cache
def _started() -> _Server:
    """The process that all are forked from. It ends when nobody is left who could ask it for anything."""
    mine, its = socket.socketpair()
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "tests.starter", str(its.fileno())],
            cwd=ROOT, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return _Server(mine, mine.makefile("r"))


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
    try:
        if is_script:
            runpy.run_path(request.program, run_name="__main__")
            status = 0
        else:
            status = importlib.import_module(request.program).main(request.arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def serve(connection: socket.socket) -> None:
    """Run what is asked for, one after the other: a line says which process it is, the next one how it ended."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does
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
    serve(socket.socket(fileno=int(sys.argv[1])))
