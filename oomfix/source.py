"""Bytes of a Python file or notebook -> its text, its tree, and the way from one to the other."""

from __future__ import annotations

import ast
import codecs
import io
import re
import sys
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from oomfix.notebook import Cells

_NEWLINE = re.compile(r"\r\n|\r|\n")

# With a quote, the line may be the end of a string, with a brace, the inside of an f-string: code may follow.
_COMMENT_ALONE = re.compile(r"""[ \t\f]*#[^"'{]*$""")

# What only Python 2 accepts; asked of a line that the parser refused, never of good code.
_PYTHON_2 = re.compile(
    r"""^\s*(print\b(?!\s*\()|exec\s+['"\w]|raise\s+[\w.]+\s*,|except\s+[\w.(), ]+,\s*\w+\s*:)"""
    r"""|<>|`|\b0\d+[lL]?\b|\b\d+[lL]\b|\b[uU][rR]['"]"""
)

# What came with a version, in the parser's message and the line below it; asked only of what an older one refused.
_NEWER_SYNTAX = (
    ((3, 11), re.compile(r"^\s*except\s*\*", re.MULTILINE)),
    ((3, 12), re.compile(r"^f-string|^\s*((async\s+)?def|class)\s+\w+\s*\[|^\s*type\s+\w+.*=", re.MULTILINE)),
    ((3, 14), re.compile(r"""\b(t|tr|rt)["']""", re.IGNORECASE)),
)


class Unreadable(Exception):
    """A file that cannot be audited; the message is one plain line that says why."""


class ForeignLanguage(Unreadable):
    """A notebook in another language than Python: passed over unless it is named."""


class Decoded(NamedTuple):
    """A file's text without its byte order mark, and what is needed to write it back."""

    text: str
    encoding: str
    bom: bool


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
        """The source that a file holds; a path that ends in .ipynb makes it a notebook.

        Raises:
            Unreadable: the bytes are no text, or the text is not Python 3.
            ForeignLanguage: a notebook in another language.
        """
        if path.endswith(".ipynb"):
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
            return [0, *(match.end() for match in _NEWLINE.finditer(self.text))]
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


def _docstrings(body: list[ast.stmt]) -> Iterator[ast.Expr]:
    """The docstrings of a module, class or function, and of those that stand in its body."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        yield first
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(statement.body)


def split_lines(text: str) -> list[str]:
    """The lines of a text without their ends; "\\r\\n", "\\r" and "\\n" end a line, as in Python."""
    return _NEWLINE.split(text) if "\r" in text else text.split("\n")


def decode(data: bytes) -> Decoded:
    """Decode a Python file as Python does: byte order mark, then the encoding its first two lines declare.

    Raises:
        Unreadable: the bytes are binary, or not in the encoding they declare.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Unreadable("UTF-16 text, expected UTF-8: save it as UTF-8")
    if b"\0" in data:
        raise Unreadable("a binary file (it holds null bytes), expected Python")
    if data.isascii() and b"coding" not in data:
        return Decoded(data.decode("ascii"), "utf-8", False)
    try:
        declared, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise Unreadable(_encoding_problem(data, str(error.msg))) from None
    encoding = "utf-8" if declared == "utf-8-sig" else declared
    bom = data.startswith(codecs.BOM_UTF8)
    body = data[len(codecs.BOM_UTF8) :] if bom else data
    try:
        return Decoded(body.decode(encoding), encoding, bom)
    except UnicodeDecodeError as error:
        if encoding == "utf-8":
            raise Unreadable(_not_utf8(body, error)) from None
        line = len(_NEWLINE.findall(body[: error.start].decode("latin-1"))) + 1
        raise Unreadable(f"line {line} is not in the declared {encoding!r}: {error.reason}") from None
    except LookupError:
        raise Unreadable(f"declared encoding {encoding!r} is not a text encoding") from None


def _encoding_problem(data: bytes, message: str) -> str:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not message.startswith(("unknown encoding", "encoding problem")):
            return _not_utf8(data, error)
    if data.startswith(codecs.BOM_UTF8):
        return "starts with a UTF-8 byte order mark, but declares another encoding"
    return f"{message}: declare one that Python knows, such as utf-8"


def _not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    line = len(_NEWLINE.findall(data[: error.start].decode("latin-1"))) + 1
    return (
        f"not UTF-8: byte 0x{data[error.start]:02x} in line {line}; save it as UTF-8, or declare its "
        "encoding in the first line, such as `# coding: latin-1`"
    )


def parse(text: str) -> ast.Module:
    """The tree of a text, without the warnings that Python gives for doubtful literals.

    Raises:
        Unreadable: the text is not Python 3, or nested deeper than Python can parse.
    """
    try:
        return _tree(text)
    except SyntaxError as error:
        older = _in_older_form(text)
        if older is None:
            raise Unreadable(_syntax_problem(error, text)) from error
        return parse(older)
    except (RecursionError, MemoryError) as error:
        raise Unreadable("cannot parse: nested too deeply") from error
    except UnicodeEncodeError as error:
        line = len(_NEWLINE.findall(text[: error.start])) + 1
        raise Unreadable(f"cannot parse: line {line} holds half a surrogate pair") from error


def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _in_older_form(text: str) -> str | None:
    """A text with the f-strings of Python 3.12 as this Python reads them, every character in its place, or None."""
    if sys.version_info >= (3, 12):
        return None
    # imported here: few scripts need it
    from oomfix.newer_fstrings import in_older_form

    return in_older_form(text)


def _syntax_problem(error: SyntaxError, text: str) -> str:
    message = (error.msg or "invalid syntax").split(". Did you mean")[0]
    if error.lineno is None:
        return f"cannot parse: {message}"
    lines = split_lines(text)
    line = lines[error.lineno - 1] if 0 < error.lineno <= len(lines) else ""
    return f"cannot parse: line {error.lineno}: {message}{_guess(line, message, sys.version_info[:2])}"


def _guess(line: str, message: str, running: tuple[int, int]) -> str:
    """What a line that the running Python refuses seems to be, in brackets, or nothing."""
    if line.lstrip().startswith(("!", "%")):
        return " (a command of IPython?)"
    for version, syntax in _NEWER_SYNTAX:
        if running < version and syntax.search(f"{message}\n{line}"):
            newer, own = ".".join(map(str, version)), ".".join(map(str, running))
            return f" (syntax of Python {newer}? oomfix runs on Python {own}, which is older)"
    return " (Python 2?)" if _PYTHON_2.search(line) else ""
