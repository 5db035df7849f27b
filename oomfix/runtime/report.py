"""What the manager found out and did, for a log."""

from collections.abc import Iterable
from dataclasses import dataclass

from oomfix.presets import Preset
from oomfix.runtime.calls.known import Known

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class ForwardReport:
    """What became of the calls of one forward with one kind of batch.

    Attributes:
        name: the forward's, without that of the function it was defined in.
        trains: its calls ran backward; False: they were evaluations.
        calls: how many there were.
        micro_batches: how many each batch is cut into where the preset says so; None: as many as memory asks for.
        largest: samples in the largest micro-batch known to fit; None: no whole batch has failed to fit.
        whole_because: why its batches may not be split; None: they may, or nobody had to know.
        trusted: they are split though samples depend on each other, because the preset says split="always".
        fp32: it runs in fp32 because autocast made it fail.
    """

    name: str
    trains: bool
    calls: int
    micro_batches: int | None
    largest: int | None
    whole_because: str | None
    trusted: bool
    fp32: bool

    @classmethod
    def of(cls, known: Known, preset: Preset, trains: bool) -> "ForwardReport":
        """The report of a forward."""
        verdict = known.verdict
        splits = verdict is not None and verdict.rule is not None
        asked = preset.micro_batches if trains else "auto"
        return cls(
            name=short_name(known),
            trains=trains,
            calls=known.calls,
            micro_batches=asked if splits and isinstance(asked, int) and asked > 1 else None,
            largest=known.sizing.largest,
            whole_because=_whole_because(known, preset, trains),
            trusted=verdict is not None and verdict.trusted,
            fp32=known.fp32,
        )

    def __str__(self) -> str:
        kind = "training call" if self.trains else "evaluation"
        return f"{self.name}: {self._size()}{', in fp32' if self.fp32 else ''}, {_count(self.calls, kind)}"

    def _size(self) -> str:
        if self.whole_because is not None:
            return f"whole batches ({self.whole_because})"
        trusted = " (samples depend on each other; split='always' was asked for)" if self.trusted else ""
        if self.largest is not None:
            return f"micro-batches of up to {_count(self.largest, 'sample')}{trusted}"
        if self.micro_batches is not None:
            return f"batches in {self.micro_batches} micro-batches{trusted}"
        return "whole batches"


@dataclass(frozen=True)
class TechniqueReport:
    """A technique that is on.

    Attributes:
        name: the technique, as "checkpointing 12 blocks".
        of: the forward or the optimizer that it is on for.
        since: when it began, as "training call 3" (of its forward) or "step 1".
        because: why it is on.
        saved_bytes: what it saves in a call, for the micro-batches of the last; None: not measured.
        measured: what that is, and how it is known; "" where it is not.
    """

    name: str
    of: str
    since: str
    because: str
    saved_bytes: int | None = None
    measured: str = ""

    def __str__(self) -> str:
        saved = "what it saves is not measured"
        if self.saved_bytes is not None:
            saved = f"saves {_bytes(self.saved_bytes)} ({self.measured})"
        return f"{self.of}: {self.name} since {self.since}, because {self.because}; {saved}"


@dataclass(frozen=True)
class Report:
    """A summary of the run so far; `str` of it is a few lines of text.

    Attributes:
        preset: name of the preset.
        forwards: what became of each forward.
        techniques: what is on, since when, why, and what it saves.
        steps: optimizer steps, those left out included.
        skipped_steps: steps left out because fp16 gradients overflowed.
        loss_scale: what losses are multiplied by in fp16; None in other precisions.
        retries: times that a call ran out of memory and started again.
        windows: accumulation windows begun.
    """

    preset: str
    forwards: tuple[ForwardReport, ...]
    steps: int
    skipped_steps: int
    loss_scale: float | None
    retries: int
    windows: int
    techniques: tuple[TechniqueReport, ...] = ()

    @property
    def largest(self) -> dict[str, int | None]:
        """For each forward by name, the largest micro-batch (samples) known to fit; None: batches run whole."""
        return {forward.name: forward.largest for forward in self.forwards}

    @property
    def whole_because(self) -> dict[str, str]:
        """For each forward that may not be split, why."""
        return {f.name: f.whole_because for f in self.forwards if f.whole_because is not None}

    def __str__(self) -> str:
        steps = _count(self.steps, "optimizer step")
        if self.skipped_steps:
            steps += f", {self.skipped_steps} of them left out because fp16 gradients overflowed"
        if self.loss_scale is not None:
            steps += f"; loss scale {self.loss_scale:g}"
        lines = [f"preset {self.preset}: {steps}"]
        if self.retries:
            lines.append(f"  ran out of memory {_count(self.retries, 'time')}, and went on in smaller pieces")
        if self.windows:
            lines.append(f"  {_count(self.windows, 'accumulation window')}")
        return "\n".join([*lines, *(f"  {line}" for line in (*self.forwards, *self.techniques))])


def forward_reports(forwards: Iterable[Known], preset: Preset, trains: bool) -> tuple[ForwardReport, ...]:
    """The reports of forwards that have been called."""
    return tuple(ForwardReport.of(known, preset, trains) for known in forwards if known.calls)


def short_name(known: Known) -> str:
    """The name of a forward, without that of the function it was defined in."""
    return known.name.rpartition("<locals>.")[2]


def _whole_because(known: Known, preset: Preset, trains: bool) -> str | None:
    if preset.split == "never":
        return "split='never' was asked for"
    reason = known.must_be_whole() if trains else None
    if reason is None and known.verdict is not None and known.verdict.rule is None:
        return known.verdict.reason
    return reason


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _bytes(number: int) -> str:
    return f"{number / _GIB:.2f} GiB" if number >= _GIB // 10 else f"{number / _MIB:.1f} MiB"
