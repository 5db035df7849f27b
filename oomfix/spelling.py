"""Words in messages: numbers of things, and the nearest known name to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`, or with a plural of its own `2 fixes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing where none is near."""
    # imported here: only a mistake needs it
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
