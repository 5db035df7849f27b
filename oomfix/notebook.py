"""Notebooks: their code cells as one Python text, with IPython's own syntax replaced by lines that parse."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import Any, NamedTuple

from oomfix.parsing import ForeignLanguage, Unreadable, parse, split_lines

# Cell magics whose cell is still Python run by this kernel; every other one hands its cell to something else.
_PYTHON_CELL_MAGICS = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "debug"})

# Line magics that IPython takes without their "%", of which these are in use; asked only of a line that does not parse.
_AUTOMAGICS = "cat|cd|conda|cp|head|ls|mamba|matplotlib|mkdir|mv|pip|pwd|rm|rmdir|tail|time|timeit|uv"

_CELL_MAGIC = re.compile(r"\s*%%(\w+)")
_LINE_MAGIC = re.compile(
    rf"""(?P<indent>\s*)(
        [%!?]                                   # %magic, !command, ?help
        | [\w.,\s\[\]'"]+ = \s* [%!] (?!=)      # x = %magic, x = !command
        | [\w.%]+ \?{{1,2}} \s* $               # name?, name??
        | (?:{_AUTOMAGICS}) \s+ (?![=(.,])      # pip install x, cd folder
    )""",
    re.VERBOSE,
)


class Cells(NamedTuple):
    """Where the code cells of a notebook stand in the joined text.

    Attributes:
        first_lines: the 1-based line of the text at which each code cell starts, ascending.
        numbers: the 1-based number of each of them among all cells of the notebook.
        written: the lines of the text as the notebook has them, magics and indentation of whole cells included.
        indents: how many characters of each of these lines the text leaves out.
    """

    first_lines: list[int]
    numbers: list[int]
    written: list[str]
    indents: list[int]

    def locate(self, line: int) -> tuple[int, int]:
        """The cell and the line in it, both 1-based, of a 1-based line of the joined text."""
        index = bisect_right(self.first_lines, line) - 1
        return self.numbers[index], line - self.first_lines[index] + 1


class Notebook(NamedTuple):
    """What `read_notebook` returns: the cells' places, their joined text, and the cells that do not parse."""

    cells: Cells
    text: str
    problems: tuple[str, ...]


def read_notebook(data: bytes) -> Notebook:
    """The code cells of a notebook (nbformat 3 or 4) joined into one text that parses.

    A magic (`%`, `!`, `?`) becomes `pass` on its line, a cell for another language (`%%bash`) blank lines, so
    that lines stay what they are. A cell that is indented as a whole loses that indentation, as in IPython. A cell
    that still does not parse becomes blank too and is named in the problems: Jupyter runs cell by cell, so one
    half-written cell does not spoil the others.

    Raises:
        Unreadable: the bytes are no notebook.
        ForeignLanguage: a notebook in another language than Python.
    """
    cells = Cells([], [], [], [])
    texts: list[str] = []
    problems: list[str] = []
    line = 1
    for number, cell in enumerate(_cells(_load(data)), start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        written = split_lines(_source(cell))
        indents = _indents(written)
        text, problem = _readable([line[indent:] for line, indent in zip(written, indents, strict=True)])
        if problem:
            problems.append(f"cell {number}: {problem}")
        cells.first_lines.append(line)
        cells.numbers.append(number)
        cells.written.extend(written)
        cells.indents.extend(indents)
        texts.append(text)
        line += len(written)
    return Notebook(cells, "\n".join(texts), tuple(problems))


def _load(data: bytes) -> dict[str, Any]:
    try:
        notebook = json.loads(data)
    except UnicodeDecodeError as error:
        raise Unreadable(f"not a notebook: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"not a notebook: line {error.lineno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise Unreadable("not a notebook: JSON nested too deeply") from None
    if not isinstance(notebook, dict) or not isinstance(_cells(notebook), list):
        raise Unreadable("not a notebook: JSON without a list of cells")
    language = _language(notebook.get("metadata"))
    if language.lower() not in ("python", "ipython", "python3"):
        raise ForeignLanguage(f"a notebook in {language}, expected Python")
    return notebook


def _language(metadata: object) -> str:
    """What a notebook says it is written in; Python where it does not say."""
    if not isinstance(metadata, dict):
        return "Python"
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        stated = metadata.get(section)
        if isinstance(stated, dict) and isinstance(stated.get(key), str):
            return str(stated[key])
    return "Python"


def _cells(notebook: dict[str, Any]) -> Any:
    if "cells" in notebook:
        return notebook["cells"]
    sheets = notebook.get("worksheets")  # nbformat 3
    if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict):
        return sheets[0].get("cells")
    return None


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source.replace("\0", "") if isinstance(source, str) else ""


def _indents(lines: list[str]) -> list[int]:
    """How much of each line IPython cuts off: the indentation of the first line, from each that begins with it."""
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    return [len(indent) if line.startswith(indent) else 0 for line in lines]


def _readable(lines: list[str]) -> tuple[str, str | None]:
    """The lines of a cell made to parse, line for line; and what is wrong where that is not possible."""
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    magic = _CELL_MAGIC.match(lines[first]) if first is not None else None
    if first is not None and magic:
        if magic[1] not in _PYTHON_CELL_MAGICS:
            return "\n" * (len(lines) - 1), None
        lines[first] = ""
    return _without_magics(lines)


def _without_magics(lines: list[str]) -> tuple[str, str | None]:
    # The parser itself says which line is no Python: a `%` that continues an expression, or a `!` in a
    # string, is never mistaken for a magic. Each round replaces a line, so that the rounds end.
    for _ in range(len(lines) + 1):
        text = "\n".join(lines)
        try:
            parse(text)
        except Unreadable as problem:
            index = _refused_line(problem)
            if index is None or not _replace_magic(lines, index):
                return "\n" * (len(lines) - 1), str(problem)
        else:
            return text, None
    raise AssertionError("every round replaces a line that holds a magic, and `pass` holds none")


def _refused_line(problem: Unreadable) -> int | None:
    error = problem.__cause__
    return error.lineno - 1 if isinstance(error, SyntaxError) and error.lineno else None


def _replace_magic(lines: list[str], index: int) -> bool:
    if index >= len(lines):
        return False
    # a command continued by backslashes is refused at any of its lines
    while index and lines[index - 1].endswith("\\"):
        index -= 1
    magic = _LINE_MAGIC.match(lines[index])
    if not magic:
        return False
    continued = lines[index].endswith("\\")
    lines[index] = magic["indent"] + "pass"
    while continued and index + 1 < len(lines):
        index += 1
        continued = lines[index].endswith("\\")
        lines[index] = ""
    return True
