"""`estimate`: the memory of a training step, from functions that build a model and a batch."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from oomfix.profile.batch_size import Trial, find_largest, largest_fitting
from oomfix.profile.boundary import CardTrace
from oomfix.profile.cards import find_card
from oomfix.profile.report import Estimate
from oomfix.profile.simulated_gpu import SimulatedGPU, assumptions

Optimizer = Literal["adamw", "adam", "sgd"] | Callable[[Any], torch.optim.Optimizer]
Precision = Literal["fp32", "bf16", "fp16"]

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def estimate(
    build: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    gpu: str = "a100",
    steps: int = 2,
    micro_batches: int = 1,
) -> Estimate:
    """Peak memory and its parts of a training loop, on a simulated card. No GPU, no data, no weights are needed.

        found = estimate(
            build=lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)),
            batch=lambda: torch.randn(512, 1024),
            loss=lambda model, x: model(x).square().mean(),
            gpu="t4",
        )
        found.peak_allocated_bytes, found.breakdown, found.fits["16gb"].fits

    Args:
        build: makes the model. It runs on fake tensors: a model of any size costs next to no memory.
        batch: makes one (micro-)batch of tensors.
        loss: the scalar loss of a model on a batch; it runs under autocast unless `precision` is "fp32".
        optimizer: "adamw", "adam" or "sgd" with torch's defaults, or a function of the parameters.
        precision: "fp32", or autocast to "bf16" or "fp16" (with a GradScaler).
        gpu: a name from `oomfix.profile.cards`; decides the capacity and the attention kernels.
        steps: optimizer steps to run. Adam's state is there from the second on, so 2 is the least that shows a peak.
        micro_batches: backward passes per step, their losses divided by as many.

    Returns:
        The estimate, in bytes. Gradients are set to None at the start of each step, as torch does by default.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: `loss` does not return a tensor of one element.
    """
    card = find_card(gpu)
    _check(optimizer, precision, steps, micro_batches)
    make_optimizer = _OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    simulated = SimulatedGPU(card)
    with simulated.running() as trace:
        # what initialisers need stays on the host
        trace.recording = False
        with trace.fake_mode:
            model = build()
        trace.recording = True
        model.train()
        trace.watch(model)
        step_optimizer = make_optimizer(model.parameters())
        loop = _Loop(trace, model, batch, loss, precision, micro_batches)
        for _ in range(steps):
            loop.step(step_optimizer)
    return simulated.report(assumptions(trace))


def largest_batch(
    estimate_of: Callable[[int], Estimate], *, within: str = "card", start: int = 8, most: int | None = None
) -> int | None:
    """The largest batch size that fits, or one at most a sixteenth smaller; None if not a single sample fits.

        largest_batch(lambda rows: estimate(build, lambda: batch(rows), loss, gpu="t4"))

    Args:
        estimate_of: the estimate for a batch size.
        within: what it is to fit: the simulated "card", or a preset such as "16gb".
        start: the batch size to try first, at least 1.
        most: the largest of interest; default: 64 times `start`, which is never exceeded.

    Raises:
        ValueError: `within` is neither, or `start` is below 1.
    """

    def attempt(size: int) -> Trial:
        found = estimate_of(size)
        if within not in found.fits:
            raise ValueError(f"within: got {within!r}, expected one of {', '.join(found.fits)}")
        fit = found.fits[within]
        return Trial(size, fit.fits, found.peak_reserved_bytes, fit.budget_bytes)

    return largest_fitting(find_largest(attempt, start, most))


class _Loop:
    def __init__(
        self,
        trace: CardTrace,
        model: nn.Module,
        batch: Callable[[], Any],
        loss: Callable[[nn.Module, Any], torch.Tensor],
        precision: Precision,
        micro_batches: int,
    ) -> None:
        self.trace, self.model, self.batch, self.loss = trace, model, batch, loss
        self.dtype = _PRECISIONS[precision]
        self.micro_batches = micro_batches
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for _ in range(self.micro_batches):
            self._micro_batch()
        self.trace.claim_gradients()
        self.scaler.step(optimizer)
        self.scaler.update()

    def _micro_batch(self) -> None:
        with self.trace.fake_mode:
            inputs = self.batch()
        self.trace.claim(tree_leaves(inputs), "inputs")
        autocast = nullcontext() if self.dtype is None else torch.autocast("cuda", dtype=self.dtype)
        with autocast:
            result = self.loss(self.model, inputs)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise TypeError(f"loss: returned {type(result).__name__}, expected a tensor of one element")
        if self.micro_batches > 1:
            result = result / self.micro_batches
        self.scaler.scale(result).backward()  # type: ignore[no-untyped-call]


def _check(optimizer: Optimizer, precision: str, steps: int, micro_batches: int) -> None:
    if isinstance(optimizer, str) and optimizer not in _OPTIMIZERS:
        raise ValueError(f"optimizer: got {optimizer!r}, expected one of {', '.join(_OPTIMIZERS)}, or a function")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: got {precision!r}, expected one of {', '.join(_PRECISIONS)}")
    for name, value in (("steps", steps), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
