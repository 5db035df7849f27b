"""What the mistake that each rule finds costs, shown by a small network: the figures that the rules' pages quote.

    python -m bench.rules [--check]

Writes bench/results/rules.md; with --check it only compares, and exits 1 where a figure differs. Everything runs in
seconds on the CPU, on a simulated card that counts the bytes of live tensors; no figure is a time, so that every run
gives the same ones.
"""

import argparse
import datetime
import io
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomfix.profile.allocator import CachingAllocator
from oomfix.profile.simulated_card import SimulatedCard

RESULT = Path(__file__).parent / "results" / "rules.md"
MIB = 2**20
WIDTH, ROWS, BLOCKS, ITERATIONS = 256, 512, 8, 6
SCALE = 2.0**16


class Block(nn.Module):
    """A residual block: normalisation, two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Bench:
    """One network, its batch and its optimizer, on a card of their own, where only they are counted."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(ROWS, WIDTH)
        self.card = SimulatedCard()
        self.card.track(self.model, self.x)

    @property
    def weights_mib(self) -> float:
        """Bytes of all parameters, in MiB."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) / MIB

    def loss(self) -> torch.Tensor:
        """The loss of a forward."""
        return self.model(self.x).pow(2).mean()

    def growth_kib(self, iteration: Callable[[int], None]) -> float:
        """KiB that stay per iteration, after the first two."""
        with self.card:
            for number in range(2):
                iteration(number)
            before = self.card.current_bytes
            for number in range(2, 2 + ITERATIONS):
                iteration(number)
            return (self.card.current_bytes - before) / ITERATIONS / 1024

    def peak_mib(self, iteration: Callable[[int], None], rounds: int = 3) -> float:
        """The peak of the last of some iterations over what the weights and the batch hold, in MiB."""
        start = self.card.current_bytes
        with self.card:
            for number in range(rounds):
                self.card.reset_peak()
                iteration(number)
        return (self.card.peak_bytes - start) / MIB


def loss_accumulation() -> str:
    """OOM101: what a sum of losses holds."""

    def growth(backward: bool, detach: bool) -> float:
        bench = Bench()
        total = [torch.zeros(())]

        def iteration(_: int) -> None:
            loss = bench.loss()
            if backward:
                loss.backward()
            total[0] = total[0] + (loss.detach() if detach else loss)

        return bench.growth_kib(iteration)

    without, after, detached = growth(False, False), growth(True, False), growth(True, True)
    assert after == detached == 0.0
    return (
        f"per iteration {without / 1024:.1f} MiB of activations where no backward runs; {_nodes_per_iteration()} nodes "
        "of the graph, and no tensor, where one does; nothing with `.detach()`"
    )


def _nodes_per_iteration() -> int:
    """Nodes of the graph that a sum of losses holds after the backwards, per iteration."""

    def nodes(iterations: int) -> int:
        bench, total = Bench(), torch.zeros(())
        for _ in range(iterations):
            loss = bench.loss()
            loss.backward()
            total = total + loss
        seen: set[Any] = set()
        waiting = [total.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [following for following, _ in node.next_functions]
        return len(seen)

    return nodes(3) - nodes(2)


def tensor_retention() -> str:
    """OOM102: what a list of outputs holds."""

    def growth(keep: Callable[[torch.Tensor], torch.Tensor]) -> float:
        bench = Bench()
        kept: list[torch.Tensor] = []
        return bench.growth_kib(lambda _: kept.append(keep(bench.model(bench.x)))) / 1024

    return (
        f"per iteration {growth(lambda out: out):.1f} MiB with the graph, {growth(torch.Tensor.detach):.1f} MiB with "
        "`.detach()`, which is the output itself"
    )


def retain_graph() -> str:
    """OOM103: the peak of a loop that retains every graph."""

    def peak(retain: bool) -> float:
        bench = Bench()

        def run() -> None:
            for _ in range(3):
                loss = bench.loss()
                bench.optimizer.zero_grad()
                loss.backward(retain_graph=retain)
                bench.optimizer.step()

        return bench.peak_mib(lambda _: run(), 1)

    kept, freed = peak(True), peak(False)
    return f"peak {kept:.1f} MiB over the weights, {freed:.1f} MiB without the argument ({kept / freed:.1f} times)"


def undetached_state() -> str:
    """OOM104: what a recurrent state drags along."""

    def growth(detach: bool) -> float:
        torch.manual_seed(0)
        cell, card = nn.GRUCell(WIDTH, WIDTH), SimulatedCard()
        x = torch.randn(ROWS, WIDTH)
        card.track(cell, x)
        hidden = torch.zeros(ROWS, WIDTH)
        sizes = []
        with card:
            for _ in range(2 + ITERATIONS):
                hidden = cell(x, hidden.detach() if detach else hidden)
                hidden.mean().backward(retain_graph=not detach)
                sizes.append(card.current_bytes)
        return (sizes[-1] - sizes[1]) / ITERATIONS / MIB

    return f"{growth(False):.1f} MiB more in every iteration of a GRU cell, {growth(True):.1f} MiB with `.detach()`"


def eval_with_grad() -> str:
    """OOM201: the peak of an evaluation."""

    def peak(context: Callable[[], Any]) -> float:
        bench = Bench()

        def iteration(_: int) -> None:
            with context():
                bench.loss().item()

        return bench.peak_mib(iteration)

    recorded, quiet = peak(nullcontext), peak(torch.no_grad)
    return f"peak {recorded:.1f} MiB over the weights, {quiet:.1f} MiB under `no_grad` ({recorded / quiet:.1f} times)"


def no_autocast() -> str:
    """OOM202: bytes saved for backward, parameters not counted."""

    def saved(context: Callable[[], Any]) -> float:
        bench = Bench()
        own = {parameter.untyped_storage().data_ptr() for parameter in bench.model.parameters()}
        sizes: dict[int, int] = {}
        kept = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.shape[:1] == (ROWS,):
                kept.append(tensor)  # so that no address is used twice
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context():
            bench.loss()
        return sum(sizes.values()) / MIB

    full, half = saved(nullcontext), saved(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    return f"{full:.1f} MiB of activations saved in fp32, {half:.1f} MiB under bf16 autocast ({half / full:.0%})"


def zero_grad() -> str:
    """OOM203: the peak of the forward after a step."""

    def forward_peak(to_none: bool) -> float:
        bench = Bench()
        with bench.card:
            bench.loss().backward()
            bench.optimizer.step()
            bench.optimizer.zero_grad(set_to_none=to_none)
            bench.card.reset_peak()
            bench.loss()
        return bench.card.peak_bytes / MIB

    bench = Bench()
    more = forward_peak(False) - forward_peak(True)
    return f"{more:.1f} MiB more at the peak of the next forward, the size of the weights ({bench.weights_mib:.1f} MiB)"


def load_on_gpu() -> str:
    """OOM205: the peak while a checkpoint of weights and Adam's state is loaded beside the model."""
    bench = Bench()
    optimizer = torch.optim.Adam(bench.model.parameters())
    bench.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": bench.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    before = bench.card.current_bytes
    checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    bench.card.track(checkpoint["model"], checkpoint["optimizer"]["state"])
    more = (bench.card.current_bytes - before) / MIB
    return (
        f"{more:.1f} MiB on the card beside the model, {more / bench.weights_mib:.1f} times its weights; nothing with "
        '`map_location="cpu"`'
    )


def missing_loss_division() -> str:
    """OOM301: the gradient of an undivided window."""
    model = nn.Linear(8, 1).double()
    torch.manual_seed(0)
    x, y = torch.randn(16, 8).double(), torch.randn(16, 1).double()

    def gradient(parts: int, divisor: int) -> torch.Tensor:
        model.zero_grad()
        for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
            ((model(px) - py).pow(2).mean() / divisor).backward()
        assert model.weight.grad is not None
        return model.weight.grad.norm()

    whole = gradient(1, 1)
    return (
        f"gradient {gradient(4, 1) / whole:.2f} times that of the whole batch with 4 backwards per step, "
        f"{gradient(4, 4) / whole:.2f} times with the division"
    )


def accumulation_tail() -> str:
    """OOM302: batches of an epoch whose gradients enter no step."""
    parameter = nn.Parameter(torch.zeros(103))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for i in range(103):
        parameter[i].backward()  # batch i leaves its own mark on the weights
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    lost = int((parameter == 0).sum())
    return f"{lost} of 103 batches ({lost / 103:.1%}) reach no step of the epoch with a window of 4"


def clip_before_unscale() -> str:
    """OOM303: the norm of the gradients that the optimizer gets."""

    def norm(unscales: bool) -> float:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(64, dtype=torch.float64))
        (parameter.pow(2).sum() * SCALE).backward()
        assert parameter.grad is not None
        if unscales:
            parameter.grad /= SCALE
        nn.utils.clip_grad_norm_([parameter], 1.0)
        if not unscales:
            parameter.grad /= SCALE
        return float(parameter.grad.norm())

    return (
        f"gradients of norm {norm(False):.1e} reach the optimizer with a scale of 65536 and a limit of 1.0, "
        f"{norm(True):.1f} when unscaled first"
    )


def fp16_without_scaler() -> str:
    """OOM304: gradients that fp16 cannot hold."""
    torch.manual_seed(0)
    classes = torch.randint(21, (8, 64, 64))
    logits = torch.randn(8, 21, 64, 64) + 8 * nn.functional.one_hot(classes, 21).permute(0, 3, 1, 2)
    logits.requires_grad_()
    nn.functional.cross_entropy(logits, classes).backward()

    def lost(scale: float) -> float:
        assert logits.grad is not None
        return float(((logits.grad * scale).half() == 0).float().mean())

    return (
        f"{lost(1.0):.0%} of the gradients of a segmentation loss over 32768 pixels, most of them right already, are "
        f"zero in fp16; {lost(SCALE):.0%} at a scale of 65536"
    )


def backward_in_autocast() -> str:
    """OOM305: what is alive when the backward has ended."""

    def left(inside: bool) -> float:
        bench = Bench()
        with bench.card:
            before = bench.card.current_bytes
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = bench.loss()
                if inside:
                    loss.backward()
                    return (bench.card.current_bytes - before) / MIB
            loss.backward()
            return (bench.card.current_bytes - before) / MIB

    inside, outside = left(True), left(False)
    return (
        f"{inside:.1f} MiB alive when the backward has ended, {outside:.1f} MiB behind the block: the gradients alone"
    )


def empty_cache_in_loop() -> str:
    """OOM501: what an iteration asks of the driver, and its peak, in the model of the caching allocator."""

    def run(empties: bool) -> tuple[int, int]:
        allocator, asked, peak = CachingAllocator(), 0, 0
        for _ in range(3):
            allocator.reset_peaks()
            before, asked, blocks = allocator.reserved_bytes, 0, []
            for nbytes in _allocations():
                block = allocator.allocate(nbytes)
                assert block is not None
                blocks.append(block)
                asked += allocator.reserved_bytes > before
                before = allocator.reserved_bytes
            peak = allocator.peak_allocated_bytes
            for block in blocks:
                allocator.free(block)
            if empties:
                allocator.empty_cache()
        return asked, peak

    (asked, peak), (kept, same) = run(True), run(False)
    assert peak == same
    return (
        f"{asked} calls to the driver for memory in every iteration, {kept} without it; a peak of {peak / MIB:.1f} MiB "
        "both times"
    )


def _allocations() -> Iterator[int]:
    """The sizes of the activations of one forward, in bytes."""
    for _ in range(BLOCKS):
        yield from (ROWS * WIDTH * 4, ROWS * WIDTH * 16, ROWS * WIDTH * 16, ROWS * WIDTH * 4)


FIGURES: dict[str, Callable[[], str]] = {
    "OOM101": loss_accumulation,
    "OOM102": tensor_retention,
    "OOM103": retain_graph,
    "OOM104": undetached_state,
    "OOM201": eval_with_grad,
    "OOM202": no_autocast,
    "OOM203": zero_grad,
    "OOM205": load_on_gpu,
    "OOM301": missing_loss_division,
    "OOM302": accumulation_tail,
    "OOM303": clip_before_unscale,
    "OOM304": fp16_without_scaler,
    "OOM305": backward_in_autocast,
    "OOM501": empty_cache_in_loop,
}


def figures() -> dict[str, str]:
    """What each mistake costs, in words, by the code of its rule."""
    return {code: measure() for code, measure in FIGURES.items()}


def written() -> dict[str, str]:
    """The figures of bench/results/rules.md."""
    rows = [line.split(" | ") for line in RESULT.read_text(encoding="utf-8").splitlines() if line.startswith("| OOM")]
    return {code.removeprefix("| "): text.removesuffix(" |") for code, text in rows}


def report(measured: dict[str, str]) -> str:
    """The text of bench/results/rules.md."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    rows = "\n".join(f"| {code} | {text} |" for code, text in measured.items())
    return f"""# What each mistake costs

`python -m bench.rules`, {today}, torch {torch.__version__}, Python {platform.python_version()}, CPU, on a simulated
card that counts the bytes of live tensors (the caching allocator's model for OOM501). {BLOCKS} residual blocks of
{WIDTH} -> {4 * WIDTH} -> {WIDTH}, {ROWS} rows, fp32, {Bench().weights_mib:.1f} MiB of weights, unless said otherwise.
Shares and factors are what to take home; the bytes are those of this small network.

| rule | measured |
|---|---|
{rows}

OOM401 costs no memory: torch warns, and the names may go.
"""


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.rules", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    options = parser.parse_args()
    measured = figures()
    if options.check:
        different = {code for code, text in measured.items() if written().get(code) != text}
        print("\n".join(f"{code}: {measured[code]}" for code in sorted(different)))
        return 1 if different else 0
    RESULT.write_text(report(measured), encoding="utf-8")
    print(report(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
