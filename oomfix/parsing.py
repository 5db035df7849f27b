"""Bytes -> text -> tree; where that fails, one plain line that says why."""

from __future__ import annotations

import ast
import codecs
import gc
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

NEWLINE = re.compile(r"\r\n|\r|\n")
"""What ends a line, for Python."""

# What only Python 2 accepts; asked of a line that the parser refused, never of good code.
_PYTHON_2 = (
    r"""^\s*(print\b(?!\s*\()|exec\s+['"\w]|raise\s+[\w.]+\s*,|except\s+[\w.(), ]+,\s*\w+\s*:)"""
    r"""|<>|`|\b0\d+[lL]?\b|\b\d+[lL]\b|\b[uU][rR]['"]"""
)

# What came with a version, in the parser's message and the line below it; asked only of what an older one refused.
_NEWER_SYNTAX = (
    ((3, 11), r"(?m)^\s*except\s*\*"),
    ((3, 12), r"(?m)^f-string|^\s*((async\s+)?def|class)\s+\w+\s*\[|^\s*type\s+\w+.*="),
    ((3, 14), r"""(?i)\b(t|tr|rt)["']"""),
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


def split_lines(text: str) -> list[str]:
    """The lines of a text without their ends; "\\r\\n", "\\r" and "\\n" end a line, as in Python."""
    return NEWLINE.split(text) if "\r" in text else text.split("\n")


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
        line = len(NEWLINE.findall(body[: error.start].decode("latin-1"))) + 1
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
    line = len(NEWLINE.findall(data[: error.start].decode("latin-1"))) + 1
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
        line = len(NEWLINE.findall(text[: error.start])) + 1
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
        if running < version and re.search(syntax, f"{message}\n{line}"):
            newer, own = ".".join(map(str, version)), ".".join(map(str, running))
            return f" (syntax of Python {newer}? oomfix runs on Python {own}, which is older)"
    return " (Python 2?)" if re.search(_PYTHON_2, line) else ""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect a hundred times less often: a tree is many objects and hardly any cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] * 100, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
