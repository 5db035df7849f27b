"""How much memory is in use, for a log: what torch's allocator counts, to the byte."""

import logging
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_log = logging.getLogger("oomfix")
_GIB = 2**30


@dataclass(frozen=True)
class MemoryReading:
    """One look at a card (bytes).

    Attributes:
        allocated_bytes: in tensors now.
        peak_bytes: the most in tensors since the last `MemoryMonitor.log`.
        reserved_bytes: taken from the driver, in use or not; None where there is no such number.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.allocated_bytes / _GIB:.2f} GiB allocated", f"{self.peak_bytes / _GIB:.2f} GiB peak"]
        if self.reserved_bytes is not None:
            parts.append(f"{self.reserved_bytes / _GIB:.2f} GiB reserved")
        return f"GPU memory: {', '.join(parts)}"


class MemoryCounter(Protocol):
    """What a monitor reads, if not the CUDA allocator: a simulated card, or a counter of one's own."""

    @property
    def current_bytes(self) -> int:
        """In tensors now."""

    @property
    def peak_bytes(self) -> int:
        """The most since the last `reset_peak`."""

    def reset_peak(self) -> None:
        """Let the peak start again from what is there now."""


class MemoryMonitor:
    """Logs a card's memory, once per epoch or every few steps.

        monitor = runtime.MemoryMonitor()
        for epoch in range(epochs):
            train(...)
            monitor.log(epoch)    # GPU memory: 3.50 GiB allocated, 4.20 GiB peak, 4.60 GiB reserved

    Args:
        writer: gets the numbers too, in GiB, as "memory/allocated", "memory/peak" and "memory/reserved": a
            TensorBoard `SummaryWriter` (anything with `add_scalar`) or a W&B run (anything with `log`). None: the
            W&B run that is under way, if there is one.
        device: the card; None: the current one.
        counter: what to read instead of the CUDA allocator.

    Raises:
        TypeError: `writer` has neither method.

    Reading waits for nothing on the card. Without a card, readings are 0 and nothing is logged.
    """

    def __init__(
        self,
        writer: Any = None,
        *,
        device: int | torch.device | None = None,
        counter: MemoryCounter | None = None,
    ) -> None:
        if writer is not None and not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise TypeError(
                f"writer: got {type(writer).__name__}, expected a TensorBoard SummaryWriter, a W&B run, or None"
            )
        self._writer = writer
        self._device = device
        self._counter = counter

    def read(self) -> MemoryReading:
        """The numbers now; nothing is logged, and the peak goes on."""
        if self._counter is not None:
            return MemoryReading(self._counter.current_bytes, self._counter.peak_bytes)
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return MemoryReading(0, 0)
        return MemoryReading(
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
        )

    def log(self, step: int | None = None) -> MemoryReading:
        """Log the numbers, and let the peak start again: each log tells of its own epoch.

        Args:
            step: epoch or step, for the log line and the writer.
        """
        reading = self.read()
        if self._counter is not None:
            self._counter.reset_peak()
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            return reading
        _log.info("%s%s", "" if step is None else f"{step}: ", reading)
        self._write(reading, step)
        return reading

    def _write(self, reading: MemoryReading, step: int | None) -> None:
        wandb = sys.modules.get("wandb")
        writer = getattr(wandb, "run", None) if self._writer is None else self._writer
        if writer is None:
            return
        numbers = {"memory/allocated": reading.allocated_bytes, "memory/peak": reading.peak_bytes}
        if reading.reserved_bytes is not None:
            numbers["memory/reserved"] = reading.reserved_bytes
        in_gib = {name: nbytes / _GIB for name, nbytes in numbers.items()}
        if not hasattr(writer, "add_scalar"):
            # without a step of ours: W&B refuses steps that go back, and the script counts its own
            writer.log(in_gib)
            return
        for name, value in in_gib.items():
            writer.add_scalar(name, value, step)
