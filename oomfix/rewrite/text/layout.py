"""Statements as text: moved to another indentation with their comments, strings left alone."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from oomfix.script.syntax.edits import Edit, bounds, indentation_unit, newline_of
from oomfix.script.syntax.nodes import walk
from oomfix.source import Source


class Lines(NamedTuple):
    """Whole lines of the source, first and last included (1-based)."""

    first: int
    last: int


_LONGEST_LINE = 79
_LONGEST_OF_ALL = 120


class Layout:
    """What the text of a file looks like around its statements.

    Attributes:
        source: the file.
        unit: one level of its indentation.
        newline: its line end.
        longest_line: how long the lines of the file get, within reason; new lines are kept to it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.unit = indentation_unit(source)
        self.newline = newline_of(source)
        self.longest_line = min(max([_LONGEST_LINE, *map(len, source.lines)]), _LONGEST_OF_ALL)

    @cached_property
    def inside_strings(self) -> set[int]:
        """The numbers of the lines that start inside a multi-line string."""
        return _lines_inside_strings(self.source)

    def margin(self, statement: ast.stmt) -> str:
        """The white space before a statement; of the line it is on."""
        line = _from_form_feed(self.source.lines[statement.lineno - 1])
        return line[: len(line) - len(line.lstrip(" \t"))]

    def own_lines(self, statement: ast.stmt) -> Lines | None:
        """The lines that a statement fills alone, with a `;` or comment behind it; None where it shares them."""
        start, end = bounds(self.source, statement)
        first = statement.lineno
        for decorator in getattr(statement, "decorator_list", ()):
            first = min(first, decorator.lineno)
            start = self.source.line_starts[first - 1]
        last = statement.end_lineno or statement.lineno
        if self.source.text[self.source.line_starts[first - 1] : start].strip():
            return None
        rest = self.source.text[end : self._end_of_line(last)]
        return Lines(first, last) if re.fullmatch(r"[ \t\f]*;?[ \t\f]*(#.*)?", rest) else None

    def chunk(self, statement: ast.stmt, block: list[ast.stmt], header: int) -> Lines | None:
        """A statement's lines with the comments above it, down from the statement before it or line `header`.

        Code that is commented out right below a statement is the statement's where a blank line follows.
        """
        own = self.own_lines(statement)
        if own is None:
            return None
        index = block.index(statement)
        above = self._last_with_code_below(block[index - 1]) if index else header
        first = number = own.first
        while number - 1 > above and self.source.lines[number - 2].lstrip()[:1] in ("#", ""):
            number -= 1
            first = number if self.source.lines[number - 1].strip() else first
        followed = index + 1 < len(block)
        return Lines(first, self._last_with_code_below(statement) if followed else self.last_line(statement))

    def _last_with_code_below(self, statement: ast.stmt) -> int:
        last = number = self.last_line(statement)
        lines, start = self.source.lines, f"{self.margin(statement)}#"
        while number < len(lines) and lines[number].startswith(start):
            number += 1
        parted = number < len(lines) and not lines[number].strip()
        return number if parted and is_code([line[len(start) :] for line in lines[last:number]]) else last

    def inserted(self, here: int, lines: Iterable[str]) -> Edit:
        """The edit that puts lines at an offset at which one begins."""
        return Edit(here, here, "".join(line + self.newline for line in lines))

    def removed(self, lines: Lines) -> Edit:
        """The edit that takes lines out, with their ends."""
        return Edit(*self.whole(lines), "")

    def last_line(self, statement: ast.stmt) -> int:
        """A statement's last line, with the comments behind it that are indented like its block."""
        last = statement.end_lineno or statement.lineno
        blocks = (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.While, ast.If, ast.Try)
        return self.last_comment(last, self.margin(statement)) if isinstance(statement, blocks) else last

    def last_comment(self, last: int, margin: str) -> int:
        """The last of the comments behind a line that are indented deeper than a margin, or that line."""
        number = last
        while number < len(self.source.lines):
            line = self.source.lines[number]
            indented = line.startswith(margin) and line[len(margin) : len(margin) + 1] in (" ", "\t")
            if line.strip() and not (indented and line.lstrip().startswith("#")):
                break
            number += 1
            last = number if line.strip() else last
        return last

    def above_comments(self, statement: ast.stmt) -> int:
        """The offset of a statement's line, or of the comments that stand right above it and are no headline."""
        line, start = statement.lineno, f"{self.margin(statement)}#"
        while line > 1 and (above := self.source.lines[line - 2]).startswith(start):
            if _is_of_another(above[len(start) :], statement):
                break
            line -= 1
        comments = self.source.lines[line - 1 : statement.lineno - 1]
        if any(not comment.strip(" \t#-=*~") for comment in comments):
            line = statement.lineno
        return self.source.line_starts[line - 1]

    def heads_paragraph(self, here: int) -> bool:
        """Whether the line at an offset is a comment below a blank line."""
        number, _ = self.source.position(here)
        return self.source.lines[number - 1].lstrip().startswith("#") and self._is_blank(number - 1)

    def moved(self, lines: Lines, before: str, after: str) -> list[str]:
        """The lines with the margin `after` instead of `before`, without line ends; insides of strings stay.

        Blank lines that move to another margin lose what white space is in them.
        """
        numbered = enumerate(self.source.lines[lines.first - 1 : lines.last], start=lines.first)
        return [line if number in self.inside_strings else _moved(line, before, after) for number, line in numbered]

    def span(self, lines: Lines) -> tuple[int, int]:
        """The offsets of whole lines, the last line's end excluded."""
        return self.source.line_starts[lines.first - 1], self._end_of_line(lines.last)

    def whole(self, lines: Lines) -> tuple[int, int]:
        """The offsets of whole lines, the last line's end included, which may be another one than `newline`."""
        starts = self.source.line_starts
        end = starts[lines.last] if lines.last < len(starts) else len(self.source.text)
        return starts[lines.first - 1], end

    def with_gap(self, lines: Lines) -> Lines:
        """Lines that are taken out, with the blank one below them where it would meet one above."""
        meet = self._is_blank(lines.first - 1) and self._is_blank(lines.last + 1)
        return lines._replace(last=lines.last + 1) if meet else lines

    def _is_blank(self, number: int) -> bool:
        return 1 <= number <= len(self.source.lines) and not self.source.lines[number - 1].strip()

    def _end_of_line(self, number: int) -> int:
        return self.source.line_starts[number - 1] + len(self.source.lines[number - 1])


def is_code(comments: list[str]) -> bool:
    """Whether comments are statements that are commented out: assignments or calls, not words."""
    try:
        body = ast.parse(textwrap.dedent("\n".join(comments))).body
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.Assign | ast.AugAssign | ast.Call) for node in walk(*body))


def _is_of_another(comment: str, statement: ast.stmt) -> bool:
    """Whether a comment is an assignment that is commented out, to something else than a statement assigns to."""
    try:
        body = ast.parse(comment.strip()).body
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(one, ast.Assign) and _targets(one).isdisjoint(_targets(statement)) for one in body)


def _targets(statement: ast.stmt) -> set[str]:
    return {ast.unparse(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()


def _moved(line: str, before: str, after: str) -> str:
    if before == after:
        return line
    line = _from_form_feed(line)
    if not line.strip():
        return ""
    if line.startswith(before):
        return after + line[len(before) :]
    # a comment or the rest of a bracket, further left than its statement
    return after + line.lstrip(" \t")


def _from_form_feed(line: str) -> str:
    """A line as it is read: a form feed in front of a statement starts its indentation again."""
    start = len(line) - len(line.lstrip(" \t\f"))
    return line[line.rfind("\f", 0, start) + 1 :]


def _lines_inside_strings(source: Source) -> set[int]:
    frozen: set[int] = set()
    for node in walk(source.tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
                frozen.update(_continued(source, node))
    return frozen


def _continued(source: Source, node: ast.Constant | ast.JoinedStr) -> set[int]:
    """The lines of a string after its first; those between parts of an implicit concatenation are no string."""
    text = "(" + source.segment(node) + ")"
    inside: set[int] = set()
    open_strings: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
        name = tokenize.tok_name[token.type]
        if name in ("FSTRING_START", "TSTRING_START"):
            open_strings.append(token.start[0])
        elif name in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(open_strings.pop() + 1, token.end[0] + 1))
        elif token.type == tokenize.STRING:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return {node.lineno + number - 1 for number in inside}
