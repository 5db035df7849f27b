"""`oomfix.runtime` beside a plain loop, AMP and accumulation by hand, Accelerate and Lightning Fabric.

    python -m bench.comparison [--device cuda] [--rounds 30] [--full vit gpt2] [--measured vit] [--rivals FOLDER]

Writes bench/results/comparison-<device>.md. All contenders train the same model from the same seed on the same batches
with AdamW in one process. "By hand" and the other libraries get what oomfix uses: bf16, checkpointing (switched on by
the same function) and as many accumulated micro-batches.

Without a GPU, peaks are those of the full workloads on simulated cards, where nothing is computed, and step times,
losses and real peaks (`SimulatedCard`) those of smaller versions in fp32, by processor time of one core and the median
of ratios within rounds. With one, everything is measured on the full workloads: `torch.cuda.max_memory_allocated`,
and CUDA events for time.
"""

import argparse
import gc
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.heading import heading
from bench.on_gpu import milliseconds, told_if_out_of_memory
from bench.rivals import is_installed, libraries
from bench.workloads import FULL, SMALL, Batch, Workload
from oomfix import presets, runtime
from oomfix.presets import Preset
from oomfix.profile.cards import find_card
from oomfix.profile.checks import answer_checks
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.profile.simulated_gpu import SimulatedGPU

RESULTS = Path(__file__).parent / "results"
GIB, MIB = 2**30, 2**20
KEYS = ("vit", "gpt2", "resnet", "unet")
LARGEST_CARD = "a100-80gb"
TRAINED = 5  # steps before the loss is compared
PARTS = {"cuda": 4, "cpu": 2}  # micro-batches of those that do not choose by themselves; the small batches are of 4

Step = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """How a contender trains.

    Attributes:
        device: "cuda" (simulated or real) or "cpu".
        half: bf16 autocast.
        checkpointed: with activation checkpointing.
        parts: accumulated micro-batches.
    """

    device: str
    half: bool
    checkpointed: bool = False
    parts: int = 1


def optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    # as torch chooses by itself on a GPU
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=setting.device == "cuda")


def parts_of(batch: Batch, setting: Setting) -> Iterator[Batch]:
    return zip(*(tensor.chunk(setting.parts) for tensor in batch), strict=True)


def by_hand(workload: Workload, model: nn.Module, setting: Setting) -> Step:
    """torch alone: the plain loop where the setting asks for nothing."""
    optimizer = optimizer_of(model, setting)

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=batch[0].device)
        for part in parts_of(batch, setting):
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.half):
                loss = workload.loss(model, part, "plain") / setting.parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def with_accelerate(workload: Workload, model: nn.Module, setting: Setting) -> Step:
    """Accelerate's loop, as its guide on accumulation writes it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision="bf16" if setting.half else "no",
        gradient_accumulation_steps=setting.parts,
        cpu=setting.device == "cpu",
    )
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model, setting))

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=batch[0].device)
        for part in parts_of(batch, setting):
            with accelerator.accumulate(prepared):
                loss = workload.loss(prepared, part, "plain")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / setting.parts
        return total

    return step


def with_fabric(workload: Workload, model: nn.Module, setting: Setting) -> Step:
    """Lightning Fabric's loop, as its guide on accumulation writes it."""
    if is_installed("lightning_fabric"):
        from lightning_fabric import Fabric
    else:
        from lightning.fabric import Fabric

    fabric = Fabric(accelerator=setting.device, devices=1, precision="bf16-mixed" if setting.half else "32-true")
    prepared, optimizer = fabric.setup(model, optimizer_of(model, setting))

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=batch[0].device)
        for number, part in enumerate(parts_of(batch, setting), start=1):
            with fabric.no_backward_sync(prepared, enabled=number < setting.parts):
                loss = workload.loss(prepared, part, "plain")
                fabric.backward(loss / setting.parts)
            total += loss.detach() / setting.parts
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def managed(workload: Workload, model: nn.Module, setting: Setting, preset: str, **overrides: Any) -> Step:
    """The loop that `oomfix apply` writes."""
    runtime.reset()
    memory = runtime.preset(preset, **overrides)
    memory.prepare(model)
    optimizer = optimizer_of(model, setting)

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        return workload.loss(model, batch, "plain")

    def step(batch: Batch) -> torch.Tensor:
        loss = memory.forward_backward(forward, *batch)
        memory.step(optimizer)
        return loss

    return step


@dataclass(frozen=True)
class Contender:
    """A loop with a name; `build` makes its step of a workload, a model and a setting."""

    name: str
    setting: Setting
    build: Callable[[Workload, nn.Module, Setting], Step]
    preset: str = ""

    def step(self, workload: Workload, model: nn.Module) -> Step:
        model.train()
        if self.setting.checkpointed:
            runtime.enable_checkpointing(model)
        return self.build(workload, model, self.setting)


def with_the_same_techniques(setting: Setting) -> list[Contender]:
    """Everybody with the same precision, micro-batches and checkpointing."""
    what = ", ".join(
        ["bf16" if setting.half else "fp32", f"{setting.parts} micro-batches"]
        + ["checkpointing"] * setting.checkpointed
    )
    overrides = {"micro_batches": setting.parts, "precision": "bf16" if setting.half else "fp32"}
    checkpointing = "on" if setting.checkpointed else "off"

    def ours(workload: Workload, model: nn.Module, setting: Setting) -> Step:
        return managed(workload, model, setting, "80gb", checkpointing=checkpointing, **overrides)

    # checkpointing by `prepare`, not by hand
    unchecked = replace(setting, checkpointed=False)
    return [
        Contender(f"by hand: {what}", setting, by_hand),
        Contender(f"Accelerate: {what}", setting, with_accelerate),
        Contender(f"Fabric: {what}", setting, with_fabric),
        Contender(f"oomfix: {what}", unchecked, ours),
    ]


def contenders(device: str, half: bool) -> list[Contender]:
    """The plain loops, everybody with the same techniques, and every preset as it is."""
    found = [Contender("plain loop, fp32", Setting(device, half=False), by_hand)]
    if half:
        found.append(Contender("plain loop, bf16", Setting(device, half=True), by_hand))
    found += with_the_same_techniques(Setting(device, half, checkpointed=True, parts=PARTS[device]))
    for name, preset in presets.PRESETS.items():
        if preset.card is not None:
            found.append(Contender(f"oomfix, preset {name}", Setting(device, half), of_preset(name), name))
    return found


def of_preset(name: str) -> Callable[[Workload, nn.Module, Setting], Step]:
    return lambda workload, model, setting: managed(workload, model, setting, name)


# -- memory of the full workloads, simulated ---------------------------------------------------------------------


def simulated_peak_gib(contender: Contender, workload: Workload) -> tuple[float, str]:
    """The peak of two steps on a simulated card, and what oomfix came to use there.

    Cards of presets hold their budget, and refuse what is over it; the others are an A100's.
    """
    preset = presets.PRESETS[contender.preset or "80gb"]
    assert preset.card is not None and preset.budget_gib is not None
    card = preset.card if contender.preset else find_card(LARGEST_CARD)
    gpu = SimulatedGPU(card, int(preset.budget_gib * GIB) if contender.preset else None)
    with gpu.running() as trace:
        answer_checks(gpu.patches, trace, independent=True)
        trace.recording = False
        with trace.fake_mode:
            model, batch = workload.build(), workload.batch()
        trace.recording = True
        trace.watch(model)
        trace.claim(batch, "inputs")
        step = contender.step(workload, model)
        for _ in range(2):
            step(batch)
        return trace.allocator.peak_allocated_bytes / GIB, techniques_used(contender, preset)


def techniques_used(contender: Contender, preset: Preset) -> str:
    """What a preset came to, from the report."""
    if not contender.preset:
        return ""
    report = runtime.preset(preset.name).report()
    (forward,) = report.forwards
    size = "whole batches" if forward.largest is None else f"micro-batches of up to {forward.largest}"
    return ", ".join([size, *(technique.name for technique in report.techniques if technique.name != "micro-batches")])


def rows_of_peaks(workload: Workload) -> list[str]:
    rows = [f"### {workload.name}", "", "| loop | peak GiB | below plain fp32 | with |", "|---|---|---|---|"]
    plain = 0.0
    for contender in contenders("cuda", half=True):
        peak, used = simulated_peak_gib(contender, workload)
        plain = plain or peak
        rows.append(f"| {contender.name} | {peak:.2f} | {plain / peak:.1f} x | {used} |")
        print(rows[-1], file=sys.stderr)
    return [*rows, ""]


# -- time, loss and memory of what is computed -------------------------------------------------------------------


def measured_rows(key: str, device: str, rounds: int) -> list[str]:
    """Everybody's step time relative to the loop by hand with the same techniques, its peak and its last loss."""
    workload = (SMALL if device == "cpu" else FULL)[key]
    half = device == "cuda"
    chosen = contenders(device, half)
    if device == "cpu":
        # there is no card that they could be fitted to: those without checkpointing from the start do the same
        chosen = [c for c in chosen if c.preset in ("", "8gb", "16gb")]
    times = step_milliseconds(chosen, workload, device, rounds)
    reference = times[chosen[1 if half else 0].name]
    name = "plain bf16" if half else "plain fp32"
    unit, scale = ("GiB", GIB) if device == "cuda" else ("MiB", MIB)
    rows = [
        f"### {workload.name}",
        "",
        f"| loop | peak {unit} | step ms | ratio to {name} | loss after {TRAINED} steps |",
        "|---|---|---|---|---|",
    ]
    for contender in chosen:
        mine = times[contender.name]
        row = f"| {contender.name} | out of memory | | | |"
        with told_if_out_of_memory(contender.name):
            if mine:
                peak, loss = peak_and_loss(contender, workload, device)
                ratio = statistics.median([a / b for a, b in zip(mine, reference, strict=False)] or [math.nan])
                milliseconds = statistics.median(mine)
                row = f"| {contender.name} | {peak / scale:.2f} | {milliseconds:.1f} | {ratio:.2f} | {loss:.6f} |"
        rows.append(row)
        print(row, file=sys.stderr)
    return [*rows, ""]


def model_of(workload: Workload, device: str) -> nn.Module:
    torch.manual_seed(0)
    return workload.build().to(device)


def batch_of(workload: Workload, device: str, number: int) -> Batch:
    torch.manual_seed(number)
    return tuple(tensor.to(device) for tensor in workload.batch())


def step_milliseconds(chosen: list[Contender], workload: Workload, device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every contender's step in each round, in changing order; the first three are not counted.

    On a GPU the models of all do not fit together: each makes its steps alone.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in chosen}
    if device == "cuda":
        for contender in chosen:
            with told_if_out_of_memory(contender.name), contender_on_gpu():
                step = contender.step(workload, model_of(workload, device))
                batch = batch_of(workload, device, 0)
                times[contender.name] = [milliseconds(step, batch) for _ in range(rounds + 3)][3:]
                del step
        return times
    steps = {contender.name: contender.step(workload, model_of(workload, device)) for contender in chosen}
    order = list(steps)
    for number in range(rounds + 3):
        batch = batch_of(workload, device, number)
        random.Random(number).shuffle(order)
        for name in order:
            begin = time.process_time()
            steps[name](batch)
            if number >= 3:
                times[name].append((time.process_time() - begin) * 1000)
    return times


@contextmanager
def contender_on_gpu() -> Iterator[None]:
    """What one leaves on the GPU, and the limit that a preset sets, are no matter of the next."""
    try:
        yield
    finally:
        runtime.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def peak_and_loss(contender: Contender, workload: Workload, device: str) -> tuple[float, float]:
    """The peak in bytes of training for `TRAINED` steps, model and optimizer included, and the last loss."""
    gc.collect()
    if device == "cpu":
        with SimulatedCard() as card:
            loss = train(contender, workload, device)
            return card.peak_bytes, loss
    with contender_on_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = train(contender, workload, device)
        return torch.cuda.max_memory_allocated() - before, loss


def train(contender: Contender, workload: Workload, device: str) -> float:
    step = contender.step(workload, model_of(workload, device))
    torch.manual_seed(1)
    for number in range(TRAINED):
        loss = step(batch_of(workload, device, number))
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps per contender")
    parser.add_argument("--full", nargs="*", choices=KEYS, default=KEYS, help="workloads to simulate at full size")
    parser.add_argument("--measured", nargs="*", choices=KEYS, default=KEYS, help="workloads to compute")
    parser.add_argument("--rivals", type=Path, help="where the other libraries are installed")
    arguments = parser.parse_args()
    versions = libraries(arguments.rivals)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    on_cpu = arguments.device == "cpu"
    lines = heading("Comparison", arguments.device, "bench.comparison", versions)
    sections = (sections_on_cpu if on_cpu else sections_on_gpu)(arguments)
    path = RESULTS / f"comparison-{arguments.device}.md"
    for section in sections:
        lines += section
        # after each: the whole takes long, and what is measured is kept
        path.write_text("\n".join(lines), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


def sections_on_cpu(arguments: argparse.Namespace) -> Iterator[list[str]]:
    yield [
        "## Memory of the full workloads",
        "",
        "Simulated: nothing is computed, and no GPU was used. Presets run within the budget of their card, the other "
        f"loops on an A100 with 80 GB. AdamW; {PARTS['cuda']} micro-batches where the loop is told how many.",
        "",
    ]
    yield from (rows_of_peaks(FULL[key]) for key in arguments.full)
    yield [
        "## Time and loss of smaller workloads",
        "",
        "Computed, in fp32, with the processor time of one core; the checks of calls 4, 8, ... are part of ours.",
        "",
    ]
    yield from sections_on_gpu(arguments)


def sections_on_gpu(arguments: argparse.Namespace) -> Iterator[list[str]]:
    yield from (measured_rows(key, arguments.device, arguments.rounds) for key in arguments.measured)


if __name__ == "__main__":
    main()
