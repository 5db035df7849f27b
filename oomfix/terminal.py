"""What every command writes with: standard output and error, in the columns of a terminal where they are one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

import click

from oomfix.report import printable

_LEAST_COLUMN = 40
_BELOW = " " * 8


class Failure(click.ClickException):
    """Something outside the command line that ends the run: one line, without the usage of the command."""

    exit_code = 2


def is_terminal(stream: TextIO) -> bool:
    """Whether to write in colour: on a terminal, and where FORCE_COLOR asks for it."""
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def columns(stream: TextIO | None) -> int | None:
    """The columns of a terminal; None where the stream is none, or closed."""
    if stream is None or not stream.isatty():
        return None
    # imported here, as textwrap is: only a terminal needs them, and they bring several modules of their own
    import shutil

    return shutil.get_terminal_size().columns


def broken(line: str, width: int | None) -> list[str]:
    """A line in parts of `width` columns, no word broken, the later ones indented by four more; None: in one."""
    if width is None or len(line) <= width:
        return [line]
    import textwrap

    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _wrapped(sentence: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(sentence, width, break_long_words=False) or [""]


def write_lines(lines: Iterable[str]) -> None:
    """Lines on standard output, broken where that is a terminal."""
    width = columns(sys.stdout)
    for line in lines:
        for part in broken(line, width):
            click.echo(part)


def escape_what_it_cannot_show(stream: TextIO) -> None:
    """Let paths and lines of files hold what the encoding of a terminal has not."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def write(render: Callable[[TextIO], object]) -> None:
    """Write to standard output what `render` writes; a reader that has seen enough (`| head`) is no error."""
    stream = sys.stdout
    if stream is None:
        raise Failure("standard output: cannot write: it is closed")
    escape_what_it_cannot_show(stream)
    try:
        render(stream)
        stream.flush()
    except BrokenPipeError:
        # what is left in the buffer would fail again when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise Failure(f"standard output: cannot write: {error.strerror}") from None


def tell(path: str, message: str) -> None:
    """An error of a file, on standard error."""
    click.echo("\n".join(broken(printable(f"{path}: {message}"), columns(sys.stderr))), err=True)


def write_markdown(text: str, stream: TextIO) -> None:
    """Markdown as it is, or on a terminal laid out by rich."""
    if not is_terminal(stream):
        stream.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(file=stream).print(Markdown(text))


def write_table(rows: Sequence[tuple[str, ...]], stream: TextIO) -> None:
    """Columns side by side; on a terminal, sentences in the last one are broken, or stand below where it is narrow."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    heads = ["".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False)) for row in rows]
    indent, room = len(heads[0]), _columns_left(stream, len(heads[0]), max(len(row[-1]) for row in rows))
    if room is not None and room < _LEAST_COLUMN:
        indent, room = len(_BELOW), _columns_left(stream, len(_BELOW), _LEAST_COLUMN)
        heads = [f"{head.rstrip()}\n{_BELOW}" for head in heads]
    for row, head in zip(rows, heads, strict=True):
        tail = [row[-1]] if room is None else _wrapped(row[-1], room)
        stream.write(head + ("\n" + " " * indent).join(tail) + "\n")


def _columns_left(stream: TextIO, used: int, wanted: int) -> int | None:
    """The columns of a terminal that are left for sentences; None where there is no terminal, or are no sentences."""
    width = columns(stream)
    return None if width is None or wanted < _LEAST_COLUMN else max(width - used, 1)
