"""`oomfix apply` over paths: finding files, reading them, writing what changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from oomfix.config import Configuration, Flags
from oomfix.discovery import Discovery, Found
from oomfix.own_presets import Chosen, choose
from oomfix.parsing import ForeignLanguage, Unreadable, rare_garbage_collection
from oomfix.rewrite.apply import Applied, Unfixed, apply_to
from oomfix.rewrite.cells import NotebookText, in_cells
from oomfix.rewrite.dataflow.step_functions import training_loops
from oomfix.rewrite.facts.verdict import LoopOutcome
from oomfix.rewrite.loop_attempts import Fixed
from oomfix.rewrite.notebook_json import CannotRestore, replace_sources
from oomfix.rewrite.options import Options
from oomfix.rewrite.text.edits import EditsBreakSource, EditsOverlap
from oomfix.rewrite.writing import CannotWrite, write_source
from oomfix.rules.base import Rule, holds
from oomfix.script import Script
from oomfix.source import Source

_IN_EVERY_LOOP = b"backward"


class Change(NamedTuple):
    """A text that was rewritten: a whole file, or (`cell`: its 1-based number) the source of a notebook's cell."""

    before: str
    after: str
    cell: int | None = None


class FileOutcome(NamedTuple):
    """What became of one file.

    Attributes:
        path: as it was given or found.
        changes: what is another text; none where nothing changed.
        data: what the file held when it was read.
        content: what it is to hold; None where nothing changed.
        loops: its training loops, and functions that are the iteration of one.
        fixed: what was fixed.
        unfixed: what is left to be fixed by hand.
        errors: why it, or a cell of it, was left as it was, one plain line each.
        notes: what else the user should know of it, one plain line each.
    """

    path: str
    changes: tuple[Change, ...] = ()
    data: bytes = b""
    content: bytes | None = None
    loops: tuple[LoopOutcome, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    unfixed: tuple[Unfixed, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the rewritten file is another one."""
        return self.content is not None


def contents_of(outcomes: Sequence[FileOutcome]) -> dict[str, bytes]:
    """By real path, what rewritten files are to hold."""
    return {os.path.realpath(found.path): found.content for found in outcomes if found.content is not None}


class Rewriter:
    """Says what files are to hold; writes nothing.

    Args:
        rules: whose local fixes to make.
        options: what to do; the preset may be one of a file's own pyproject.toml.
    """

    def __init__(self, rules: Sequence[Rule], options: Options) -> None:
        self._rules = rules
        self._options = options
        self._configuration = Configuration(Flags(None, None, None, None, None), [rule.code for rule in rules])

    @property
    def preset(self) -> str:
        """The name of the preset that files are rewritten for."""
        return self._options.preset

    def chosen(self, path: str) -> Chosen:
        """The preset that is written into a file, with the fields that are changed.

        Raises:
            ValueError: neither oomfix nor the file's pyproject.toml has a preset of this name, or a field is wrong.
        """
        settings = self._configuration.settings(path)
        try:
            return choose(self._options.preset, settings.presets, self._options.overrides)
        except ValueError as error:
            # what is wrong in a pyproject.toml may be why the name is not known
            problems = "".join(f"; {path}: {message}" for path, message in self._configuration.problems)
            raise ValueError(f"{error}{problems}") from None

    def rewrite(
        self,
        paths: Sequence[str],
        *,
        only_training: bool = False,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> list[FileOutcome]:
        """What becomes of every Python file and notebook under the paths.

        Args:
            only_training: pass over files without a training loop.
            progress: told how many files are done of how many.

        Raises:
            ValueError: a path's project has no preset of the wanted name.
        """
        discovery = Discovery()
        jobs = []
        for path in dict.fromkeys(paths):
            base, overrides = self.chosen(path)
            settings = self._configuration.settings(path)
            options = self._options._replace(preset=base, overrides=overrides, target_torch=settings.target_torch)
            jobs += [(found, options) for found in discovery.find(path, settings.root, settings.exclude)]
        outcomes = []
        for done, (found, options) in enumerate(jobs, start=1):
            outcome = self._rewrite(found, options)
            if outcome is not None and (not only_training or outcome.loops):
                outcomes.append(outcome)
            progress(done, len(jobs))
        problems = [*self._configuration.problems, *discovery.problems]
        return outcomes + [FileOutcome(path, errors=(message,)) for path, message in problems]

    def training_files(self) -> list[str]:
        """The Python files under the current folder that hold a training loop or its iteration, by name."""
        settings = self._configuration.settings(".")
        found = Discovery().find(".", settings.root, settings.exclude)
        return [file.path for file in found if file.path.endswith(".py") and _trains(file.path)]

    def _rewrite(self, found: Found, options: Options) -> FileOutcome | None:
        """What became of a file; None for a notebook in another language that nobody named."""
        path = found.path
        try:
            data = _read(path)
            rewrite = _notebook if path.endswith(".ipynb") else _python
            with rare_garbage_collection():
                return rewrite(path, data, self._rules, options)
        except ForeignLanguage as problem:
            return FileOutcome(path, errors=(str(problem),)) if found.named else None
        except (Unreadable, CannotRestore, UnicodeEncodeError) as problem:
            return FileOutcome(path, errors=(str(problem),))
        except EditsOverlap:
            return FileOutcome(path, errors=("left as it is: its changes get in each other's way; please report it",))
        except EditsBreakSource as problem:
            said = f"left as it is: the result would be no Python ({problem}); please report it"
            return FileOutcome(path, errors=(said,))
        except OSError as error:
            return FileOutcome(path, errors=(f"cannot read: {error.strerror}",))
        except RecursionError:
            return FileOutcome(path, errors=("cannot analyse: nested too deeply",))


def write(outcomes: Sequence[FileOutcome], *, backup: bool = False) -> list[FileOutcome]:
    """Give files their new content; one that cannot be written stays, says why, and the others go on.

    Args:
        outcomes: what becomes of the files.
        backup: keep old files.
    """
    return [outcome if outcome.content is None else _written(outcome, outcome.content, backup) for outcome in outcomes]


def _written(outcome: FileOutcome, content: bytes, backup: bool) -> FileOutcome:
    try:
        written = write_source(outcome.path, content, expected=outcome.data, backup=backup)
    except CannotWrite as problem:
        return FileOutcome(outcome.path, errors=(str(problem),))
    return outcome._replace(notes=(*outcome.notes, *written.notes))


def _python(path: str, data: bytes, rules: Sequence[Rule], options: Options) -> FileOutcome:
    source = Source.from_bytes(path, data)
    if not any(holds(data, need) for need in (_IN_EVERY_LOOP, *(need for rule in rules for need in rule.needs))):
        return FileOutcome(path)
    applied = apply_to(source, rules, options)
    if applied.text == source.text:
        return _outcome(path, applied)
    if source.encode(source.text) != data:
        raise Unreadable(f"its {source.encoding} text does not come back byte for byte; save it as UTF-8")
    changes = (Change(source.text, applied.text),)
    return _outcome(path, applied)._replace(changes=changes, data=data, content=source.encode(applied.text))


def _notebook(path: str, data: bytes, rules: Sequence[Rule], options: Options) -> FileOutcome:
    notebook = NotebookText(path, data)
    applied = apply_to(notebook.source, rules, options)
    outcome = _outcome(path, applied)
    loops = [in_cells(loop, notebook) for loop in applied.loops]
    fixed = tuple(_in_cell(one, notebook) for one in applied.fixed)
    unfixed = tuple(_in_cell(one, notebook) for one in applied.unfixed)
    outcome = outcome._replace(loops=tuple(loops), fixed=fixed, unfixed=unfixed, errors=notebook.problems)
    if not (changed := notebook.changes(applied.text)):
        return outcome
    content = replace_sources(data, {change.number: change.after for change in changed})
    changes = tuple(Change(change.before, change.after, change.number) for change in changed)
    return outcome._replace(changes=changes, data=data, content=content)


def _outcome(path: str, applied: Applied) -> FileOutcome:
    return FileOutcome(path, loops=applied.loops, fixed=applied.fixed, unfixed=applied.unfixed)


_OfOneLine = TypeVar("_OfOneLine", Fixed, Unfixed)


def _in_cell(found: _OfOneLine, notebook: NotebookText) -> _OfOneLine:
    cell, line = notebook.locate(found.line)
    return found._replace(cell=cell, line=line)


def _trains(path: str) -> bool:
    try:
        data = _read(path)
        return _IN_EVERY_LOOP in data and bool(training_loops(Script.read(Source.from_bytes(path, data))))
    except (OSError, Unreadable, RecursionError):  # told when the file is named
        return False


def _read(path: str) -> bytes:
    with open(os.fspath(path), "rb") as file:
        return file.read()
