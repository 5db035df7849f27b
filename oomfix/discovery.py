"""The Python files and notebooks under the paths of a command line, each once."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

SUFFIXES = (".py", ".ipynb")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "site-packages", "node_modules"})
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


class Found(NamedTuple):
    """A file to audit, its state at the time, and whether the command line names it itself."""

    path: str
    stat: os.stat_result
    named: bool


class _Ignores(NamedTuple):
    """The patterns of one .gitignore, which speak of paths under its folder."""

    folder: str
    patterns: GitIgnoreSpec

    def verdict(self, absolute: str, is_folder: bool) -> bool | None:
        """True: ignored; False: explicitly not; None: no pattern speaks of it."""
        relative = absolute[len(self.folder.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
        return self.patterns.check_file(relative + "/" * is_folder).include


class Discovery:
    """Finds files; remembers what it has seen, so that no link leads to a file or folder twice.

    Attributes:
        problems: path and one plain line for each thing that cannot be audited.
    """

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self._seen: set[tuple[int, int]] = set()

    def find(self, path: str, root: str, exclude: tuple[str, ...] = ()) -> list[Found]:
        """The files that a path of the command line stands for, in the order of their names.

        A named file is always found, whatever its suffix. A named folder is walked: hidden folders, virtual
        environments, `site-packages`, `build` and the like are left out, and what a .gitignore or `exclude`
        names.

        Args:
            path: a file or folder.
            root: the folder that the patterns in `exclude` speak of.
            exclude: patterns as in a .gitignore.
        """
        try:
            state = os.stat(path)
        except OSError as error:
            self.problems.append((path or "''", _why_not(path, error)))
            return []
        if stat.S_ISDIR(state.st_mode):
            return self._walk(path, _patterns(root, exclude))
        if not stat.S_ISREG(state.st_mode):
            self.problems.append((path, f"{_kind(state)}, expected a file or folder"))
            return []
        return [Found(path, state, named=True)] if self.is_new(state) else []

    def _walk(self, path: str, excludes: list[_Ignores]) -> list[Found]:
        known_problems = len(self.problems)
        walk = _Walk(self, path, excludes)
        walk.run()
        if not walk.found and not walk.repeated and len(self.problems) == known_problems:
            left_out = f" ({walk.left_out} left out as ignored, hidden or generated)" if walk.left_out else ""
            self.problems.append((path, f"no Python files or notebooks in this folder{left_out}"))
        return sorted(walk.found, key=lambda found: found.path.split(os.sep))

    def is_new(self, state: os.stat_result) -> bool:
        """Whether a file or folder is met for the first time."""
        identity = (state.st_dev, state.st_ino)
        if identity in self._seen:
            return False
        self._seen.add(identity)
        return True


class _Walk:
    """One folder walked from top to bottom; links are followed last, so that files keep their real names."""

    def __init__(self, discovery: Discovery, path: str, excludes: list[_Ignores]) -> None:
        self.found: list[Found] = []
        self.left_out = 0
        self.repeated = 0
        self._discovery = discovery
        self._excludes = excludes
        top = os.path.normpath(path)
        self._shown, self._top = ("" if top == "." else top), os.path.abspath(path)
        self._folders = [(self._top, _ignores_above(self._top))]
        self._links: list[tuple[str, list[_Ignores]]] = []

    def run(self) -> None:
        while self._folders or self._links:
            if self._folders:
                self._visit(*self._folders.pop())
            else:
                self._follow(*self._links.pop(0))

    def _visit(self, folder: str, ignores: list[_Ignores]) -> None:
        try:
            if not self._discovery.is_new(os.stat(folder)):
                self.repeated += 1
                return
            with os.scandir(folder) as entries:
                listed = list(entries)
        except OSError as error:
            self._discovery.problems.append((self._name(folder), _why_not(folder, error)))
            return
        if any(entry.name == ".gitignore" for entry in listed):
            ignores = [*ignores, *_read_gitignore(folder)]
        for entry in listed:
            if entry.is_symlink():
                self._links.append((entry.path, ignores))
            else:
                self._enter(entry.path, entry.is_dir(), ignores)

    def _follow(self, link: str, ignores: list[_Ignores]) -> None:
        self._enter(link, os.path.isdir(link), ignores)

    def _enter(self, path: str, is_folder: bool, ignores: list[_Ignores]) -> None:
        if is_folder:
            if _is_skipped(path) or self._is_ignored(path, True, ignores):
                self.left_out += 1
            else:
                self._folders.append((path, ignores))
        elif path.endswith(SUFFIXES) and not os.path.basename(path).startswith(".#"):  # Emacs' dangling locks
            if self._is_ignored(path, False, ignores):
                self.left_out += 1
            else:
                self._add(path)

    def _add(self, path: str) -> None:
        try:
            state = os.stat(path)
        except OSError as error:
            self._discovery.problems.append((self._name(path), _why_not(path, error)))
            return
        if not stat.S_ISREG(state.st_mode):
            self._discovery.problems.append((self._name(path), f"{_kind(state)}, expected a file"))
        elif self._discovery.is_new(state):
            self.found.append(Found(self._name(path), state, named=False))
        else:
            self.repeated += 1

    def _is_ignored(self, path: str, is_folder: bool, ignores: list[_Ignores]) -> bool:
        if any(exclude.verdict(path, is_folder) for exclude in self._excludes):
            return True
        verdicts = (ignore.verdict(path, is_folder) for ignore in reversed(ignores))
        return next((verdict for verdict in verdicts if verdict is not None), False)

    def _name(self, absolute: str) -> str:
        """A path as the command line would name it."""
        below = absolute[len(self._top) :].lstrip(os.sep)
        return os.path.join(self._shown, below) if below else self._shown or "."


def _is_skipped(folder: str) -> bool:
    name = os.path.basename(folder)
    return name.startswith(".") or name in _SKIPPED_FOLDERS or os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _ignores_above(top: str) -> list[_Ignores]:
    """The .gitignore files above a folder, in its repository; none if they ignore it, since it was named."""
    folders = list(_parents_in_repository(top))
    ignores = [ignore for folder in reversed(folders) for ignore in _read_gitignore(folder)]
    inside = [top, *folders[:-1]]
    for ignore in reversed(ignores):
        if any(ignore.verdict(path, True) for path in inside if path != ignore.folder and _is_below(path, ignore)):
            return []
    return ignores


def _is_below(path: str, ignore: _Ignores) -> bool:
    return path.startswith(ignore.folder.rstrip(os.sep) + os.sep)


def _parents_in_repository(folder: str) -> Iterator[str]:
    """The folders above, up to the one that holds .git; none where none does, or the folder itself."""
    parents = []
    while not os.path.exists(os.path.join(folder, ".git")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return
        parents.append(parent)
        folder = parent
    yield from parents


def _read_gitignore(folder: str) -> list[_Ignores]:
    try:
        with open(os.path.join(folder, ".gitignore"), encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:  # a .gitignore that is missing, a folder or unreadable ignores nothing, as in git
        return []
    return _patterns(folder, tuple(lines))


def _patterns(folder: str, lines: tuple[str, ...]) -> list[_Ignores]:
    if not any(line.strip() and not line.startswith("#") for line in lines):
        return []
    # imported here: a run over named files needs no patterns
    from pathspec import GitIgnoreSpec

    try:
        return [_Ignores(folder, GitIgnoreSpec.from_lines(lines))]
    except (ValueError, re.error):  # git passes over a line that is no pattern
        return [ignore for line in lines if _is_pattern(line) for ignore in _patterns(folder, (line,))]


def _is_pattern(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


def _kind(state: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(state.st_mode), "a special file")


def _why_not(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            return f"a link to {os.readlink(path)}, which does not exist"
        return "no such file or folder"
    return f"cannot read: {error.strerror}"
