"""A bar on standard error, for runs that take long, where that is a terminal."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import click

_SHOW_AFTER_S = 1.0


class Progress:
    """Context around a run; shows a bar once it has taken a second.

    Args:
        label: what is done to the files.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._bar: Any = None
        self._open: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)

    def show(self, done: int, total: int) -> None:
        """Draw that so many files are done of so many."""
        if self._open is None:
            if time.monotonic() - self._start < _SHOW_AFTER_S or not sys.stderr.isatty():
                return
            self._open = click.progressbar(length=total, label=self._label, file=sys.stderr)
            self._bar = self._open.__enter__()
        self._bar.update(done - self._bar.pos)
