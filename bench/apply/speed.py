"""What `oomfix apply` takes for one script, in a fresh process: real scripts of about 500 lines, and longer ones.

    python -m bench.apply.speed FOLDER [--rounds N]

FOLDER holds scripts as OWNER__NAME/PATH (bench/README.md says how to get them). Writes bench/results/apply-speed.md.
The longer scripts are a fixture again and again. Every script is rewritten from its original in each round.
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.audit import script_of
from bench.processes import Command, Run, cpu_seconds, interleaved, peak_mib, seconds

RESULT = Path(__file__).parents[1] / "results" / "apply-speed.md"
ABOUT_500 = range(490, 511)
LENGTHS = (500, 5_000, 20_000)


def scripts_of_500_lines(folder: Path) -> list[Path]:
    """The scripts below `folder` of about 500 lines that name a backward pass: others are read, and nothing more."""
    found = []
    # `rglob` does not go into the linked folders of a collection
    paths = [Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names]
    for path in sorted(path for path in paths if path.suffix == ".py"):
        content = path.read_bytes()
        if content.count(b"\n") in ABOUT_500 and b"backward(" in content:
            found.append(path)
    return found


def applied(original: Path, copy: Path) -> Command:
    """`oomfix apply` in place on a copy that is made anew before each run; exit status 1 says that loops were left."""
    arguments = (sys.executable, "-m", "oomfix", "apply", "--preset", "16gb", str(copy))
    return Command(arguments, before=lambda: shutil.copyfile(original, copy))


def timed(originals: Sequence[Path], scratch: Path, rounds: int) -> list[list[Run]]:
    """The runs of each script, one per round."""
    commands = {
        str(number): applied(original, scratch / f"train_{number}.py") for number, original in enumerate(originals)
    }
    return list(interleaved(commands, rounds).values())


def report(folder: Path, rounds: int) -> str:
    """Run everything; the text of the page.

    Raises:
        SystemExit: the folder holds no script of about 500 lines.
    """
    load = os.getloadavg()[0]
    real = scripts_of_500_lines(folder)
    if not real:
        raise SystemExit(f"{folder}: no script of {ABOUT_500[0]} to {ABOUT_500[-1]} lines with a backward pass")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        runs = timed(real, scratch, rounds)
        walls, processor = [seconds(of_one) for of_one in runs], [cpu_seconds(of_one) for of_one in runs]
        made = []
        for lines in LENGTHS:
            path = scratch / f"made_{lines}.py"
            path.write_text(script_of(lines), encoding="utf-8")
            made.append(path)
        rows = [
            f"| {lines:,} | {seconds(of_one):.2f} | {cpu_seconds(of_one):.2f} | {peak_mib(of_one):.0f} |"
            for lines, of_one in zip(LENGTHS, timed(made, scratch, rounds), strict=True)
        ]
    table = "\n".join(rows)
    middle, slowest, busiest = statistics.median(walls), max(walls), max(processor)
    return f"""# The speed of apply

`python -m bench.apply.speed FOLDER --rounds {rounds}`, {datetime.date.today()}; {platform.machine()},
Python {platform.python_version()}, load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end;
`oomfix apply --preset 16gb` in place, a fresh process for each run; medians of {rounds} runs.

{len(real)} public scripts of {ABOUT_500[0]} to {ABOUT_500[-1]} lines: {middle:.2f} s in the middle, {slowest:.2f} s the
slowest; {busiest:.2f} s of processor time at most.

| lines of a made-up script | wall s | processor s | peak MiB |
|---|---|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script")
    arguments = parser.parse_args()
    RESULT.write_text(report(arguments.folder, arguments.rounds), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
