"""Predicted against measured memory on the GPU of this machine, and the overheads that go into the prediction.

    python bench/profile_calibration.py --predict    # the predictions alone: needs no GPU
    python bench/profile_calibration.py              # measures too: needs a CUDA device, takes a few minutes
    python bench/profile_calibration.py --write      # and writes bench/results/profile-calibration-GPU.md

Each case runs three training steps in a process of its own, so that its peaks and its CUDA context are its own. The
second table holds what `oomfix/profile/overheads.py` reckons with, measured one at a time: the context, the workspaces
of cuBLAS, the scratch memory of convolutions and of the attention backward, the reserve of an LSTM.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from profile_models import mobilenet_v2, resnet50, vgg16
from torch import nn
from torch.nn import functional as F

from oomfix.presets import Card
from oomfix.profile import estimate, overheads
from oomfix.profile.cards import CARDS, CONTEXT_BYTES

MIB, GIB = 2**20, 2**30
RESULTS = Path(__file__).parent / "results"
STEPS = 3
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class UNet(nn.Module):
    """Four levels of two 3x3 convolutions with BatchNorm, down and up again; 31 M parameters."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(self._block(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(channels: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed = []
        for block in self.down:
            x = block(x if not passed else F.max_pool2d(x, 2))
            passed.append(x)
        for up, merge, skipped in zip(self.up, self.merge, reversed(passed[:-1]), strict=True):
            x = merge(torch.cat([skipped, up(x)], dim=1))
        return self.head(x)


class Tagger(nn.Module):
    """Two bidirectional LSTM layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 512)
        self.lstm = nn.LSTM(512, 512, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss; in each of `precisions`."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    precisions: tuple[str, ...] = ("fp32", "bf16")


def images(rows: int, size: int = 224) -> Callable[[], Any]:
    return lambda: (torch.zeros(rows, 3, size, size), torch.zeros(rows, dtype=torch.int64))


def masks(rows: int, size: int) -> Callable[[], Any]:
    return lambda: (torch.zeros(rows, 3, size, size), torch.zeros(rows, 1, size, size))


def ids(rows: int, length: int) -> Callable[[], Any]:
    return lambda: torch.zeros(rows, length, dtype=torch.int64)


def classification(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def segmentation(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def tagging(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten() % 50)


def language_model(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def sentence(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch, labels=batch[:, 0] % 2).loss


def picture(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def checkpointed(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return built


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig())


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))


CASES = (
    Case("ResNet-50 b32", resnet50, images(32), classification),
    Case("VGG-16 b32", vgg16, images(32), classification),
    Case("MobileNetV2 b64", mobilenet_v2, images(64), classification),
    Case("UNet b4 256", UNet, masks(4, 256), segmentation),
    Case("LSTM b64 s256", Tagger, ids(64, 256), tagging, ("fp32", "fp16")),
    Case("ViT-B/16 b16", vit, images(16), picture),
    Case("BERT-base b16 s256", bert, ids(16, 256), sentence),
    Case("BERT-base b16 s256 checkpointed", checkpointed(bert), ids(16, 256), sentence),
    Case("GPT-2 b4 s512", gpt2, ids(4, 512), language_model),
    Case("GPT-2 b4 s512 checkpointed", checkpointed(gpt2), ids(4, 512), language_model),
)


def predict(case: Case, precision: Any, gpu: str) -> tuple[int, int, float]:
    """What `estimate` says: bytes allocated and reserved at the peak, and the margin it gives."""
    found = estimate(case.build, case.batch, case.loss, precision=precision, gpu=gpu, steps=STEPS)
    return found.peak_allocated_bytes, found.peak_reserved_bytes, found.margin_fraction


def measure(case: Case, precision: str) -> dict[str, int]:
    """The peaks of the same steps on the CUDA device, and what its process takes besides (bytes)."""
    dtype = DTYPES[precision]
    model = case.build().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    free_before, total = torch.cuda.mem_get_info()
    reserved_before = torch.cuda.memory_reserved()
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.utils._pytree.tree_map(lambda tensor: tensor.cuda(), case.batch())
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = case.loss(model, inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        del inputs, loss
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    # other processes on the card would count as context: `main` refuses a card that is in use
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
        "context_at_start": total - free_before - reserved_before,
    }


def measured_overheads(capability: tuple[int, int]) -> list[tuple[str, int, int]]:
    """(what, bytes measured, bytes that `overheads` reckons), each on its own."""
    rows = []
    square = torch.zeros(64, 64, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    product = square @ square
    forward = torch.cuda.memory_allocated() - before - product.nbytes
    rows.append(("cuBLAS workspace, forward", forward, overheads.cublas_workspace_bytes(capability)))
    product.sum().backward()
    rows.append((
        "cuBLAS workspaces, both threads",
        torch.cuda.memory_allocated() - before - product.nbytes - square.nbytes,
        2 * overheads.cublas_workspace_bytes(capability),
    ))  # fmt: skip
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows += _convolutions(dtype, capability)
    if capability >= (8, 0):
        rows.append(_flash_backward())
    rows.append(_lstm_reserve())
    return rows


def _convolutions(dtype: torch.dtype, capability: tuple[int, int]) -> Iterable[tuple[str, int, int]]:
    for channels, size, kernel, stride in ((64, 56, 3, 1), (256, 14, 3, 1), (64, 56, 3, 2), (3, 224, 7, 2)):
        inputs = torch.zeros(32, channels, size, size, device="cuda", dtype=dtype)
        weight = torch.zeros(max(64, channels), channels, kernel, kernel, device="cuda", dtype=dtype)
        outputs = F.conv2d(inputs, weight, stride=stride, padding=kernel // 2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        again = F.conv2d(inputs, weight, stride=stride, padding=kernel // 2)
        scratch = torch.cuda.max_memory_allocated() - before - again.nbytes
        reckoned = overheads.convolution_scratch_bytes(inputs, weight, outputs, (stride, stride), capability)
        name = f"{kernel}x{kernel} convolution, {str(dtype)[6:]}, {channels} channels, {size} px, stride {stride}"
        yield name, scratch, reckoned


def _flash_backward() -> tuple[str, int, int]:
    query = torch.zeros(8, 12, 1024, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        loss = F.scaled_dot_product_attention(query, query, query).float().sum()
    gradients = 3 * query.nbytes + 2 * query.nbytes  # of query, key and value, and what comes in
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    scratch = torch.cuda.max_memory_allocated() - before - gradients
    return "flash attention backward", scratch, overheads.flash_backward_scratch_bytes(query.detach())


def _lstm_reserve() -> tuple[str, int, int]:
    lstm = nn.LSTM(512, 512, 2).cuda()
    inputs = torch.zeros(256, 64, 512, device="cuda", requires_grad=True)
    lstm(inputs)
    before = torch.cuda.memory_allocated()
    outputs, states = lstm(inputs)
    reserve = torch.cuda.memory_allocated() - before - outputs.nbytes - sum(state.nbytes for state in states)
    return "LSTM reserve", reserve, overheads.recurrent_reserve_bytes(256 * 64, 512, 2, 1, 4, 4)


def nearest_card(name: str, capability: tuple[int, int], capacity_gib: float) -> str:
    """The simulated card for a real one: of its compute capability (or the nearest below), nearest in capacity."""
    by_name = [key for key, card in CARDS.items() if _words(card) <= set(name.lower().replace("-", " ").split())]
    if by_name:
        return min(by_name, key=lambda key: abs(CARDS[key].capacity_gib - capacity_gib))
    below = [key for key, card in CARDS.items() if card.compute_capability <= capability] or list(CARDS)
    best = max(CARDS[key].compute_capability for key in below)
    same = [key for key in below if CARDS[key].compute_capability == best]
    return min(same, key=lambda key: abs(CARDS[key].capacity_gib - capacity_gib))


def _words(card: Card) -> set[str]:
    return {word for word in card.name.lower().split() if not word.endswith("gb")}


def table(rows: list[tuple[str, int, int, float, dict[str, int] | None]]) -> list[str]:
    """Predicted and measured peaks as a table; "-" where nothing was measured."""
    text = [
        "| case | allocated MiB: predicted | measured | error | reserved MiB: predicted | measured | error | margin |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, allocated, reserved, margin, real in rows:
        cells = [name]
        for predicted, kind in ((allocated, "allocated"), (reserved, "reserved")):
            measured = real[kind] if real else None
            cells += [f"{predicted / MIB:.1f}", *_compared(predicted, measured)]
        text.append(f"| {' | '.join(cells)} | {margin * 100:.0f} % |")
    return text


def _compared(predicted: int, measured: int | None) -> list[str]:
    if measured is None:
        return ["-", "-"]
    return [f"{measured / MIB:.1f}", f"{100 * (predicted / measured - 1):+.2f} %"]


def summary(rows: list[tuple[str, int, int, float, dict[str, int] | None]]) -> str:
    """The mean absolute error, the largest underestimate, and whether every margin held."""
    errors = [(allocated / real["allocated"] - 1, margin) for _, allocated, _, margin, real in rows if real]
    if not errors:
        return "nothing was measured"
    mean = sum(abs(error) for error, _ in errors) / len(errors)
    beyond = sum(error < -margin / (1 + margin) for error, margin in errors)
    most_under = -min(0.0, *(error for error, _ in errors))
    return (
        f"mean absolute error of the allocated peak {100 * mean:.2f} %, most under {100 * most_under:.2f} %, "
        f"{beyond} of {len(errors)} beyond the margin"
    )


def in_a_process(case: Case, precision: str) -> dict[str, int] | None:
    """`measure` in a process of its own; None where it failed, as on a card that is too small for the case."""
    command = [sys.executable, "-W", "ignore", __file__, "--measure", case.name, "--precision", precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"{case.name} {precision} was not measured: {last}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="make the predictions only; needs no GPU")
    parser.add_argument("--gpu", help="the card to predict for; default: the one here, or a100")
    parser.add_argument("--write", action="store_true", help="write bench/results/profile-calibration-GPU.md")
    parser.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="fp32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        (case,) = [case for case in CASES if case.name == options.measure]
        print(json.dumps(measure(case, options.precision)))
        return 0
    if not options.predict and not torch.cuda.is_available():
        print("profile_calibration: no CUDA device here; --predict makes the predictions alone", file=sys.stderr)
        return 2
    return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    device = "no GPU"
    gpu = options.gpu or "a100"
    if not options.predict:
        properties = torch.cuda.get_device_properties(0)
        device = properties.name
        capability = (properties.major, properties.minor)
        gpu = options.gpu or nearest_card(device, capability, properties.total_memory / GIB)
    rows = []
    for case in CASES:
        for precision in case.precisions:
            real = None if options.predict else in_a_process(case, precision)
            rows.append((f"{case.name} {precision}", *predict(case, precision, gpu), real))
            print(table(rows[-1:])[-1], file=sys.stderr)
    text = [*table(rows), "", summary(rows)]
    if not options.predict:
        text += ["", "| overhead | measured MiB | reckoned MiB |", "|---|---:|---:|"]
        if contexts := [real["context"] / MIB for *_, real in rows if real]:
            text.append(f"| CUDA context | {min(contexts):.0f} to {max(contexts):.0f} | {CONTEXT_BYTES / MIB:.0f} |")
        for name, measured_bytes, reckoned_bytes in measured_overheads(capability):
            text.append(f"| {name} | {measured_bytes / MIB:.2f} | {reckoned_bytes / MIB:.2f} |")
    print("\n".join(text))
    if options.write:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}"
        command = "python bench/profile_calibration.py --write"
        head = ["# Predicted and measured on one card", "", f"`{command}`, {device} (as {gpu}), {versions}.", ""]
        path = RESULTS / f"profile-calibration-{gpu}.md"
        path.write_text("\n".join([*head, *text, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
