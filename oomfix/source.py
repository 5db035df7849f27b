"""A Python file or notebook: its text, its tree, and the way from one to the other."""

from __future__ import annotations

import ast
import codecs
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from oomfix.parsing import NEWLINE, decode, parse, split_lines

if TYPE_CHECKING:
    from oomfix.notebook import Cells

# With a quote, the line may be the end of a string, with a brace, the inside of an f-string: code may follow.
_COMMENT_ALONE = re.compile(r"""[ \t\f]*#[^"'{]*$""")


class Source:
    """A file's text and tree.

    Attributes:
        path: the file, as it is named in reports.
        text: the decoded text, newlines as in the file, no byte order mark; a notebook's code cells joined.
        tree: `text` parsed by `ast`.
        encoding: the codec that the file declares, else "utf-8".
        bom: whether the file starts with a UTF-8 byte order mark.
        cells: where the cells of a notebook stand in `text`; None for a Python file.
        problems: cells of a notebook that could not be parsed and are blank in `text`, one plain line each.
    """

    def __init__(
        self,
        path: str,
        text: str,
        tree: ast.Module,
        *,
        encoding: str = "utf-8",
        bom: bool = False,
        cells: Cells | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.text = text
        self.tree = tree
        self.encoding = encoding
        self.bom = bom
        self.cells = cells
        self.problems = problems

    @classmethod
    def from_bytes(cls, path: str, data: bytes) -> Source:
        """The source that a file holds: a notebook where its path or its content says so.

        Raises:
            Unreadable: the bytes are no text, or the text is not Python 3.
            ForeignLanguage: a notebook in another language.
        """
        if path.endswith(".ipynb") or _holds_notebook(data):
            # imported here: most runs see no notebook
            from oomfix.notebook import read_notebook

            cells, text, problems = read_notebook(data)
            return cls(path, text, parse(text), cells=cells, problems=problems)
        text, encoding, bom = decode(data)
        return cls(path, text, parse(text), encoding=encoding, bom=bom)

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text without their ends, split where Python splits them: not at form feeds."""
        return split_lines(self.text)

    @cached_property
    def line_starts(self) -> list[int]:
        """The offset of each line's first character in `text`."""
        if "\r" in self.text:
            return [0, *(match.end() for match in NEWLINE.finditer(self.text))]
        return list(accumulate((len(line) + 1 for line in self.lines[:-1]), initial=0))

    @cached_property
    def code(self) -> bytes:
        """The text in UTF-8 without docstrings and comments that stand alone: they mention what no code does."""
        lines = ["" if _COMMENT_ALONE.match(line) else line for line in self.lines]
        for docstring in _docstrings(self.tree.body):
            first, last = docstring.lineno - 1, (docstring.end_lineno or docstring.lineno) - 1
            before = lines[first].encode()[: docstring.col_offset]
            behind = lines[last].encode()[docstring.end_col_offset :]
            if not before.strip() and not behind.strip():
                lines[first : last + 1] = [""] * (last + 1 - first)
        return "\n".join(lines).encode()

    def offset(self, line: int, utf8_column: int) -> int:
        """The offset in `text` of a position that `ast` gives: 1-based line, column in bytes of UTF-8."""
        start = self.line_starts[line - 1]
        if self._is_ascii:
            return start + utf8_column
        return start + len(self.lines[line - 1].encode()[:utf8_column].decode())

    def position(self, offset: int) -> tuple[int, int]:
        """The line and column, both 1-based and in characters, of an offset in `text`."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node, as it stands in the file."""
        # ast gives every parsed expression and statement an end; the types allow None for nodes made by hand
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        return self.text[start : self.offset(node.end_lineno, node.end_col_offset)]

    def locate(self, line: int) -> tuple[int | None, int]:
        """The cell and the line in it of a line of `text`, all 1-based; (None, line) in a Python file."""
        return (None, line) if self.cells is None else self.cells.locate(line)

    def written(self, line: int) -> str:
        """A line of `text`, 1-based, as its author wrote it: in a notebook, with its magic and all indentation."""
        return self.lines[line - 1] if self.cells is None else self.cells.written[line - 1]

    def written_column(self, line: int, column: int) -> int:
        """Where a column of a line of `text` stands in that line as it was written."""
        return column if self.cells is None else column + self.cells.indents[line - 1]

    def encode(self, text: str) -> bytes:
        """The bytes of the file with `text` in place of its own: same encoding, same byte order mark.

        Encodings with two byte sequences for one character (some of East Asia) may come back with the other
        one; `encode(self.text)` differs from the file's bytes then.

        Raises:
            UnicodeEncodeError: `text` has characters that the file's encoding has not.
            ValueError: the source is a notebook, whose file is JSON and not this text.
        """
        if self.cells is not None:
            raise ValueError(f"{self.path}: a notebook cannot be encoded from the joined text of its cells")
        return (codecs.BOM_UTF8 if self.bom else b"") + text.encode(self.encoding)

    @cached_property
    def _is_ascii(self) -> bool:
        return self.text.isascii()


def _holds_notebook(data: bytes) -> bool:
    """Whether bytes without a telling name are a notebook: standard input. Its JSON would pass as Python, unread."""
    return data.lstrip()[:1] == b"{" and b'"cell_type"' in data and b'"nbformat"' in data


def _docstrings(body: list[ast.stmt]) -> Iterator[ast.Expr]:
    """The docstrings of a module, class or function, and of those that stand in its body."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        yield first
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(statement.body)
