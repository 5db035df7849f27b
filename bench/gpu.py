"""Everything that needs a GPU, in one command: the tests marked `gpu`, then the benches, the most telling first.

    python -m bench.gpu [--minutes 25] [--parts tests comparison ...] [--to FOLDER]

Where a command may take ten minutes only, give each part one of its own: none takes more than nine.

Each part runs in a process of its own and is ended when its time, or what is left of all, is over; what it has written
until then stays. Writes bench/results/gpu-tests.txt and the pages of the benches (`*-cuda.md`, profile-calibration),
and copies them to FOLDER. Exits 1 if a part failed or was ended. Nothing is downloaded where torch, transformers,
accelerate, lightning and pytest are installed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
TESTS = RESULTS / "gpu-tests.txt"


@dataclass(frozen=True)
class Part:
    """A command, its arguments after `python`, and the most minutes that it may take."""

    arguments: tuple[str, ...]
    minutes: float


PARTS = {
    "tests": Part(("-m", "pytest", "-m", "gpu", "-v", "-rs", "--durations=5", "tests/runtime"), 5),
    "comparison": Part(("-m", "bench.comparison", "--device", "cuda", "--rounds", "15"), 9),
    "calibration": Part(("bench/profile_calibration.py", "--write"), 6),
    "techniques": Part(("-m", "bench.techniques", "--device", "cuda", "--rounds", "10"), 7),
    "runtime": Part(("-m", "bench.runtime", "--device", "cuda", "--rounds", "10"), 4),
    "verification": Part(("-m", "bench.verification", "--device", "cuda", "--runs", "3"), 3),
}


def run(part: Part, minutes: float, output: Path | None) -> str:
    """Run a part for `minutes` at most, its output shown and kept; how it ended: "done", "failed" or "ended"."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *part.arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE if output is not None else None, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        ending = "ended"
    else:
        ending = "failed" if process.returncode else "done"
    if output is not None:
        output.write_text(said, encoding="utf-8")
        print(said)
    return ending


def run_all(names: Sequence[str], minutes: float) -> dict[str, str]:
    """Run the parts one after the other in `minutes` together; how each ended, and how long it took."""
    end, endings = time.monotonic() + 60 * minutes, {}
    for name in names:
        left = (end - time.monotonic()) / 60
        begun = time.monotonic()
        ending = "no time left"
        if left > 0.5:
            ending = run(PARTS[name], min(left, PARTS[name].minutes), TESTS if name == "tests" else None)
        endings[name] = f"{ending} after {(time.monotonic() - begun) / 60:.1f} min"
    return endings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--to", type=Path, help="copy what was written to this folder")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: no CUDA device here", file=sys.stderr)
        return 2
    begun = time.time()
    endings = run_all(arguments.parts, arguments.minutes)
    written = [path for path in sorted(RESULTS.iterdir()) if path.stat().st_mtime >= begun - 1]
    if arguments.to is not None:
        arguments.to.mkdir(parents=True, exist_ok=True)
        for path in written:
            shutil.copy(path, arguments.to)
    for name, ending in endings.items():
        print(f"{name}: {ending}")
    print("written:", ", ".join(path.name for path in written) or "nothing")
    return 0 if all(ending.startswith("done") for ending in endings.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
