"""What to look for and when to fail: flags, `[tool.oomfix]` in the nearest pyproject.toml, defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from oomfix.audit import TorchVersion
from oomfix.spelling import did_you_mean
from oomfix.target import parse_version, target_of

if TYPE_CHECKING:
    from oomfix.own_presets import Chosen

FAIL_ON = ("error", "warning", "note", "never")


class Settings(NamedTuple):
    """How one path of the command line is audited.

    Attributes:
        root: the folder of its project: the nearest with a pyproject.toml or a .git, else its own folder.
        select: codes or prefixes to report; empty for all.
        ignore: codes or prefixes not to report.
        exclude: patterns, as in a .gitignore in `root`, of files that a walk leaves out.
        fail_on: the least severity that makes the exit status 1, or "never".
        target_torch: the oldest torch that the scripts must run on; None: unknown.
        baseline: the file of known findings, or None.
        presets: presets of its own by name, for `oomfix apply`.
    """

    root: str
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fail_on: str = "warning"
    target_torch: TorchVersion | None = None
    baseline: str | None = None
    presets: Mapping[str, Chosen] = MappingProxyType({})


class Flags(NamedTuple):
    """What the command line says; None where it says nothing."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    fail_on: str | None = None
    target_torch: TorchVersion | None = None
    baseline: str | None = None


class Configuration:
    """The settings of every path of a run; each pyproject.toml is read once, its problems are told once.

    Args:
        flags: what the command line says; it wins.
        codes: every code that `select` and `ignore` may name.
        use_baselines: whether known findings are left out.

    Attributes:
        problems: path and one plain line for each thing wrong in a pyproject.toml.
    """

    def __init__(self, flags: Flags, codes: Sequence[str], *, use_baselines: bool = True) -> None:
        self.codes = codes
        self.problems: list[tuple[str, str]] = []
        self._flags = {name: value for name, value in flags._asdict().items() if value is not None}
        self._use_baselines = use_baselines
        self._of_folder: dict[str, Settings] = {}
        self._in_pyproject: dict[str, dict[str, Any] | None] = {}

    def settings(self, path: str) -> Settings:
        """The settings for a file or folder."""
        absolute = os.path.abspath(path)
        folder = absolute if os.path.isdir(absolute) else os.path.dirname(absolute)
        if folder not in self._of_folder:
            self._of_folder[folder] = self._read(folder)
        return self._of_folder[folder]

    def _read(self, folder: str) -> Settings:
        settings = Settings(root=_project_root(folder))
        for parent in _upwards(folder):
            values = self._values(parent)
            if values is not None:
                settings = settings._replace(root=parent, **values)
                break
        settings = settings._replace(**self._flags)
        if not self._use_baselines:
            settings = settings._replace(baseline=None)
        if settings.target_torch is None:
            settings = settings._replace(target_torch=target_of(folder))
        return settings

    def _values(self, folder: str) -> dict[str, Any] | None:
        """What `[tool.oomfix]` in a folder's pyproject.toml sets; None where there is none that can be read."""
        if folder not in self._in_pyproject:
            table = self._load(os.path.join(folder, "pyproject.toml"))
            self._in_pyproject[folder] = None if table is None else self._checked(folder, table)
        return self._in_pyproject[folder]

    def _load(self, path: str) -> dict[str, Any] | None:
        if not os.path.isfile(path):
            return None
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib  # type: ignore[import-not-found]
        try:
            with open(path, "rb") as file:
                document = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            self._problem(path, f"not TOML: {error}")
            return None
        except OSError as error:
            self._problem(path, f"cannot read: {error.strerror}")
            return None
        tool = document.get("tool")
        if not isinstance(tool, dict) or "oomfix" not in tool:
            return None
        table = tool["oomfix"]
        if not isinstance(table, dict):
            self._problem(path, f"[tool.oomfix]: got {table!r}, expected a table")
            return None
        return table

    def _checked(self, folder: str, table: dict[str, Any]) -> dict[str, Any]:
        path = os.path.join(folder, "pyproject.toml")
        checked: dict[str, Any] = {}
        for key, value in table.items():
            if key not in _KEYS:
                hint = did_you_mean(key, _KEYS)
                self._problem(path, f"[tool.oomfix]: unknown key {key!r}{hint}")
                continue
            name = key.replace("-", "_")
            try:
                checked[name] = _KEYS[key](value, self.codes)
            except ValueError as error:
                # a flag makes the faulty line harmless, but not right
                self._problem(path, f"[tool.oomfix] {key}: {error}")
        if "baseline" in checked:
            checked["baseline"] = os.path.join(folder, checked["baseline"])
        return checked

    def _problem(self, path: str, message: str) -> None:
        self.problems.append((os.path.relpath(path), " ".join(message.split())))


def check_codes(given: Sequence[str], codes: Sequence[str]) -> tuple[str, ...]:
    """Codes or prefixes of codes, in capitals.

    Raises:
        ValueError: one of them is the start of no code.
    """
    capitals = tuple(code.strip().upper() for code in given)
    for written, code in zip(given, capitals, strict=True):
        if not code or not any(known.startswith(code) for known in codes):
            raise ValueError(f"{written.strip()!r} is no rule and no prefix of one{did_you_mean(code, codes)}")
    return capitals


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"got {value!r}, expected a list of strings")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"got {value!r}, expected a string")
    return value


def _fail_on(value: object) -> str:
    if value not in FAIL_ON:
        raise ValueError(f"got {value!r}, expected one of {', '.join(FAIL_ON)}")
    return str(value)


def _presets(value: object) -> dict[str, Chosen]:
    # imported here: few projects have presets of their own
    from oomfix.own_presets import read_presets

    return read_presets(value)


_KEYS: dict[str, Callable[[object, Sequence[str]], object]] = {
    "select": lambda value, codes: check_codes(_texts(value), codes),
    "ignore": lambda value, codes: check_codes(_texts(value), codes),
    "exclude": lambda value, codes: tuple(_texts(value)),
    "fail-on": lambda value, codes: _fail_on(value),
    "target-torch": lambda value, codes: parse_version(_text(value)),
    "baseline": lambda value, codes: _text(value),
    "presets": lambda value, codes: _presets(value),
}


def _upwards(folder: str) -> Iterator[str]:
    yield folder
    while (parent := os.path.dirname(folder)) != folder:
        yield parent
        folder = parent


def _project_root(folder: str) -> str:
    for parent in _upwards(folder):
        if any(os.path.exists(os.path.join(parent, name)) for name in (".git", "pyproject.toml")):
            return parent
    return folder
