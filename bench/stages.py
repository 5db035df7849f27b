"""What techniques save that act between iterations and stages: `detach_`, `stage` and `ProgressiveUnfreezing`.

    python -m bench.stages [--rounds 15]

Writes bench/results/stages-cpu.md. Peaks are those of a simulated A100 with bf16 autocast and AdamW (foreach), where
nothing is computed; times are processor time of one core on smaller versions of the same models in fp32, by the median
of ratios to the first loop of each table, and of differences from it, within rounds.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.heading import heading
from bench.workloads import FULL, SMALL, Batch, Workload
from oomfix import runtime
from oomfix.profile.cards import find_card
from oomfix.profile.simulated_gpu import SimulatedGPU

RESULT = Path(__file__).parent / "results" / "stages-cpu.md"
GIB = 2**30
BATCHES = 20  # that a recurrent state is carried over

Make = Callable[[bool], Callable[[], None]]
"""Builds a loop at full size or small; what it returns runs the loop."""


class Recurrent(nn.Module):
    """A language model of tokens [tokens, samples]: an embedding, an LSTM of two layers, and a head."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        output, state = self.lstm(self.embedding(tokens), state)
        return self.head(output), state


def in_precision(full: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if full else nullcontext()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def two_steps(workload: Workload, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, full: bool) -> None:
    for _ in range(2):
        with in_precision(full):
            loss = workload.loss(model, batch, "plain")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def carried(detaches: bool, full: bool) -> Callable[[], None]:
    """Forwards with gradients on, whose state goes from batch to batch."""
    model = Recurrent(10000, 650) if full else Recurrent(1000, 128)
    tokens = torch.zeros(35, 20, dtype=torch.int64)

    def run() -> None:
        state = None
        for _ in range(BATCHES):
            with in_precision(full):
                _, state = model(tokens, state)
            if detaches:
                state = runtime.detach_(state)

    return run


def staged(frees: bool, full: bool) -> Callable[[], None]:
    """Two stages of two steps, each with an optimizer that its scheduler refers to."""
    workload = (FULL if full else SMALL)["gpt2-short"]
    model, batch = workload.build(), workload.batch()

    def run() -> None:
        schedulers = []
        for name in ("first", "second"):
            with runtime.stage(name) if frees else nullcontext():
                optimizer = adamw(model)
                schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
                two_steps(workload, model, batch, optimizer, full)
                del optimizer

    return run


def unfrozen(epoch: int, full: bool) -> Callable[[], None]:
    """Two steps of a ViT in an epoch: its last quarter of layers trains from epoch 0 on, and all of it from epoch 1."""
    workload, layers = (FULL["vit"], 12) if full else (SMALL["vit"], 4)
    model, batch = workload.build(), workload.batch()
    last = [f"vit.layers.{number}" for number in range(layers * 3 // 4, layers)]
    runtime.ProgressiveUnfreezing(model, {0: ["classifier", "vit.layernorm", *last], 1: [""]}).at(epoch)
    optimizer = adamw(model)
    return partial(two_steps, workload, model, batch, optimizer, full)


TABLES: dict[tuple[str, str], dict[str, Make]] = {
    (f"LSTM 650 wide, 35 tokens, batch 20, its state carried over {BATCHES} batches", "128 wide"): {
        "the state keeps its graph": partial(carried, False),
        "`detach_`": partial(carried, True),
    },
    (f"Two stages of {FULL['gpt2-short'].name}, a scheduler for each", SMALL["gpt2-short"].name): {
        "`del optimizer` after the first": partial(staged, False),
        "`stage`": partial(staged, True),
    },
    (f"{FULL['vit'].name}, by phases", SMALL["vit"].name): {
        "all trains": partial(unfrozen, 1),
        "`ProgressiveUnfreezing`, the last quarter trains": partial(unfrozen, 0),
    },
}


def simulated_peak_gib(make: Make) -> float:
    """The peak of a loop at full size on a simulated A100."""
    with SimulatedGPU(find_card("a100-80gb")).running() as trace:
        with trace.fake_mode:
            run = make(True)
        run()
        return float(trace.allocator.peak_allocated_bytes / GIB)


def cpu_times(loops: dict[str, Make], rounds: int) -> dict[str, tuple[float, float]]:
    """Processor time of each loop, small: relative to the first, and more than it (ms); two rounds go before."""
    runs = {name: make(False) for name, make in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            gc.collect()
            begin = time.process_time()
            run()
            if number > 1:
                times[name].append(time.process_time() - begin)
    first, found = next(iter(times.values())), {}
    for name, measured in times.items():
        pairs = list(zip(measured, first, strict=True))
        found[name] = statistics.median(a / b for a, b in pairs), 1000 * statistics.median(a - b for a, b in pairs)
    return found


def table(title: str, small: str, loops: dict[str, Make], rounds: int) -> list[str]:
    times = cpu_times(loops, rounds)
    rows = [
        f"| {name} | {simulated_peak_gib(make):.2f} | {times[name][0]:.2f} | {times[name][1]:.0f} |"
        for name, make in loops.items()
    ]
    head = ["| loop | peak GiB | time | more ms |", "|---|---|---|---|"]
    return [f"## {title}", "", f"Time: {small}.", "", *head, *rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed runs per loop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        *heading("Between iterations and stages", "cpu", "bench.stages"),
        "Peaks are those of a simulated A100 with bf16 autocast and AdamW (foreach); no GPU was used. Times are those "
        "of the smaller model named, in fp32, relative to the first loop of the table, and the difference in "
        "milliseconds.",
        "",
    ]
    for (title, small), loops in TABLES.items():
        lines += table(title, small, loops, arguments.rounds)
    RESULT.write_text("\n".join(lines))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
