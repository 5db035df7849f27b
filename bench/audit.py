"""How fast `oomfix audit` is, beside the other tools, in one run.

    python -m bench.audit [--tree FOLDER] [--rivals FOLDER] [--rounds N] [--whole-tree]

The tree is transformers and timm, sources only, downloaded from PyPI when no --tree is given. Writes
bench/results/audit-speed.md. Every tool runs once per round; times are medians, ratios are medians of the ratios
within rounds. TorchFix and torch-preflight take a quarter of an hour each on the tree, so they run on every 20th file
of it unless --whole-tree is given.
"""

import argparse
import ast
import compileall
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.processes import Command, Run, cpu_ratio, cpu_seconds, interleaved, peak_mib, ratio, seconds
from bench.rivals import Rival, default_folder

BENCH = Path(__file__).parent
RESULT = BENCH / "results" / "audit-speed.md"
FIXTURE = BENCH.parent / "fixtures" / "camouflage" / "train.py"
PACKAGES = ("transformers==5.23.0", "timm==1.0.31")
SUBSET_STEP = 20
LENGTHS = (1_000, 10_000, 50_000)

OOMFIX = (sys.executable, "-m", "oomfix", "audit")
IMPORTS = "python -c 'import libcst, click'"
PARSE_ALL = """
import ast, sys
for path in open(sys.argv[1], encoding="utf-8").read().split("\\n"):
    ast.parse(open(path, "rb").read())
"""


def download_tree(folder: Path) -> Path:
    """The sources of `PACKAGES` under the folder, downloaded where they are not there.

    Raises:
        subprocess.CalledProcessError: pip could not download them.
    """
    sources = folder / "-".join(PACKAGES)
    if not sources.exists():
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", wheels, *PACKAGES], check=True)
            for wheel in Path(wheels).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(sources, [name for name in archive.namelist() if name.endswith(".py")])
    return sources


def script_of(lines: int) -> str:
    """A training script of so many lines: a fixture again and again, cut after a statement, blank lines at the end."""
    text = FIXTURE.read_text(encoding="utf-8")
    copy = text.splitlines()
    copies, rest = divmod(lines, len(copy))
    ends = [0, *(statement.end_lineno or 0 for statement in ast.parse(text).body)]
    whole = copy * copies + copy[: max(end for end in ends if end <= rest)]
    return "\n".join([*whole, *[""] * (lines - len(whole))]) + "\n"


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def oomfix(*arguments: str, cache: Path | None = None, cold: bool = False) -> Command:
    """`oomfix audit` in a fresh process: without a cache, or with one that is emptied before each run."""
    if cache is None:
        return Command((*OOMFIX, "--no-cache", *arguments))
    return Command(
        (*OOMFIX, *arguments),
        environment={"OOMFIX_CACHE_DIR": str(cache)},
        before=(lambda: _forget(cache)) if cold else None,
    )


class Bench:
    """One run of everything.

    Args:
        tree: the sources.
        rivals: where the virtual environments of the rivals are.
        scratch: an empty folder for caches and scripts made for the purpose.
        rounds: how often each tool runs where that takes seconds.
    """

    def __init__(self, tree: Path, rivals: Path, scratch: Path, rounds: int) -> None:
        self.files = sorted(str(path) for path in tree.rglob("*.py"))
        self.lines = _count_lines(self.files)
        self.subset = self.files[::SUBSET_STEP]
        self.torchfix, self.preflight, self.ruff = (
            Rival(rivals, name) for name in ("torchfix", "torch-preflight", "ruff")
        )
        self._tree = str(tree)
        self._scratch = scratch
        self._rounds = rounds

    def tree_table(self) -> str:
        """Every fast tool on the whole tree."""
        cold, warm = self._scratch / "cold", self._scratch / "warm"
        listing = self._scratch / "files"
        listing.write_text("\n".join(self.files), encoding="utf-8")
        ruff = (self.ruff.command, "check", "--isolated", "--no-cache")
        every_rule = (*ruff, "--select", "ALL")
        runs = interleaved(
            {
                "oomfix, cold": oomfix(self._tree, cache=cold, cold=True),
                "oomfix, warm": oomfix(self._tree, cache=warm),
                "oomfix, cold, concise": oomfix("--format", "concise", self._tree, cache=cold, cold=True),
                "oomfix, cold, -j 1": oomfix("-j", "1", self._tree, cache=cold, cold=True),
                "`ruff check`": Command((*ruff, self._tree)),
                "`ruff check --select ALL`": Command((*every_rule, self._tree)),
                "`ruff check --select ALL`, concise": Command((*every_rule, "--output-format", "concise", self._tree)),
                "`ast.parse` of every file": Command((sys.executable, "-c", PARSE_ALL, str(listing)), statuses=(0,)),
            },
            self._rounds,
        )
        return _table(runs, "oomfix, cold")

    def slow_table(self, whole_tree: bool) -> str:
        """The slow rivals on the subset, or once on the whole tree, beside oomfix on the same files."""
        folder = self._tree if whole_tree else self._folder_of_subset()
        commands = {
            "oomfix, cold": oomfix(folder, cache=self._scratch / "subset", cold=True),
            f"TorchFix {self.torchfix.version}": Command((self.torchfix.command, folder)),
            f"torch-preflight {self.preflight.version}": Command((self.preflight.command, "check", folder)),
        }
        if whole_tree:
            return _table({name: [command.run()] for name, command in commands.items()}, "oomfix, cold")
        return _table(interleaved(commands, 3), "oomfix, cold")

    def file_table(self) -> str:
        """One script of 300 lines in a fresh process, against the imports of two of its dependencies."""
        script = self._script(300)
        runs = interleaved(
            {
                IMPORTS: Command((sys.executable, "-c", "import libcst, click"), statuses=(0,)),
                **{f"oomfix, {form}": oomfix("--format", form, script) for form in ("concise", "json", "rich")},
                "oomfix, concise, seen before": oomfix("--format", "concise", script, cache=self._scratch / "file"),
                "`python -c pass`": Command((sys.executable, "-c", "pass"), statuses=(0,)),
            },
            self._rounds * 5,
        )
        return _table(runs, IMPORTS, unit="ms")

    def length_table(self) -> str:
        """Scripts of growing length: the time above that of an empty script, per 1,000 lines."""
        runs = interleaved({str(lines): oomfix(self._script(lines)) for lines in (1, *LENGTHS)}, self._rounds)
        start_s = seconds(runs["1"])
        rows = ["| lines | wall s | ms per 1,000 lines | peak MiB |", "|---|---|---|---|"]
        for lines in LENGTHS:
            wall_s = seconds(runs[str(lines)])
            cost_ms = (wall_s - start_s) * 1e6 / lines
            rows.append(f"| {lines:,} | {wall_s:.2f} | {cost_ms:.1f} | {peak_mib(runs[str(lines)]):.0f} |")
        return "\n".join(rows)

    def _folder_of_subset(self) -> str:
        """A tree of the subset alone: files that are named one by one are audited even where no rule needs them."""
        folder = self._scratch / "files of the subset"
        for file in self.subset:
            copy = folder / Path(file).relative_to(self._tree)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        return str(folder)

    def _script(self, lines: int) -> str:
        path = self._scratch / f"train_{lines}.py"
        path.write_text(script_of(lines), encoding="utf-8")
        return str(path)


def _count_lines(files: Sequence[str]) -> int:
    return sum(Path(file).read_bytes().count(b"\n") for file in files)


def _table(runs: Mapping[str, Sequence[Run]], base: str, unit: str = "s") -> str:
    """Wall times with their range, processor times, how many times as much as `base`, and the peak."""
    factor, digits = (1000, 0) if unit == "ms" else (1, 2)
    than = base.strip("`")
    rows = [
        f"| | wall {unit}, median | least and most | times {than} | processor {unit} | times {than} | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, timed in runs.items():
        walls = [run.wall_s * factor for run in timed]
        rows.append(
            f"| {name} | {seconds(timed) * factor:.{digits}f} | {min(walls):.{digits}f} to {max(walls):.{digits}f} "
            f"| {ratio(timed, runs[base]):.2f} | {cpu_seconds(timed) * factor:.{digits}f} "
            f"| {cpu_ratio(timed, runs[base]):.2f} | {peak_mib(timed):.0f} |"
        )
    return "\n".join(rows)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def report(bench: Bench, rounds: int, whole_tree: bool) -> str:
    """Run everything; the text of bench/results/audit-speed.md."""
    before = os.getloadavg()[0]
    # the slow ones last: the others are done while the machine is as quiet as it was at the start
    tree, one, lengths, slow = (
        bench.tree_table(),
        bench.file_table(),
        bench.length_table(),
        bench.slow_table(whole_tree),
    )
    today = datetime.datetime.now(datetime.timezone.utc).date()
    slow_on = (
        "The whole tree, each tool once."
        if whole_tree
        else f"Every {SUBSET_STEP}th file of the tree in the order of their paths: {len(bench.subset)} files, "
        f"{_count_lines(bench.subset):,} lines. 3 rounds; nothing is extrapolated."
    )
    return f"""# The auditor's speed

`python -m bench.audit --rounds {rounds}{" --whole-tree" if whole_tree else ""}`, {today}. {_processor()}, {_cores()}
cores, load {before:.1f} at the start and {os.getloadavg()[0]:.1f} at the end, {platform.system()}, Python
{platform.python_version()}, ruff {bench.ruff.version}; no torch needed or imported, CPU only. Every tool uses the
processes it starts by itself; output is thrown away; the files are in the page cache; oomfix is compiled to bytecode,
as pip does when it installs. Peak is that of the largest process of a tool, and not below the 23 MiB of the bench.
Other programs on the machine lengthen wall times; processor times, of all processes of a tool, they hardly change.

## A large tree

{" and ".join(PACKAGES)}: {len(bench.files):,} files, {bench.lines:,} lines; {rounds} rounds. Cold: with an empty
cache, which is written. Warm: nothing changed since the last run. Each in its own default form of output unless it
says concise, which is a line per finding; with every rule, ruff shows the lines of hundreds of thousands of findings.

{tree}

## Beside the slow rivals

{slow_on}

{slow}

## One file of 300 lines, in a fresh process

A training script with findings; {rounds * 5} rounds, without a cache unless it says "seen before".

{one}

## Cost against length

One script as long as said; {rounds} rounds. What an empty script takes is not in the cost per 1,000 lines.

{lengths}
"""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__.splitlines()[0])
    parser.add_argument("--tree", metavar="FOLDER", type=Path, help="sources [default: downloaded from PyPI]")
    parser.add_argument(
        "--rivals",
        metavar="FOLDER",
        type=Path,
        help="virtual environments of the rivals [default: in the user's cache]",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="runs of each tool [default: 5]")
    parser.add_argument("--whole-tree", action="store_true", help="the slow rivals on all files: half an hour")
    options = parser.parse_args(arguments)
    tree = options.tree or download_tree(default_folder())
    compileall.compile_dir(BENCH.parent / "oomfix", quiet=1)  # as pip does when it installs
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(tree.resolve(), options.rivals or default_folder(), Path(scratch), options.rounds)
        text = report(bench, options.rounds, options.whole_tree)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
