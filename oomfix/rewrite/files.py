"""`oomfix apply` over paths: finding files, reading them, writing what changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from oomfix.config import Configuration, Flags
from oomfix.discovery import Discovery
from oomfix.rewrite.apply import Applied, LoopOutcome, Options, apply_to
from oomfix.rewrite.local import Fixed
from oomfix.rewrite.writing import CannotWrite, write_python
from oomfix.rules.base import Rule
from oomfix.script import Script
from oomfix.source import Source, Unreadable


class FileOutcome(NamedTuple):
    """What became of one file.

    Attributes:
        path: as it was given or found.
        before, after: its text; the same where nothing changed.
        loops: its training loops.
        fixed: the local fixes made.
        errors: why it was left as it was, one plain line each.
        backup: where its old content is kept.
    """

    path: str
    before: str = ""
    after: str = ""
    loops: tuple[LoopOutcome, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    errors: tuple[str, ...] = ()
    backup: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the rewritten text is another one."""
        return self.before != self.after


class Rewriter:
    """Rewrites files.

    Args:
        rules: whose local fixes to make.
        options: what to do.
        backup: keep old files.
        writes: False only says what would be done.
    """

    def __init__(self, rules: Sequence[Rule], options: Options, *, backup: bool = False, writes: bool = True) -> None:
        self.writes = writes
        self._rules = rules
        self._options = options
        self._backup = backup
        self._configuration = Configuration(Flags(None, None, None, None, None), [rule.code for rule in rules])

    @property
    def preset(self) -> str:
        """The preset that files are rewritten for."""
        return self._options.preset

    def rewrite(self, paths: Sequence[str], *, only_training: bool = False) -> list[FileOutcome]:
        """Rewrite every Python file under the paths; a file that fails is left as it is, and the others go on.

        Args:
            only_training: pass over files without a training loop.
        """
        discovery = Discovery()
        outcomes = []
        for path in dict.fromkeys(paths):
            settings = self._configuration.settings(path)
            for found in discovery.find(path, settings.root, settings.exclude):
                if found.path.endswith(".ipynb") and not found.named:
                    continue
                options = self._options._replace(target_torch=settings.target_torch)
                outcome = self._rewrite(found.path, options)
                if not only_training or outcome.loops:
                    outcomes.append(outcome)
        problems = [*self._configuration.problems, *discovery.problems]
        return outcomes + [FileOutcome(path, errors=(message,)) for path, message in problems]

    def training_files(self, folder: str) -> list[str]:
        """The files under a folder that hold a training loop, by name."""
        settings = self._configuration.settings(folder)
        found = Discovery().find(folder, settings.root, settings.exclude)
        return [file.path for file in found if file.path.endswith(".py") and _trains(file.path)]

    def _rewrite(self, path: str, options: Options) -> FileOutcome:
        if path.endswith(".ipynb"):
            return FileOutcome(path, errors=("notebooks are not rewritten; export it (jupyter nbconvert --to script)",))
        try:
            data = _read(path)
            source = Source.from_bytes(path, data)
            applied = apply_to(source, self._rules, options)
            return self._written(path, data, source, applied)
        except Unreadable as problem:
            return FileOutcome(path, errors=(str(problem),))
        except OSError as error:
            return FileOutcome(path, errors=(f"cannot read: {error.strerror}",))
        except RecursionError:
            return FileOutcome(path, errors=("cannot analyse: nested too deeply",))

    def _written(self, path: str, data: bytes, source: Source, applied: Applied) -> FileOutcome:
        outcome = FileOutcome(path, source.text, applied.text, applied.loops, applied.fixed)
        if not outcome.changed:
            return outcome
        if source.encode(source.text) != data:
            message = f"its {source.encoding} text does not come back byte for byte; save it as UTF-8"
            return FileOutcome(path, source.text, source.text, errors=(message,))
        try:
            new = source.encode(applied.text)
            if not self.writes:
                return outcome
            return outcome._replace(backup=write_python(path, new, backup=self._backup).backup)
        except (CannotWrite, UnicodeEncodeError) as error:
            return FileOutcome(path, source.text, source.text, errors=(str(error),))


def _trains(path: str) -> bool:
    try:
        data = _read(path)
        return b"backward" in data and bool(Script.read(Source.from_bytes(path, data)).loops)
    except (OSError, Unreadable, RecursionError):  # told when the file is named
        return False


def _read(path: str) -> bytes:
    with open(os.fspath(path), "rb") as file:
        return file.read()
