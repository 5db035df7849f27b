"""What each technique of `oomfix.runtime` saves and costs, used alone in a plain bf16 loop with AdamW.

    python -m bench.techniques [--device cuda] [--rounds 15]

Writes bench/results/techniques-<device>.md. Without a GPU, memory is that of the full workloads on a simulated A100
(nothing is computed), and time is processor time of one core on smaller versions of the same models in fp32, by the
median of ratios to the plain loop within rounds. With one, both are measured on the full workloads.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench.heading import heading
from bench.on_gpu import milliseconds, told_if_out_of_memory
from bench.workloads import FULL, SMALL, Batch, Workload
from oomfix import runtime
from oomfix.profile.cards import find_card
from oomfix.profile.simulated_gpu import SimulatedGPU
from oomfix.runtime.techniques import offloading

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Technique:
    """A loop that differs from the plain one in one thing, or in several."""

    name: str
    loss: str = "plain"
    checkpointing: bool = False
    offloads: bool = False
    in_backward: bool = False
    lean: bool = False
    micro_batches: int = 1
    half: bool = True


PLAIN = Technique("plain loop")
TECHNIQUES = [
    PLAIN,
    Technique("`use_lean_step`", lean=True),
    Technique("`optimizer_in_backward`", in_backward=True),
    Technique("`chunked_cross_entropy`", loss="chunked"),
    Technique("`linear_cross_entropy`", loss="linear"),
    Technique("torch's `linear_cross_entropy`, default options", loss="torch linear"),
    Technique("`attention`", loss="attention"),
    Technique("`attention`, 128 queries at a time", loss="attention in blocks"),
    Technique("`encode_in_chunks`, `contrastive_loss`", loss="in chunks"),
    Technique("`enable_checkpointing`", checkpointing=True),
    Technique("`offload_activations`", offloads=True),
    Technique("checkpointing and offloading", checkpointing=True, offloads=True),
    Technique("4 micro-batches by hand", micro_batches=4),
    Technique("plain loop in fp32", half=False),
    Technique("8 micro-batches, checkpointing, lean step", checkpointing=True, lean=True, micro_batches=8),
    Technique(
        "8 micro-batches, checkpointing, lean step, `linear_cross_entropy`",
        loss="linear", checkpointing=True, lean=True, micro_batches=8,
    ),
]  # fmt: skip
# On the CPU offloading moves nothing, every loop runs in fp32, and the batches are too small for 8 parts.
TIMED = [t for t in TECHNIQUES if t.half and not t.offloads and t.micro_batches <= 4]


def precision_of(technique: Technique) -> torch.dtype | None:
    return torch.bfloat16 if technique.half else None


def step_of(
    technique: Technique, workload: Workload, model: nn.Module, precision: torch.dtype | None
) -> Callable[[Batch], None]:
    """One training step of the loop."""
    model.train()
    if technique.checkpointing:
        runtime.enable_checkpointing(model)
    # as torch does on a GPU unless told otherwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if technique.lean:
        runtime.use_lean_step(optimizer)

    def step(batch: Batch) -> None:
        parts = list(zip(*(tensor.chunk(technique.micro_batches) for tensor in batch), strict=True))
        for number, part in enumerate(parts, start=1):
            offloaded = runtime.offload_activations() if technique.offloads else nullcontext()
            with offloaded, nullcontext() if precision is None else torch.autocast("cuda", precision):
                loss = workload.loss(model, part, technique.loss) / len(parts)
            last = technique.in_backward and number == len(parts)
            with runtime.optimizer_in_backward(optimizer) if last else nullcontext():
                loss.backward()
        if not technique.in_backward:
            optimizer.step()
            optimizer.zero_grad()

    return step


class OnNoHost(offloading._Parked):
    """A tensor that has left the simulated card; it has no data, so no host memory is needed for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        place = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        super().__init__(place, CUDA, None)

    def restored(self) -> torch.Tensor:
        return torch.empty_like(self.host, device=self.device)


@contextmanager
def offloading_simulated() -> Iterator[list[int]]:
    """Let `offload_activations` move tensors off the simulated card and back; yields the bytes moved."""
    moved: list[int] = []
    copied = offloading.HostMemory._copied

    def to_host(self: offloading.HostMemory, tensor: torch.Tensor) -> offloading._Parked:
        moved.append(tensor.numel() * tensor.element_size())
        return OnNoHost(tensor)

    offloading.HostMemory._copied = to_host
    try:
        yield moved
    finally:
        offloading.HostMemory._copied = copied


def simulated_peak_gib(technique: Technique, workload: Workload) -> tuple[float, float]:
    """The peak of two steps on a simulated A100, and what offloading moved to the host in the second (GiB)."""
    gpu = SimulatedGPU(find_card("a100-80gb"))
    with gpu.running() as trace, offloading_simulated() as moved:
        trace.recording = False
        with trace.fake_mode:
            model, batch = workload.build(), workload.batch()
        trace.recording = True
        trace.watch(model)
        trace.claim(batch, "inputs")
        step = step_of(technique, workload, model, precision_of(technique))
        step(batch)
        moved.clear()
        step(batch)
        return trace.allocator.peak_allocated_bytes / GIB, sum(moved) / GIB


def cpu_milliseconds(workload: Workload, techniques: list[Technique], rounds: int) -> dict[str, list[float]]:
    """Processor time of every loop's step in each round; the first two rounds are not counted."""
    times: dict[str, list[float]] = {technique.name: [] for technique in techniques}
    steps = {}
    for technique in techniques:
        torch.manual_seed(0)
        steps[technique.name] = step_of(technique, workload, workload.build(), None)
    order = list(steps)
    for number in range(rounds + 2):
        batch = workload.batch()
        random.Random(number).shuffle(order)
        for name in order:
            begin = time.process_time()
            steps[name](batch)
            if number > 1:
                times[name].append((time.process_time() - begin) * 1000)
    return times


def gpu_peak_and_time(technique: Technique, workload: Workload, rounds: int) -> tuple[float, float]:
    """The peak (GiB) and the median time (ms) of a step on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    step = step_of(technique, workload, workload.build().cuda(), precision_of(technique))
    batch = tuple(tensor.cuda() for tensor in workload.batch())
    times = []
    for number in range(rounds + 3):
        if number == 3:
            torch.cuda.reset_peak_memory_stats()
        elapsed = milliseconds(step, batch)
        if number >= 3:
            times.append(elapsed)
    return torch.cuda.max_memory_allocated() / GIB, statistics.median(times)


def techniques_for(workload: Workload) -> list[Technique]:
    kinds = workload.losses
    if "linear" in kinds and hasattr(nn, "LinearCrossEntropyOptions"):
        kinds = (*kinds, "torch linear")
    chosen = [technique for technique in TECHNIQUES if technique.loss in kinds]
    if workload.only_its_own:
        return [technique for technique in chosen if technique.loss != "plain" or technique == PLAIN]
    if workload.only_the_optimizer:
        return [t for t in chosen if t.in_backward or t == PLAIN or (t.lean and not t.checkpointing)]
    # CLIP's loss cannot be cut into micro-batches
    return [t for t in chosen if t.micro_batches == 1 or "in chunks" not in kinds]


def saved(peak: float, whole: float) -> str:
    """The share of a peak that is gone; no minus sign before zero."""
    return f"{round(100 * (1 - peak / whole), 1) + 0.0} %"


def rows_on_cpu(key: str, rounds: int) -> list[str]:
    full, small = FULL[key], SMALL[key]
    techniques = techniques_for(full)
    peaks = {technique.name: simulated_peak_gib(technique, full) for technique in techniques}
    timed = [technique for technique in techniques if technique in TIMED]
    times = cpu_milliseconds(small, timed, rounds)
    whole = peaks[PLAIN.name][0]
    rows = [f"## {full.name}", "", f"Time: {small.name}.", ""]
    rows += ["| loop | peak GiB | saved | moved to the host GiB | time |", "|---|---|---|---|---|"]
    for technique in techniques:
        peak, moved = peaks[technique.name]
        cost = "-"
        if technique in timed:
            ratios = (a / b for a, b in zip(times[technique.name], times[PLAIN.name], strict=True))
            cost = f"{statistics.median(ratios):.2f}"
        rows.append(
            f"| {technique.name} | {peak:.2f} | {saved(peak, whole)} | {f'{moved:.2f}' if moved else '-'} | {cost} |"
        )
    return [*rows, ""]


def rows_on_gpu(key: str, rounds: int) -> list[str]:
    workload = FULL[key]
    techniques = techniques_for(workload)
    measured = {}
    for technique in techniques:
        with told_if_out_of_memory(technique.name):
            measured[technique.name] = gpu_peak_and_time(technique, workload, rounds)
    rows = [f"## {workload.name}", "", "| loop | peak GiB | saved | step ms | time |", "|---|---|---|---|---|"]
    for technique in techniques:
        row = f"| {technique.name} | out of memory | | | |"
        if technique.name in measured:
            peak, elapsed = measured[technique.name]
            less, ratio = "-", "-"
            if PLAIN.name in measured:
                whole, plain = measured[PLAIN.name]
                less, ratio = saved(peak, whole), f"{elapsed / plain:.2f}"
            row = f"| {technique.name} | {peak:.2f} | {less} | {elapsed:.1f} | {ratio} |"
        rows.append(row)
    return [*rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps per loop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu = arguments.device == "cpu"
    lines = [
        *heading("Techniques", arguments.device, "bench.techniques"),
        (
            "Peaks are those of a simulated A100 with bf16 autocast, AdamW (foreach) and the full workload; no GPU was "
            "used. Times are those of the smaller workload named, in fp32, relative to its plain loop."
            if on_cpu
            else "bf16 autocast, AdamW (foreach)."
        ),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"techniques-{arguments.device}.md"
    for key in FULL:
        lines += rows_on_cpu(key, arguments.rounds) if on_cpu else rows_on_gpu(key, arguments.rounds)
        # after each: the whole takes long, and what is measured is kept
        path.write_text("\n".join(lines))
    print(path.read_text())


if __name__ == "__main__":
    main()
