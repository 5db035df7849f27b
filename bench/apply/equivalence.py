"""Real scripts run before and after `oomfix apply`: parameters compared after every optimizer step.

    python -m bench.apply.equivalence FOLDER [--python PYTHON] [--stubs FOLDER] [--only NAME...]

FOLDER holds one folder per script: what the script needs, cut to a size that a CPU runs in seconds, and a `case.json`:

    {"repo": "owner/name", "commit": "...", "path": "in/the/repository.py", "script": "train.py", "arguments": [],
     "folder": ".", "rewrite": ["train.py"], "steps": 8, "environment": {}}

`script` and `rewrite` are relative to the folder, `folder` is where the script is started; a notebook is run as the
code of its cells, without magics. Each is run whole and as it
is, rewritten with OOMFIX_PRESET=off, and rewritten with `--micro-batches 3`; the last is compared with a run as it is
that has no dropout and no batch statistics, as it has none itself (bench/apply/recorded_run.py). Where these two are
further apart than 1e-5, they run in float64 as well: rounding is then some 1e-10 at most, and a fault is what it was.
Writes bench/results/apply-equivalence.md; with `--only`, which takes names of folders, other lines stay. Exits 1 where
a script that ran before does not train the same after.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oomfix.rewrite.files import Rewriter, contents_of
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "apply-equivalence.md"
# by its path: a script may bring a module of the name of this package
RECORDED_RUN = Path(__file__).with_name("recorded_run.py")
MOST_RELATIVE = 1e-5
MOST_IN_DOUBLE = 1e-10
MICRO_BATCHES = 3


class Case(NamedTuple):
    """A script, and how it is run."""

    name: str
    folder: Path
    settings: dict[str, Any]


class Run(NamedTuple):
    """The parameters after each step, which optimizer made it, and how many calls ran, in parts and at all."""

    numbers: list[int]
    vectors: list[np.ndarray]
    parts: tuple[int, int]


class Failed(Exception):
    """A run that came to no step; the message is its last line."""


def main() -> None:
    """Run every case, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--stubs", type=Path)
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    rows = known() if options.only else {}
    for path in sorted(options.folder.glob("*/case.json")):
        if not options.only or path.parent.name in options.only:
            case = Case(path.parent.name, path.parent, json.loads(path.read_text()))
            row = compared(case, options.python, options.stubs)
            print(row, flush=True)
            rows[row.split("|")[1]] = row
            write(list(rows.values()))
    sys.exit(any(map(is_wrong, rows.values())))


def known() -> dict[str, str]:
    """The lines of the page, by script."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| run |")]
    return {row.split("|")[1]: row for row in rows}


def is_wrong(row: str) -> bool:
    """Whether a line tells of a script that trains otherwise than before, or did not run."""
    return "**" in row or "did not run" in row


def compared(case: Case, python: str, stubs: Path | None) -> str:
    """The line of the table for a script."""
    settings = case.settings

    def run(kind: str, rewritten: Options | None = None, preset: str = "") -> tuple[Run, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / case.folder.name
            shutil.copytree(case.folder, place)
            forms = rewrite(place, settings["rewrite"], rewritten) if rewritten is not None else []
            return recorded(place, settings, kind, python, stubs, preset), forms

    where = f"{case.name} | {settings['repo']} {settings['path']} ({settings['commit'][:7]})"
    try:
        before, _ = run("plain")
        off, forms = run("plain", Options("16gb"), "off")
        in_parts = Options("16gb", {"micro_batches": MICRO_BATCHES})
        steady, (split, _) = run("steady")[0], run("steady", in_parts)
        worst = distance(steady, split)
        apart = f"{worst:.0e}"
        if worst > MOST_RELATIVE:
            worst = distance(run("double")[0], run("double", in_parts)[0])
            apart += f", {worst:.0e} in float64" if worst <= MOST_IN_DOUBLE else f", **{worst:.0e} in float64**"
    except Failed as problem:
        return f"| {where} | | | did not run: {problem} | | |"
    same = before.numbers == off.numbers and all(map(np.array_equal, before.vectors, off.vectors))
    said = [", ".join(forms), str(len(before.numbers)), "same bits" if same else "**differs**"]
    said += [apart, f"{split.parts[0]} of {split.parts[1]}"]
    return f"| {where} | {' | '.join(said)} |"


def rewrite(place: Path, files: list[str], options: Options) -> list[str]:
    """Rewrite files of a copy; returns the forms of their loops."""
    outcomes = Rewriter(all_rules(), options).rewrite([str(place / name) for name in files])
    for path, content in contents_of(outcomes).items():
        Path(path).write_bytes(content)
    return [loop.rewrite for outcome in outcomes for loop in outcome.loops]


def recorded(place: Path, settings: dict[str, Any], kind: str, python: str, stubs: Path | None, preset: str) -> Run:
    """Run the script of a copy.

    Raises:
        Failed: it made no step.
    """
    out = place / "recorded.npz"
    paths = [str(place), str(ROOT), *([str(stubs)] if stubs is not None else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OOMFIX_PRESET": preset}
    environment |= {name: str(value) for name, value in settings.get("environment", {}).items()}
    given = [str(out), str(settings["steps"]), kind, str(place / settings["script"]), *map(str, settings["arguments"])]
    done = subprocess.run(
        [python, str(RECORDED_RUN), *given],
        cwd=place / settings.get("folder", "."),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    numbers = list(np.load(out)["numbers"]) if out.exists() else []
    if not numbers:
        raise Failed((done.stderr.strip().splitlines() or ["no step"])[-1][:120])
    with np.load(out) as found:
        vectors = [found[f"arr_{index}"] for index in range(len(numbers))]
        return Run(numbers, vectors, (int(found["parts"][0]), int(found["parts"][1])))


def distance(one: Run, other: Run) -> float:
    """The largest relative distance between the parameters after a step; infinite where the steps are others."""
    if one.numbers != other.numbers:
        return float("inf")
    pairs = zip(one.vectors, other.vectors, strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30)) for a, b in pairs)


def write(rows: list[str]) -> None:
    """Write the page."""
    wrong = sum(map(is_wrong, rows))
    lines = [
        "# Real scripts before and after `oomfix apply`, cpu",
        "",
        f"Made by `python -m bench.apply.equivalence` on {datetime.date.today()}, 1 thread. {len(rows)} scripts, "
        f"{wrong} that do not train the same. Off: OOMFIX_PRESET=off, in whole batches. Split: micro_batches=3; the "
        "largest relative distance between all parameters after a step, in float64 too where fp32 leaves more than "
        f"{MOST_RELATIVE:.0e}, and how many calls ran in parts (the others "
        "were found to be coupled, or cannot be cut, and ran whole).",
        "",
        "| run | script | loops | steps | off | split | calls in parts |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
