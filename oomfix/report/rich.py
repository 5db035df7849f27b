"""Findings for people: a frame of code for each, in colour on a terminal, and a summary."""

from __future__ import annotations

import os
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TextIO

from oomfix.report import SEVERITIES, Report, place, printable
from oomfix.results import Located
from oomfix.spelling import counted

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_TAB = 4
_MOST_FIXED_LINES = 3
_MOST_PATHS = 3  # in one command


class Span(NamedTuple):
    """A piece of a line and the rich style it has on a terminal."""

    text: str
    style: str = ""


Line = list[Span]


def write(report: Report, stream: TextIO, *, terminal: bool) -> None:
    """Write the report: on a terminal in its width and in colour (unless NO_COLOR is set), else plain."""
    if terminal:
        # imported here: nothing but a terminal needs it
        from rich.console import Console

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        for line in layout(report, console.width):
            _print(console, line)
    else:
        for line in layout(report, None):
            stream.write("".join(span.text for span in line).rstrip() + "\n")


def _print(console: Console, line: Line) -> None:
    from rich.text import Text

    text = Text.assemble(*((span.text, span.style) for span in line))
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


def layout(report: Report, width: int | None) -> Iterator[Line]:
    """The lines of the report, none wider than `width` columns where that is possible; None: no limit."""
    for path, finding in report.findings():
        yield from _headline(path, finding, width)
        yield from _frame(finding, width)
        yield from _fix(finding, width)
        yield []
    for line in _summary(report):
        yield from _wrapped(line, width)


def _headline(path: str, finding: Located, width: int | None) -> Iterator[Line]:
    style = _STYLES[finding.severity]
    head = [Span(place(path, finding), "bold"), Span("  "), Span(finding.code, style), Span("  ")]
    head += [Span(finding.severity, style), Span("  "), Span(printable(finding.message))]
    return _wrapped(head, width)


def _wrapped(line: Line, width: int | None) -> Iterator[Line]:
    """The line, its last span broken between words where it passes the width, the rest indented."""
    *head, tail = line
    used = sum(_columns(span.text) for span in head)
    if width is None or used + _columns(tail.text) <= width:
        yield line
        return
    words = tail.text.split(" ")
    first: list[str] = []
    while words and used + _columns(" ".join([*first, words[0]])) <= width:
        first.append(words.pop(0))
    yield [*head, Span(" ".join(first), tail.style)]
    indent = " " * 4
    rest = " ".join(words).strip()
    for piece in textwrap.wrap(rest, max(width, 20), initial_indent=indent, subsequent_indent=indent):
        yield [Span(piece, tail.style)]


def _frame(finding: Located, width: int | None) -> Iterator[Line]:
    last_line = finding.context_line + len(finding.context) - 1
    gutter = len(str(last_line)) + 4
    shift, room = _window(finding, None if width is None else max(width - gutter - 3, 10))
    style = _STYLES[finding.severity]
    for number, text in enumerate(finding.context, start=finding.context_line):
        is_it = number == finding.line
        mark = Span("  > " if is_it else "    ", style)
        # the lines around it say where it stands, and that by their beginnings
        code = _cut(_shown(text), shift if is_it else 0, room)
        yield [mark, Span(f"{number:>{gutter - 4}} | ", "dim"), Span(code, "" if is_it else "dim")]
        if is_it:
            start, end = _underlined(finding)
            carets = _cut(" " * start + "^" * max(end - start, 1), shift, room, mark="")
            yield [Span(" " * gutter + " | ", "dim"), Span(carets, style)]


def _window(finding: Located, room: int | None) -> tuple[int, int | None]:
    """How many columns to leave out at the left so that the finding is seen, and how many to show."""
    return (0, None) if room is None else (_shift(*_underlined(finding), room), room)


def _shift(start: int, end: int, room: int) -> int:
    """How many columns to leave out at the left so that what stands from `start` to `end` is seen."""
    return 0 if min(end, start + room // 2) < room else start - room // 3


def _underlined(finding: Located) -> tuple[int, int]:
    """The columns of the frame, from 0, that are underlined: of a span over several lines, its first line."""
    text = finding.context[finding.line - finding.context_line]
    end = finding.end_column - 1 if finding.end_line == finding.line else len(text.rstrip())
    return _columns(_shown(text[: finding.column - 1])), _columns(_shown(text[:end]))


def _shown(text: str) -> str:
    return printable(text.expandtabs(_TAB))


def _cut(text: str, shift: int, room: int | None, mark: str = "…") -> str:
    """At most `room` columns of a text, from `shift` on, with a mark where something is left out."""
    if room is None or (shift == 0 and _columns(text) <= room):
        return text
    shown, column = "", 0
    for char in text:
        if column >= shift and column + _columns(char) <= shift + room - len(mark):
            shown += char
        column += _columns(char)
    if shift and shown:
        shown = (mark or " ") + shown[1:]
    return shown + mark if column > shift + room - len(mark) else shown


def _columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _fix(finding: Located, width: int | None) -> Iterator[Line]:
    if finding.fix != "local":
        return
    if not finding.fixed:
        yield [Span("  fix: ", "bold green"), Span("remove it")]
        return
    head = f"  fix{_elsewhere(finding)}: "
    for number, text in enumerate(finding.fixed[:_MOST_FIXED_LINES]):
        label = head if number == 0 else " " * len(head)
        room = None if width is None else max(width - len(label), 10)
        shift = 0 if room is None else _shift(*_changed(_shown(text), finding.context), room)
        yield [Span(label, "bold green"), Span(_cut(_shown(text), shift, room), "green")]
    more = len(finding.fixed) - _MOST_FIXED_LINES
    if more > 0:
        yield [Span(f"{' ' * len(head)}and {counted(more, 'more line')}", "dim")]


def _elsewhere(finding: Located) -> str:
    """Where a fix stands that is not at the finding, such as a decorator of the function around it."""
    if any(change.line <= finding.end_line and change.end_line >= finding.line for change in finding.changes):
        return ""
    return f" at line {min(change.line for change in finding.changes)}"


def _changed(text: str, before: Sequence[str]) -> tuple[int, int]:
    """The columns of a fixed line, from 0, from where it differs from the line before that is most like it."""
    alike = (
        takewhile(lambda pair: pair[0] == pair[1], zip(text, _shown(line).strip(), strict=False)) for line in before
    )
    common = max((sum(1 for _ in pairs) for pairs in alike), default=0)
    return _columns(text[:common]), _columns(text)


def _summary(report: Report) -> Iterator[Line]:
    """The last lines: how much was found, where, what shows or makes the fixes, and what explains the worst."""
    files = [file for file in report.files if not file.errors or file.findings or file.loops]
    loops = sum(len(file.loops) for file in report.files)
    read = f"{counted(len(files), 'file')} with {counted(loops, 'training loop')}"
    unread = len({path for path, _ in report.errors()})
    known = sum(file.known for file in report.files)
    note = f"; {known} known" if known else ""
    note += f"; {counted(unread, 'path')} not audited in full" if unread else ""
    if not files:
        yield [Span("nothing could be audited" if unread else "nothing to audit")]
        return
    counts = report.counts()
    total = counts.total()
    if not total:
        yield [Span(f"no {'new ' if known else ''}findings in {read}{note}")]
        return
    found = ", ".join(counted(counts[kind], kind) for kind in SEVERITIES if counts[kind])
    fixed = sum(1 for _, finding in report.findings() if finding.fix == "local")
    yield [Span(f"{found} in {read}; {fixed} of {total} with a fix shown{note}")]
    if paths := _fixed_by_apply(report):
        # a command is never broken, so that it can be copied
        yield [Span(f"`oomfix apply --preset 16gb --diff {paths}`"), Span(" shows what it would change")]
    # of equally severe findings, what leaks memory comes first: codes are in that order
    _, worst = min((SEVERITIES.index(finding.severity), finding.code) for _, finding in report.findings())
    yield [Span(f"`oomfix explain {worst}`"), Span(" says why")]


def _fixed_by_apply(report: Report) -> str:
    """What to give `oomfix apply`: the few files with findings that it fixes, or the folder of many, or nothing.

    It leaves notes as they are, and cannot rewrite standard input.
    """
    # imported here: only this line needs it
    from shlex import quote

    paths = [
        file.path
        for file in report.files
        if file.path != "<stdin>" and any(found.fix and found.severity != "note" for found in file.findings)
    ]
    if len(paths) > _MOST_PATHS:
        try:
            paths = [os.path.commonpath(paths) or os.curdir]
        except ValueError:  # on several drives, or only some of them from the root
            paths = ["PATH"]
    return " ".join(quote(printable(path)) for path in paths)
