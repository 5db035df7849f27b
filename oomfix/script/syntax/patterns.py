"""Regular expressions that are compiled when they are first used: a run uses half of them, and each takes its time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property


class Pattern:
    """A regular expression, with the methods of `re.Pattern`, each looked up once.

    Args:
        pattern: as for `re.compile`.
        flags: as for `re.compile`.
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern = pattern
        self._flags = flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, self._flags)

    @cached_property
    def search(self) -> Callable[..., re.Match[str] | None]:
        """The first match anywhere in a text."""
        return self._compiled.search

    @cached_property
    def match(self) -> Callable[..., re.Match[str] | None]:
        """The match at the start of a text."""
        return self._compiled.match

    @cached_property
    def fullmatch(self) -> Callable[..., re.Match[str] | None]:
        """The match of a whole text."""
        return self._compiled.fullmatch

    @cached_property
    def findall(self) -> Callable[[str], list[str]]:
        """All that matches in a text."""
        return self._compiled.findall

    @cached_property
    def finditer(self) -> Callable[[str], Iterator[re.Match[str]]]:
        """All matches in a text."""
        return self._compiled.finditer

    @cached_property
    def sub(self) -> Callable[..., str]:
        """A text with all matches replaced."""
        return self._compiled.sub
