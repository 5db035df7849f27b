"""What verifying a split takes of the first hundred steps of `oomfix.runtime`, by the length of a step.

    python -m bench.verification [--device cuda] [--runs 5]

Writes bench/results/verification-<device>.md. Every batch is split in two, which is verified at calls 1, 2, 4, ..., 64:
what these steps take more than the same steps of a manager that has verified already. Beside it what the same forwards
and backwards on the same few rows take, written by hand between two steps: what a check computes, without anything that
watches, keeps or compares. A check runs a few rows together and in two parts, and two runs cannot show that samples are
independent, so no such check takes less. Where no batch is split, nothing is verified.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from bench.heading import heading
from bench.runtime import CPU, CUDA, RESULTS, Batch, Step, Workload, managed, timed
from oomfix.runtime.batches.rows import first_part, telling

MOST_ROWS = 32  # that a check looks at
FEW_ROWS = 4  # of which gradients are compared, and at later calls all
CHECKS = (1, 2, 4, 8, 16, 32, 64)
CPU_STEPS = (
    CPU,
    replace(CPU, samples=240),
    replace(CPU, width=128, length=24),
    replace(CPU, width=192, length=64),
)
CUDA_STEPS = (CUDA, replace(CUDA, samples=256), replace(CUDA, width=1024))


def by_hand(model: nn.Module, samples: int, first: bool) -> Callable[[Batch], torch.Tensor]:
    """The forwards and backwards of a check, at the first call or a later one, and nothing else."""
    most = telling(min(samples // 2, MOST_ROWS))
    parameters = list(model.parameters())

    def loss(batch: Batch, begin: int, end: int) -> torch.Tensor:
        tokens, labels = batch
        return nn.functional.cross_entropy(model(tokens[begin:end]), labels[begin:end])

    def runs(count: int) -> list[tuple[int, int]]:
        return [(0, count), (0, first_part(count)), (first_part(count), count)]

    def check(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            found = [loss(batch, *rows) for rows in runs(most if first else FEW_ROWS)]
        for rows in runs(FEW_ROWS) if first else ():
            torch.autograd.grad(loss(batch, *rows), parameters)
        return found[0]

    return check


@dataclass(frozen=True)
class Cost:
    """What one run of a hundred steps measured: the length of a step, and shares of all of them."""

    step_ms: float
    share: float
    share_by_hand: float


def cost(workload: Workload, settled: Step, model: nn.Module, batches: list[Batch]) -> Cost:
    """Compare a new manager with one that has verified already, step by step in turn."""
    verified = managed(workload, "16gb", micro_batches=2)
    extra, bare, steps = 0.0, 0.0, []
    for number, batch in enumerate(batches, start=1):
        with_check, without = (timed(step, [batch], workload.device) for step in (verified, settled))
        steps.append(without)
        if number in CHECKS:
            extra += with_check - without
            bare += timed(by_hand(model, workload.samples, number == 1), [batch], workload.device)
    step_ms = statistics.median(steps)
    return Cost(step_ms, extra / (100 * step_ms), bare / (100 * step_ms))


def row(workload: Workload, runs: int) -> str:
    """A row of the table: medians of `runs`."""
    batches = workload.batches(CHECKS[-1])
    settled, model = managed(workload, "16gb", micro_batches=2), workload.model()
    for batch in (*batches, batches[0]):
        settled(batch)  # once more: its next check must not fall on one of a new manager
    found = [cost(workload, settled, model, batches) for _ in range(runs)]
    step, share, bare = (
        statistics.median(getattr(one, name) for one in found) for name in ("step_ms", "share", "share_by_hand")
    )
    sizes = f"{workload.samples} x {workload.length} tokens, width {workload.width}"
    return f"| {sizes} | {step:.0f} | {100 * share:.2f} % | {100 * bare:.2f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = CUDA_STEPS if arguments.device == "cuda" else CPU_STEPS
    lines = [
        *heading("Verification", arguments.device, "bench.verification"),
        "Share of the first hundred steps, each in two micro-batches.",
        "",
        "| batch | step ms | verification | the same runs by hand |",
        "|---|---|---|---|",
        *(row(workload, arguments.runs) for workload in steps),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"verification-{arguments.device}.md"
    path.write_text("\n".join(lines))
    print(path.read_text())


if __name__ == "__main__":
    main()
