"""Results of earlier audits, one file per project, so that what did not change is not read again.

A result is keyed by the file's content. To know that the content is the same without reading it, the file's
size, times and inode are kept too; they are not believed where the file was written so shortly before it was
read that a later write could have left them the same (the "racy" entries of git's index).
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from oomfix import __version__
from oomfix.results import Change, FileReport, Located, Silencer

_RACY_NS = 2_000_000_000
"""Two seconds: the coarsest time stamp of a file system in use (FAT)."""

_MAGIC = "oomfix cache"


class State(NamedTuple):
    """What tells a changed file from an unchanged one without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> State:
        """The state in a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class Cache:
    """The results for the files of one project under one target torch version.

    A cache file that cannot be read, is damaged, or was written by another version is as good as empty. Two
    processes may use the same one: each replaces it whole, keeping what it finds there.

    Args:
        folder: where cache files live; made when needed.
        project: the root folder of the project, which names the cache file.
        version: whatever else decides the results: the tool, its rules, the target torch.
    """

    def __init__(self, folder: str, project: str, version: str) -> None:
        self._path = os.path.join(folder, f"{digest(project.encode('utf-8', 'surrogateescape'))}.json")
        self._version = version
        self._now_ns = time.time_ns()
        self._entries = self._load()
        self._changed = False

    def get(self, path: str, state: State, *, parsed: bool) -> FileReport | None:
        """The result for a file whose state is known and believed; with `parsed`, only one that parsed it."""
        entry = self._entries.get(path)
        if entry is None or entry[0] != list(state):
            return None
        return _report(entry[2], parsed)

    def knows(self, path: str) -> bool:
        """Whether reading the file may save analysing it."""
        return path in self._entries

    def get_by_content(self, path: str, state: State, content: str, *, parsed: bool) -> FileReport | None:
        """The result for a file with this digest, whatever its times; its state is believed from now on."""
        entry = self._entries.get(path)
        if entry is None or entry[1] != content:
            return None
        report = _report(entry[2], parsed)
        if report is not None:
            self.put(path, state, content, report)
        return report

    def put(self, path: str, state: State, content: str, report: FileReport) -> None:
        """Keep a result; `state` is that from before the file was read."""
        is_racy = max(state.mtime_ns, state.ctime_ns) > self._now_ns - _RACY_NS
        entry = [None if is_racy else list(state), content, _plain(report)]
        if self._entries.get(path) != entry:
            self._entries[path] = entry
            self._changed = True

    def save(self) -> None:
        """Write the results for the next run. A folder that cannot be written to means a slower next run."""
        if not self._changed:
            return
        entries = self._load() | self._entries
        existing = {path: entry for path, entry in entries.items() if os.path.exists(path)}
        body = json.dumps(existing, separators=(",", ":")).encode()
        # imported here: a run that changes nothing writes nothing
        import tempfile

        folder = os.path.dirname(self._path)
        try:
            os.makedirs(folder, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self._header(body) + body)
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)
        except OSError:
            return

    def _load(self) -> dict[str, list[Any]]:
        try:
            with open(self._path, "rb") as file:
                header = file.readline()
                body = file.read()
        except OSError:
            return {}
        if header != self._header(body):
            return {}
        entries: dict[str, list[Any]] = json.loads(body)
        return entries

    def _header(self, body: bytes) -> bytes:
        return f"{_MAGIC} {self._version} {zlib.crc32(body):08x}\n".encode()


def digest(data: bytes) -> str:
    """A name for a content: 128 bits of BLAKE2b, in hexadecimal."""
    # imported here: a run without a cache needs no digest
    from hashlib import blake2b

    return blake2b(data, digest_size=16).hexdigest()


def cache_folder() -> str:
    """Where cache files live: OOMFIX_CACHE_DIR, else the user's cache folder."""
    folder = os.environ.get("OOMFIX_CACHE_DIR")
    if folder:
        return folder
    from platformdirs import user_cache_dir

    return user_cache_dir("oomfix", appauthor=False)


def tool_version(codes: Sequence[str]) -> str:
    """A word that differs whenever results could: the tool, its very source files, its rules, Python."""
    package = os.path.dirname(os.path.abspath(__file__))
    sources = [
        (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
        for folder in (package, *(os.path.join(package, part) for part in ("script", "rules", "rewrite")))
        for entry in os.scandir(folder)
        if entry.name.endswith(".py")
    ]
    return digest(repr((__version__, sys.version_info[:3], sorted(sources), tuple(codes))).encode())


def _plain(report: FileReport) -> list[Any] | None:
    """A report as lists; None for the many files that hold nothing to analyse."""
    return None if report == FileReport(parsed=False) else list(report)


def _report(plain: list[Any] | None, parsed: bool) -> FileReport | None:
    if plain is None:
        return None if parsed else FileReport(parsed=False)
    findings, loops, errors, silencers, was_parsed, foreign = plain
    if parsed and not was_parsed:
        return None
    return FileReport(
        findings=tuple(_located(row) for row in findings),
        loops=tuple(loops),
        errors=tuple(errors),
        silencers=tuple(Silencer(tuple(codes), problem, _located(row)) for codes, problem, row in silencers),
        parsed=was_parsed,
        foreign=foreign,
    )


def _located(row: list[Any]) -> Located:
    located = Located(*row)
    return located._replace(
        changes=tuple(Change(*change) for change in located.changes),
        context=tuple(located.context),
        fixed=tuple(located.fixed),
        silenced_by=tuple(located.silenced_by),
    )
