"""A notebook as one Python text that can be rewritten like a file, and taken apart into its cells again.

A marker, a statement that does nothing, stands at the top of each cell. In the place of each magic stands a statement
that reads and binds what the magic does, marked by a comment. Wherever a rewrite moves it in its cell, the magic goes.
"""

from __future__ import annotations

import ast
import difflib
import re
from typing import NamedTuple

from oomfix.notebook import read_notebook
from oomfix.parsing import Unreadable, parse
from oomfix.rewrite.facts.verdict import LoopOutcome
from oomfix.rewrite.notebook_json import CannotRestore
from oomfix.rewrite.text.edits import with_lines
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern
from oomfix.source import Source

_NAME = Pattern(r"(?<![\w.])[^\W\d]\w*")
_TIMED = Pattern(r"%time\s+(.+)")
_ASSIGNED = Pattern(r"([\w.,\s\[\]'\"]+?)\s*=\s*[%!](.*)")


class Cell(NamedTuple):
    """A code cell that takes part.

    Attributes:
        number: its 1-based number among all cells.
        margin: the indentation of the cell as a whole, which the text leaves out.
        lines: its lines in the text, without the marker at its top.
        written: for each of these, the lines of the notebook that it stands for.
    """

    number: int
    margin: str
    lines: list[str]
    written: list[list[str]]


class ChangedCell(NamedTuple):
    """A cell with another source: its number, and its source before and after, newlines as "\\n"."""

    number: int
    before: str
    after: str


class NotebookText:
    """The code cells of a notebook as one text.

    Args:
        path: the notebook, as it is named in reports.
        data: its bytes.

    Attributes:
        source: the text, to be rewritten as that of a Python file.
        problems: cells that do not parse, one plain line each; they stay as they are.

    Raises:
        Unreadable: the bytes are no notebook.
        ForeignLanguage: a notebook in another language than Python.
    """

    def __init__(self, path: str, data: bytes) -> None:
        places, text, self.problems = read_notebook(data)
        # a word that the notebook does not use
        self._word = "cell"
        while f"# {self._word}" in text or any(f"# {self._word}" in line for line in places.written):
            self._word += "_"
        self._cells: list[Cell] = []
        self._places: list[tuple[int, int]] = []
        self._names = {node.id for node in walk(parse(text)) if isinstance(node, ast.Name)}
        lines: list[str] = []
        shown = text.split("\n")
        starts = [first - 1 for first in places.first_lines]
        for number, start, end in zip(places.numbers, starts, [*starts[1:], len(places.written)], strict=False):
            rows = slice(start, end)
            lines += self._read(number, places.written[rows], places.indents[rows], shown[rows])
        joined = "\n".join(lines)
        self.source = Source(path, joined, parse(joined))

    def locate(self, line: int) -> tuple[int, int]:
        """The cell and the line in it, both 1-based, of a 1-based line of the text."""
        return self._places[line - 1]

    def changes(self, text: str) -> list[ChangedCell]:
        """The cells that a rewritten text changes.

        Raises:
            CannotRestore: a marker was lost, or moved out of its place.
        """
        parts = re.split(rf"^\.\.\.  # {self._word} (\d+)$\n?", text, flags=re.MULTILINE)
        if parts[0] or [int(number) for number in parts[1::2]] != [cell.number for cell in self._cells]:
            raise CannotRestore("what would change reaches over several cells")
        found = []
        for cell, part in zip(self._cells, parts[2::2], strict=True):
            lines = (part if cell is self._cells[-1] else part[:-1]).split("\n")
            if lines != cell.lines:
                before = "\n".join(line for lines in cell.written for line in lines)
                found.append(ChangedCell(cell.number, before, "\n".join(self._restored(cell, lines))))
        return found

    def _read(self, number: int, written: list[str], indents: list[int], shown: list[str]) -> list[str]:
        """The lines that stand for a cell, its marker first; none for a cell that holds no Python."""
        if not any(line.strip() for line in shown):
            return []
        margin = next((line[:cut] for line, cut in zip(written, indents, strict=True) if cut), "")
        cell = Cell(number, margin, [], [])
        self._places.append((number, 1))
        continued = False
        for index, (line, cut, text) in enumerate(zip(written, indents, shown, strict=True), start=1):
            is_magic = line[cut:] != text
            if is_magic and continued:
                cell.written[-1].append(line)
            else:
                cell.lines.append(self._stand_in(line[cut:], text, len(cell.lines)) if is_magic else text)
                cell.written.append([line])
                self._places.append((number, index))
            continued = is_magic and line.endswith("\\")
        self._cells.append(cell)
        return [f"...  # {self._word} {number}", *cell.lines]

    def _stand_in(self, magic: str, shown: str, place: int) -> str:
        """A statement that reads and binds what a magic does."""
        indent = shown[: len(shown) - len(shown.lstrip())]
        magic = magic.strip()
        if (timed := _TIMED.fullmatch(magic)) and self._is_plain(timed[1]):
            return f"{indent}{timed[1]}{self._mark(place)}"
        assigned = _ASSIGNED.fullmatch(magic)
        names = dict.fromkeys(_NAME.findall(assigned[2] if assigned else magic))
        read = "".join(f"{name}, " for name in names if name in self._names)
        code = f"{assigned[1]} = bool(({read}))" if assigned else f"({read})" if read else "..."
        return f"{indent}{code}{self._mark(place)}"

    @staticmethod
    def _is_plain(text: str) -> bool:
        """Whether a text is a statement that a comment can follow."""
        try:
            return len(parse(text).body) == 1 and "#" not in text
        except Unreadable:
            return False

    def _mark(self, place: int) -> str:
        return f"  # {self._word} magic {place}"

    def _restored(self, cell: Cell, lines: list[str]) -> list[str]:
        """The lines of a changed cell as its notebook has them."""
        magics = {line.strip(): place for place, line in enumerate(cell.lines) if line.endswith(self._mark(place))}
        if [line.strip() for line in lines if f"# {self._word} " in line] != list(magics):
            raise CannotRestore(f"cell {cell.number}: what would change moves its magics")
        restored: list[str] = []
        matcher = difflib.SequenceMatcher(None, cell.lines, lines, autojunk=False)
        for tag, start, stop, new_start, new_stop in matcher.get_opcodes():
            if tag == "equal":
                restored += [line for row in cell.written[start:stop] for line in row]
                continue
            for line in lines[new_start:new_stop]:
                if line.strip() in magics:
                    first, *more = cell.written[magics[line.strip()]]
                    indent = line[: len(line) - len(line.lstrip())]
                    restored += [cell.margin + indent + first.lstrip(), *more]
                else:
                    restored.append(cell.margin + line if line.strip() else line)
        return restored


def in_cells(loop: LoopOutcome, notebook: NotebookText) -> LoopOutcome:
    """What became of a loop of a notebook's text, with the lines of its cell, and cells for lines of other cells."""
    cell, line = notebook.locate(loop.line)

    def words(number: int) -> int | str:
        other, there = notebook.locate(number)
        return there if other == cell else f"{there} of cell {other}"

    return loop._replace(
        cell=cell,
        line=line,
        end_line=notebook.locate(loop.end_line)[1],
        reason=loop.reason and with_lines(loop.reason, words),
        notes=tuple(with_lines(note, words) for note in loop.notes),
    )
