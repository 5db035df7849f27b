"""Run by test_data_parallel.py: a script on two processes that find what torchrun would tell them, but are forked."""

import os
import runpy
import socket
import sys

from torch import multiprocessing


def work(rank: int, port: int, script: str, arguments: list[str]) -> None:
    places = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **places}
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    _, script, *arguments = sys.argv
    multiprocessing.start_processes(work, (port, script, arguments), nprocs=2, start_method="fork")
