"""What `oomfix.runtime` costs and saves, beside a plain loop and one with AMP and accumulation written by hand.

    python -m bench.runtime [--device cuda] [--rounds 80]

Writes bench/results/runtime-<device>.md. All contenders train the same model from the same seed on the same batches
in one process. A contender is timed against a loop written by hand with the same precision and the same number of
micro-batches: in rounds, in which both make ten steps, one after the other as in training, in changing order. The
ratio is the median of the ratios within rounds, so that a busy machine slows both sides; after a quarter of the rounds
both begin anew, since where a model lies in memory changes its time by a percent or two. On the CPU a step's time is
the processor time of the process and memory is counted by `SimulatedCard`; on a GPU time comes from CUDA events and
memory from `torch.cuda.max_memory_allocated`, the allocator is set for everybody as the presets set it, and the limit
that a preset puts on the process is taken back after it.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench.heading import heading
from bench.on_gpu import milliseconds
from oomfix import presets, runtime
from oomfix.profile.simulated_card import SimulatedCard

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
STEPS = 10  # of a round
PAIRS = 4  # of models, which share the rounds

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


class Encoder(nn.Module):
    """A small transformer classifier: `tokens` [batch, length] -> logits [batch, classes]."""

    def __init__(self, width: int, depth: int, length: int, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(1))


@dataclass(frozen=True)
class Workload:
    """Sizes of the model and the batches. The CPU's makes a step of about 10 ms on one core."""

    width: int
    depth: int
    length: int
    samples: int
    device: str

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Encoder(self.width, self.depth, self.length).to(self.device)

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        shape = (count, self.samples, self.length)
        tokens = torch.randint(0, 256, shape, generator=generator)
        labels = torch.randint(0, 10, shape[:2], generator=generator)
        return list(zip(tokens.to(self.device), labels.to(self.device), strict=True))


CPU = Workload(width=64, depth=2, length=16, samples=40, device="cpu")
CUDA = Workload(width=512, depth=8, length=256, samples=64, device="cuda")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(workload: Workload) -> Step:
    """The loop of every tutorial, in fp32."""
    model = workload.model()
    optimizer = optimizer_of(model)

    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def autocast_by_hand(workload: Workload, parts: int = 1) -> Step:
    """bf16 autocast around the model and `parts` accumulated micro-batches, written by hand."""
    model = workload.model()
    optimizer = optimizer_of(model)

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=workload.device)
        for tokens, labels in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            with torch.autocast(workload.device, torch.bfloat16):
                logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.float(), labels) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def managed(workload: Workload, preset: str, **overrides: object) -> Step:
    """The same loop through the manager."""
    runtime.reset()
    memory = runtime.preset(preset, **overrides)
    model = memory.prepare(workload.model())
    optimizer = optimizer_of(model)

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens), labels)

    def step(batch: Batch) -> torch.Tensor:
        loss = memory.forward_backward(forward, *batch)
        memory.step(optimizer)
        return loss.detach()

    return step


def step_milliseconds(steps: dict[str, Step], batches: list[Batch], device: str) -> dict[str, list[float]]:
    """Milliseconds of every contender's step, on average, in each round of ten; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for begin in range(0, len(batches), STEPS):
        shuffle(order)
        for name in order:
            elapsed = timed(steps[name], batches[begin : begin + STEPS], device)
            if begin:
                times[name].append(elapsed / STEPS)
    return times


def timed(step: Step, batches: list[Batch], device: str) -> float:
    """Milliseconds of one step on each of `batches`."""
    if device == "cpu":
        begin = time.process_time()
        for batch in batches:
            step(batch)
        return (time.process_time() - begin) * 1000
    return milliseconds(lambda: [step(batch) for batch in batches])


def median_ratio(times: list[float], reference: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def peak_and_loss(build: Callable[[], Step], batches: list[Batch], device: str) -> tuple[float, float]:
    """The peak in MiB of training on `batches`, model and optimizer included, and the last loss."""
    gc.collect()
    if device == "cpu":
        with SimulatedCard() as card:
            loss = _train(build(), batches)
            return card.peak_bytes / MIB, loss
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = _train(build(), batches)
    return (torch.cuda.max_memory_allocated() - before) / MIB, loss


def _train(step: Step, batches: list[Batch]) -> float:
    for batch in batches:
        loss = step(batch)
    return float(loss)


@dataclass(frozen=True)
class Contender:
    """A loop, and the one written by hand that it is timed against."""

    name: str
    build: Callable[[], Step]
    reference_name: str
    reference: Callable[[], Step]


def contenders(workload: Workload) -> list[Contender]:
    """Loops by hand, every preset as it is, and ours with what the loop by hand does."""
    fp32, half = ("plain", lambda: plain(workload)), ("bf16 by hand", lambda: autocast_by_hand(workload))
    halves = ("bf16 + 2 by hand", lambda: autocast_by_hand(workload, 2))
    # on a GPU the presets compute in bf16
    as_presets = fp32 if workload.device == "cpu" else half
    found = [
        Contender("plain loop, fp32", fp32[1], *fp32),
        Contender("bf16, by hand", half[1], *fp32),
        Contender("bf16 + 2 accumulated, by hand", halves[1], *fp32),
        Contender("oomfix, bf16", lambda: managed(workload, "16gb", precision="bf16"), *half),
        Contender(
            "oomfix, bf16, micro_batches=2",
            lambda: managed(workload, "16gb", precision="bf16", micro_batches=2),
            *halves,
        ),
    ]
    for preset in presets.PRESETS:
        reference = fp32 if preset == "off" else as_presets
        found.append(Contender(f"oomfix, preset {preset}", lambda p=preset: managed(workload, p), *reference))
    return found


def compare(contender: Contender, workload: Workload, rounds: int) -> str:
    """A row of the table: peak, step time, its ratio to the loop by hand, loss."""
    batches = workload.batches((max(rounds // PAIRS, 1) + 1) * STEPS)
    times: dict[str, list[float]] = {"by hand": [], "it": []}
    for _ in range(PAIRS):
        pair = {"by hand": contender.reference(), "it": contender.build()}
        for name, found in step_milliseconds(pair, batches, workload.device).items():
            times[name] += found
    peak, loss = peak_and_loss(contender.build, batches[:30], workload.device)
    if workload.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    ratio = f"{median_ratio(times['it'], times['by hand']):.3f} ({contender.reference_name})"
    return f"| {contender.name} | {peak:.2f} | {statistics.median(times['it']):.2f} | {ratio} | {loss:.6f} |"


def shrinking_cards(workload: Workload, steps: int = 30) -> list[str]:
    """The same training on simulated cards that hold ever less of the activations."""
    batches = workload.batches(steps)
    whole_peak, whole_loss = peak_and_loss(lambda: plain(workload), batches, "cpu")
    fixed = 4 * sum(p.numel() * p.element_size() for p in workload.model().parameters()) / MIB
    rows = [
        f"The plain loop peaks at {whole_peak:.2f} MiB, of which {fixed:.2f} are weights, gradients and Adam's state.",
        "",
        "| card holds MiB | share of the activations | peak MiB | relative difference of the last loss |",
        "|---|---|---|---|",
    ]
    for share in (2, 4, 8, 16):
        capacity = fixed + (whole_peak - fixed) / share
        with SimulatedCard(int(capacity * MIB)) as card:
            loss = _train(managed(workload, "16gb"), batches)
            difference = abs(loss - whole_loss) / whole_loss
            rows.append(f"| {capacity:.2f} | 1/{share} | {card.peak_bytes / MIB:.2f} | {difference:.1e} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=80, help="timed rounds of ten steps per contender")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = CUDA if arguments.device == "cuda" else CPU
    runtime.configure_allocator()
    parameters = sum(p.numel() for p in workload.model().parameters())
    lines = [
        *heading("Runtime", arguments.device, "bench.runtime"),
        f"Transformer classifier of {parameters / 1e6:.2f} M parameters, {workload.samples} samples of "
        f"{workload.length} tokens, AdamW.",
        "",
        "| loop | peak MiB | step ms | ratio to the loop by hand | loss after 30 steps |",
        "|---|---|---|---|---|",
        *(compare(contender, workload, arguments.rounds) for contender in contenders(workload)),
        "",
    ]
    if arguments.device == "cpu":
        lines += ["## Smaller cards", "", *shrinking_cards(workload), ""]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"runtime-{arguments.device}.md"
    path.write_text("\n".join(lines))
    print(path.read_text())


if __name__ == "__main__":
    main()
