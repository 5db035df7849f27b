"""Commands timed side by side: every command runs once per round, so that a busy machine slows all of them."""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Run(NamedTuple):
    """One run of a command: wall seconds, processor seconds of all its processes, and MiB of the largest of them."""

    wall_s: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Command:
    """What to run.

    Attributes:
        arguments: the program and its arguments.
        environment: variables to set beside those there are.
        before: called before each run, not timed.
        statuses: exit statuses that mean the work was done; linters exit 1 with findings.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    statuses: tuple[int, ...] = (0, 1)

    def run(self) -> Run:
        """Run it once, its output thrown away.

        Raises:
            RuntimeError: it ended with another status than expected.
        """
        if self.before is not None:
            self.before()
        with tempfile.TemporaryFile() as messages:
            start = time.perf_counter()
            process = subprocess.Popen(
                self.arguments,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                env={**_environment(), **self.environment},
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in self.statuses:
                messages.seek(0)
                said = messages.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(self.arguments)[:200]}: exit status {process.returncode}: {said}")
        return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def _environment() -> dict[str, str]:
    """That of this process; but Python keeps its bytecode, as pip does of what it installs for a user."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def interleaved(commands: Mapping[str, Command], rounds: int) -> dict[str, list[Run]]:
    """The runs of every command, one per round, after one round that is not counted and fills the page cache."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            run = command.run()
            if number > 0:
                runs[name].append(run)
    return runs


def seconds(runs: Sequence[Run]) -> float:
    """The median of the wall seconds."""
    return statistics.median(run.wall_s for run in runs)


def cpu_seconds(runs: Sequence[Run]) -> float:
    """The median of the processor seconds, which other programs on the machine hardly change."""
    return statistics.median(run.cpu_s for run in runs)


def peak_mib(runs: Sequence[Run]) -> float:
    """The largest peak, in MiB."""
    return max(run.peak_mib for run in runs)


def ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """How many times longer than the others: the median of the ratios within rounds."""
    return statistics.median(run.wall_s / other.wall_s for run, other in zip(runs, others, strict=True))


def cpu_ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """How much more processor time than the others: the median of the ratios within rounds."""
    return statistics.median(run.cpu_s / other.cpu_s for run, other in zip(runs, others, strict=True))
