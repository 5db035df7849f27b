"""`oomfix apply --check-equivalence`: the user's own command before and after the rewrite, step by step.

Each run has a temporary copy of the current folder to itself; the user's files are only read.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from oomfix.equivalence.comparison import SPLIT_TOLERANCE, Comparison, Recording, compare
from oomfix.equivalence.recorder_hook import SEED, read_recordings, sitecustomize
from oomfix.rewrite.files import FileOutcome

MOST_BYTES = 2 * 2**30
"""The largest folder that is copied."""

_MIXED_TOLERANCE = 1e-2
_LEFT_OUT = frozenset({".git", "__pycache__", "node_modules"})
_LINES_SHOWN = 15

Contents = Mapping[str, bytes]
"""Path, relative to the current folder -> what the file is to hold."""


class CannotCompare(Exception):
    """Two runs that cannot be compared; the message is plain lines that say why and what to do."""


class Side(NamedTuple):
    """The run of a rewritten version beside the run before.

    Attributes:
        name: what it is called.
        processes: what it recorded.
        tolerance: how much weights may differ, relative; None: not by a bit.
        found: the comparison.
        notes: what else is to be known, one clause each.
    """

    name: str
    processes: list[Recording]
    tolerance: float | None
    found: Comparison
    notes: tuple[str, ...] = ()


class Trial(NamedTuple):
    """A command before and after the rewrite.

    Attributes:
        command: the command.
        before: what the run before recorded.
        sides: the rewritten versions: with OOMFIX_PRESET=off, then with the preset itself in fp32.
        mends: False where the versions lack what the rewrite mends of the training itself, which makes it another.
    """

    command: str
    before: list[Recording]
    sides: list[Side]
    mends: bool

    @property
    def same(self) -> bool:
        """Whether all versions trained the same."""
        return all(side.found.difference is None for side in self.sides)


class Versions(NamedTuple):
    """How rewritten files are made.

    Attributes:
        preset: the preset's name.
        mend: whether the rewrite mends what changes the training (a window's lost tail, a missing division).
        written: gives the files as they would be written, or (False) without such mends.
        in_fp32: gives the files with the preset in fp32, with or without such mends (first argument), and with
            batches always split or as the preset decides (second).
    """

    preset: str
    mend: bool
    written: Callable[[bool], Contents]
    in_fp32: Callable[[bool, bool], Contents]


def contents_here(outcomes: Sequence[FileOutcome]) -> Contents:
    """What rewritten files are to hold, by their paths from the current folder.

    Raises:
        CannotCompare: there are none, or one lies elsewhere.
    """
    here = os.path.realpath(os.curdir)
    contents = {}
    for outcome in outcomes:
        if outcome.content is not None:
            path = os.path.relpath(os.path.realpath(outcome.path), here)
            if path.startswith(os.pardir):
                raise CannotCompare(f"{outcome.path}: lies outside of the current folder, which is what is copied")
            contents[path] = outcome.content
    if not contents:
        raise CannotCompare("nothing would be rewritten, so that there is nothing to compare")
    return contents


def try_out(command: str, versions: Versions, say: Callable[[str], object]) -> Trial:
    """Run a command before the rewrite, after it with OOMFIX_PRESET=off, and after it with the preset in fp32.

    Where the version with OOMFIX_PRESET=off trains otherwise, and the rewrite mends the training itself, versions
    without these mends are compared.

    Args:
        command: a line for the shell, to be run in the current folder.
        versions: the rewritten files.
        say: told what is done, one line each.

    Raises:
        CannotCompare: the folder is too large to be copied, the command fails, trains nothing or runs other files, or
            does not train the same when it is run twice.
    """
    runner = _Runner(command)
    contents = versions.written(True)
    say(f"before: {command}")
    before = runner.run({}, None)
    if not any(process.steps for process in before):
        raise CannotCompare(f"{command}: no optimizer step was seen, expected a command that trains with torch")
    if (where := _run_elsewhere(before, contents)) is not None:
        raise CannotCompare(f"{command}: {where}")
    say("after, with OOMFIX_PRESET=off")
    mends = True
    off = _bitwise(before, runner.run(contents, "off"))
    if off.found.difference is not None:
        say("before, once more: does it repeat itself?")
        if (changed := compare(before, runner.run({}, None)).difference) is not None:
            raise CannotCompare(f"{command}: does not repeat itself, though seeds are fixed: {changed}")
        if versions.mend:
            mends = False
            say("after, with OOMFIX_PRESET=off, without what changes the training")
            off = _bitwise(before, runner.run(versions.written(False), "off"))
    seen = frozenset().union(*(process.seen for process in off.processes))
    splits = "batch statistics" not in seen
    say(f"after, with {versions.preset} in fp32")
    processes = runner.run(versions.in_fp32(mends, splits), None)
    tolerance = _MIXED_TOLERANCE if "mixed precision" in seen else SPLIT_TOLERANCE
    found = compare(before, processes, tolerance)
    if splits and found.difference is None:
        seen -= {"random draws"}
    elif splits and "random draws" in seen:
        # noise is drawn as the whole batch draws it, masks of dropout are not
        say(f"after, with {versions.preset} in fp32, in whole batches")
        processes = runner.run(versions.in_fp32(mends, False), None)
        found = compare(before, processes, tolerance)
    return Trial(
        command, before, [off, Side(versions.preset, processes, tolerance, found, _notes(seen, processes))], mends
    )


def _bitwise(before: list[Recording], after: list[Recording]) -> Side:
    return Side("off", after, None, compare(before, after))


def _notes(seen: frozenset[str], processes: list[Recording]) -> tuple[str, ...]:
    notes = []
    parts = sum(process.calls_in_parts for process in processes)
    if parts:
        notes.append(f"{parts} batches were split")
    elif "batch statistics" in seen:
        notes.append("batches stayed whole, since BatchNorm normalises by them")
    elif "random draws" in seen:
        notes.append("batches stayed whole, since the forward draws random numbers")
    else:
        notes.append("batches stayed whole")
    if "mixed precision" in seen:
        notes.append("the script trains in mixed precision by itself")
    return tuple(notes)


def _run_elsewhere(before: Sequence[Recording], contents: Contents) -> str | None:
    """Why a command cannot show what a rewrite does: it ran none of the files; None where it ran one."""
    loaded = frozenset().union(*(process.files for process in before))
    if not loaded:
        return None  # killed before it could tell
    here = os.path.realpath(os.curdir)
    if outside := [path for path in contents if os.path.join(here, path) in loaded]:
        return f"runs {outside[0]} by an absolute path or as an installed package, expected a path in this folder"
    if not loaded & contents.keys():
        return f"ran none of the files that would be rewritten ({', '.join(contents)})"
    return None


class _Runner:
    """Runs a command in copies of the current folder."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._folder = os.path.realpath(os.curdir)
        size = _size(self._folder)
        if size > MOST_BYTES:
            raise CannotCompare(
                f"the current folder holds {size / 2**30:.1f} GiB and is copied for every run, expected at most "
                f"{MOST_BYTES / 2**30:.0f} GiB: move data out of it, or run from the folder of the code"
            )

    def run(self, contents: Contents, preset: str | None) -> list[Recording]:
        """What the processes of the command record, with some files rewritten and OOMFIX_PRESET as given."""
        with tempfile.TemporaryDirectory(prefix="oomfix-") as temporary:
            top = os.path.realpath(temporary)
            copy, hook, records = (os.path.join(top, name) for name in ("copy", "hook", "records"))
            self._copy(copy)
            for path, content in contents.items():
                # a link would lead out of the copy
                Path(copy, path).unlink()
                Path(copy, path).write_bytes(content)
            os.mkdir(hook)
            os.mkdir(records)
            Path(hook, "sitecustomize.py").write_text(sitecustomize(hook, records), encoding="utf-8")
            done = subprocess.run(
                self._command,
                shell=True,
                cwd=copy,
                env=self._environment(copy, hook, preset),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode:
                version = "after" if contents else "before"
                last = done.stdout.decode(errors="replace").rstrip().splitlines()[-_LINES_SHOWN:]
                where = f"failed with exit code {done.returncode}, run {version} the rewrite in a copy of this folder"
                raise CannotCompare("\n".join([f"{self._command}: {where}", *(f"  {line}" for line in last)]))
            return [_relative(recording, copy) for recording in read_recordings(records)]

    def _copy(self, copy: str) -> None:
        try:
            shutil.copytree(self._folder, copy, symlinks=True, ignore=_left_out)
        except shutil.Error as error:
            path, _, reason = error.args[0][0]
            raise CannotCompare(f"{path}: cannot be copied: {reason}") from None
        for parent, folders, files in os.walk(copy):
            for name in (*folders, *files):
                link = os.path.join(parent, name)
                if os.path.islink(link) and not _is_in(link, copy):
                    # a link that led out of the folder by ".." would lead elsewhere from here
                    target = os.path.realpath(os.path.join(self._folder, os.path.relpath(link, copy)))
                    os.unlink(link)
                    os.symlink(target, link)

    def _environment(self, copy: str, hook: str, preset: str | None) -> dict[str, str]:
        searched = [
            os.path.join(copy, os.path.relpath(folder, self._folder)) if _is_in(folder, self._folder) else folder
            for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if folder
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([hook, *searched]),
            "PYTHONHASHSEED": str(SEED),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, matrix products need not repeat themselves
        }
        environment.pop("OOMFIX_PRESET", None)
        return environment | ({"OOMFIX_PRESET": preset} if preset else {})


def _left_out(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in _LEFT_OUT or _is_no_file_of_code(os.path.join(folder, name))]


def _is_no_file_of_code(path: str) -> bool:
    """Whether a path is a virtual environment, a socket, a pipe or a device."""
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        return os.path.exists(os.path.join(path, "pyvenv.cfg"))
    return not (stat.S_ISREG(mode) or stat.S_ISLNK(mode))


def _relative(recording: Recording, copy: str) -> Recording:
    """A recording whose files in the copy are named as from there."""
    files = (os.path.relpath(path, copy) if _is_in(path, copy) else path for path in recording.files)
    return recording._replace(files=frozenset(files))


def _size(folder: str) -> int:
    total = 0
    for parent, folders, files in os.walk(folder):
        left_out = _left_out(parent, folders)
        folders[:] = [name for name in folders if name not in left_out]
        total += sum(os.lstat(os.path.join(parent, name)).st_size for name in files)
    return total


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.realpath(path), folder]) == folder
