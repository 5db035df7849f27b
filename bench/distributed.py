"""What averaging gradients after the last micro-batch, and going in step, cost beside the same loop by hand.

    python -m bench.distributed [--rounds 30]

Writes bench/results/distributed-cpu.md: wall time of a step on two gloo processes of one thread each, by the median of
ratios to the loop by hand within rounds. On GPUs, what is lost is the overlap of DistributedDataParallel's averages
with backward, which two processes that share their cores do not show.
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.workloads import SMALL, Workload
from oomfix.presets import get
from oomfix.runtime.manager import MemoryManager

RESULTS = Path(__file__).parent / "results" / "distributed-cpu.md"
WORKLOAD = SMALL["vit"]
PARTS = 4
Step = Callable[[], None]


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def by_hand(workload: Workload, wrap: Callable[[nn.Module], nn.Module], parts: int) -> Step:
    model, optimizer, batch = made(workload, wrap)

    def step() -> None:
        cut = list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))
        for index, part in enumerate(cut):
            silent = wrap is replicated and index < len(cut) - 1
            with model.no_sync() if silent else nullcontext():
                (workload.loss(model, part, "plain") / len(cut)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(workload: Workload, wrap: Callable[[nn.Module], nn.Module], parts: int) -> Step:
    model, optimizer, batch = made(workload, wrap)
    memory = MemoryManager(get("80gb", micro_batches=parts if parts > 1 else "auto"))

    def step() -> None:
        memory.forward_backward(lambda *batch: workload.loss(model, batch, "plain"), *batch)
        memory.step(optimizer)

    return step


def made(workload: Workload, wrap: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = wrap(workload.build())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), workload.batch()


def measure(rank: int, place: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    rows = []
    for name, wrap in (("DistributedDataParallel", replicated), ("FSDP2", sharded)):
        for parts in (1, PARTS):
            hand, mine = milliseconds([make(WORKLOAD, wrap, parts) for make in (by_hand, ours)], rounds)
            ratio = statistics.median(a / b for a, b in zip(mine, hand, strict=True))
            size = "whole" if parts == 1 else f"{parts} micro-batches"
            rows.append(
                f"| {name}, {size} | {statistics.median(hand):.1f} | {statistics.median(mine):.1f} | {ratio:.3f} |"
            )
    if rank == 0:
        RESULTS.write_text("\n".join([*header(rounds), *rows, ""]))
        print(RESULTS.read_text())
    dist.destroy_process_group()


def milliseconds(steps: list[Step], rounds: int) -> list[list[float]]:
    """Wall time of each step in each round, after some that warm up and check."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds + 9):
        for index in range(len(steps)):
            # each goes first as often as the other
            chosen = (index + turn) % len(steps)
            dist.barrier()
            begun = time.perf_counter()
            steps[chosen]()
            # a call that is checked again (numbers 16, 32, ...) says what checks cost, not what steps do
            if turn >= 9 and (turn + 1) & turn:
                times[chosen].append(1e3 * (time.perf_counter() - begun))
    return times


def header(rounds: int) -> list[str]:
    return [
        "# Two processes, cpu",
        "",
        f"{platform.machine()} CPU, gloo, 1 thread each; torch {torch.__version__}; {datetime.date.today()}; "
        f"`python -m bench.distributed --rounds {rounds}`",
        "",
        f"{WORKLOAD.name}, AdamW, fp32. Load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores: on a busy "
        "machine a process waits for its turn wherever the two meet.",
        "",
        "| loop | by hand ms | oomfix ms | ratio |",
        "|---|---|---|---|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(measure, (place, rounds), nprocs=2)


if __name__ == "__main__":
    main()
