"""Known findings, kept in a file so that only new ones are reported.

A finding is known by its path, its code and the text of its line: edits above it do not bring it back, a
change of the line does. Of two equal lines in a file with two known findings, a third is new.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from oomfix.results import Located

_VERSION = 1
_Key = tuple[str, str, str]
_EXPECTED = 'expected {"version": 1, "findings": [...]} as `--write-baseline` writes it'


class BaselineError(Exception):
    """A baseline that cannot be read or written; the message is one plain line that says why.

    Attributes:
        path: the baseline.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class Baseline:
    """The findings of a baseline file, each good for as many occurrences as were written.

    Raises:
        BaselineError: the file is no baseline, or cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._folder = os.path.dirname(os.path.abspath(path))
        try:
            with open(path, encoding="utf-8-sig") as file:  # some editors begin a file with a byte order mark
                self._left = _counts(json.load(file))
        except OSError as error:
            raise BaselineError(path, f"cannot read this baseline: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise BaselineError(path, f"not a baseline: line {error.lineno} is not JSON: {error.msg}") from None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise BaselineError(path, f"not a baseline, {_EXPECTED}") from None

    def new(self, path: str, findings: Iterable[Located]) -> list[Located]:
        """The findings of a file that are not known. Each known one is used up by what it matches."""
        fresh = []
        for finding in findings:
            key = _key(self._folder, path, finding)
            if self._left[key] > 0:
                self._left[key] -= 1
            else:
                fresh.append(finding)
        return fresh


def write_baseline(path: str, findings: Iterable[tuple[str, Located]]) -> int:
    """Make `path` the baseline of these findings (their file's path and they); returns how many there are.

    Raises:
        BaselineError: the file cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    counts = Counter(_key(folder, file, finding) for file, finding in findings)
    rows = [
        {"path": file, "code": code, "text": text, "count": count}
        for (file, code, text), count in sorted(counts.items())
    ]
    text = json.dumps({"version": _VERSION, "findings": rows}, indent=2) + "\n"
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as out:
            out.write(text)
    except OSError as error:
        raise BaselineError(path, f"cannot write this baseline: {error.strerror}") from None
    return counts.total()


def _key(folder: str, path: str, finding: Located) -> _Key:
    # relative to the baseline itself, so that it holds wherever the command runs
    relative = os.path.relpath(os.path.abspath(path), folder).replace(os.sep, "/")
    return relative, finding.code, finding.text


def _counts(content: Any) -> Counter[_Key]:
    if content["version"] != _VERSION:
        raise ValueError("a baseline of another version")
    return Counter({(row["path"], row["code"], row["text"]): int(row["count"]) for row in content["findings"]})
