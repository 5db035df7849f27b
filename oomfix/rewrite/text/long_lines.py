"""Lines that a rewrite made longer than any of the file, broken inside their brackets."""

from __future__ import annotations

import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from keyword import iskeyword
from typing import NamedTuple

from oomfix.parsing import NEWLINE, split_lines
from oomfix.rewrite.text.layout import Layout
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.patterns import Pattern

# what a tool reads belongs to its line: `# type: ignore`, or the mark of a notebook's magic
_FOR_TOOLS = Pattern(r"#\s*(type:|noqa|pylint|pragma|fmt|ruff|mypy|pyright|oomfix|nosec|isort|yapf|\w+ magic \d)")
_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_ASSIGNING = frozenset(("=", "+=", "-=", "*=", "/="))
_NO_ASSIGNMENT_ALONE = frozenset(("lambda", ";", ":"))
_BLANKS = " \t\f"
_NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def long_line_edits(layout: Layout, text: str) -> list[Edit]:
    """The edits of a rewritten text after which its new lines are no longer than the file's, as far as brackets allow.

    A comment behind a statement gives up the blanks ahead of it, or goes above; a statement is broken inside of its
    brackets. Strings and comments that are too long by themselves stay as they are.

    Args:
        layout: of the file as it was.
        text: the file as rewritten.
    """
    limit = max(layout.longest_line, *map(len, layout.source.lines))
    lines = split_lines(text)
    long = [number for number, line in enumerate(lines, 1) if len(line) > limit]
    if not long:
        return []
    tokens = _by_line(lines)
    starts = [0, *(end.end() for end in NEWLINE.finditer(text))]
    comments: dict[int, list[str]] = defaultdict(list)
    written: dict[int, list[str]] = {}
    for number in long:
        first = _first_line(number, lines, tokens)
        margin = _margin_of(lines[first - 1])
        long_line = _Line(lines[number - 1], tokens[number], limit, layout.unit, margin)
        above = lines[number - 2] if number > 1 else ""
        below = lines[number] if number < len(lines) else ""
        if (broken := long_line.broken(above, below)) is not None:
            written[number] = broken.lines
            if broken.comment is not None:
                comments[first].append(broken.comment)
    edits = []
    for number in sorted({*written, *comments}):
        start, line = starts[number - 1], lines[number - 1]
        new = [*comments[number], *written.get(number, [line])]
        edits.append(Edit(start, start + len(line), layout.newline.join(new)))
    return edits


_Pair = tuple[int, int]


class _Token(NamedTuple):
    """A token in its line: its columns, and how many brackets are open ahead of it.

    An opening bracket and the closing one have the same depth.
    """

    text: str
    start: int
    end: int
    depth: int


class _Broken(NamedTuple):
    """The lines in place of a long one, and the comment that goes above the statement."""

    comment: str | None
    lines: list[str]


def _first_line(number: int, lines: Sequence[str], tokens: dict[int, list[_Token]]) -> int:
    """Where the statement begins that a line ends; the line itself where it ends none, or a string hides it."""
    code = [token for token in tokens[number] if not token.text.startswith("#")]
    if not code or code[-1].depth or code[-1].text in _OPENING:
        return number
    for first in range(number, 0, -1):
        found = tokens.get(first)
        if not found and lines[first - 1].strip():
            return number
        if found and found[0].depth == 0 and not (first > 1 and lines[first - 2].rstrip().endswith("\\")):
            return first
    return number


def _margin_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip(_BLANKS))]


def _by_line(lines: Sequence[str]) -> dict[int, list[_Token]]:
    """The tokens of each line; none for lines that hold a part of a string of several lines."""
    found: dict[int, list[_Token]] = defaultdict(list)
    inside: set[int] = set()
    readline = (f"{line}\n" for line in lines)
    depth = 0
    for kind, text, (row, start), (last, end), _ in _whole_strings(
        tokenize.generate_tokens(lambda: next(readline, ""))
    ):
        if last > row:
            inside.update(range(row, last + 1))
        if kind in _NO_CODE:
            continue
        depth -= kind == tokenize.OP and text in _CLOSING
        found[row].append(_Token(text, start, end, depth))
        depth += kind == tokenize.OP and text in _OPENING
    return defaultdict(list, {row: tokens for row, tokens in found.items() if row not in inside})


def _whole_strings(tokens: Iterator[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Tokens, those of an f-string made one."""
    opened: list[tokenize.TokenInfo] = []
    for token in tokens:
        name = tokenize.tok_name[token.type]
        if name in ("FSTRING_START", "TSTRING_START"):
            opened.append(token)
        elif name in ("FSTRING_END", "TSTRING_END"):
            first = opened.pop()
            if not opened:
                yield first._replace(type=tokenize.STRING, end=token.end)
        elif not opened:
            yield token


class _Line:
    """A line that is too long.

    Args:
        above: the margin of its statement, and of a comment above that.
    """

    def __init__(self, text: str, tokens: list[_Token], limit: int, unit: str, above: str) -> None:
        self.text = text
        self._tokens = tokens
        self._limit = limit
        self._unit = unit
        self._margin = _margin_of(text)
        self._above = above

    def broken(self, above: str, below: str) -> _Broken | None:
        """The lines in its place; None where it cannot be broken.

        Args:
            above: the line before, which may go on in this one.
            below: the next line, whose margin is that of what is left of an open bracket.
        """
        code, comment = self._tokens, None
        if code and code[-1].text.startswith("#"):
            *code, comment = code
        if not code or self.text[code[-1].end : comment.start if comment else None].strip():
            return None  # a backslash joins it to the next line
        if comment is None:
            rest = self._code(code, above, below)
            return None if rest is None else _Broken(None, rest)
        if _FOR_TOOLS.match(comment.text):
            return None
        ahead = self.text[: code[-1].end]
        if len(f"{ahead}  {comment.text}") <= self._limit:
            # comments below each other stay so
            return _Broken(None, [f"{ahead}{' ' * (self._limit - len(ahead) - len(comment.text))}{comment.text}"])
        own_line = self._above + comment.text
        rest = [ahead] if len(ahead) <= self._limit else self._code(code, above, below)
        return None if rest is None or len(own_line) > self._limit else _Broken(own_line, rest)

    def _code(self, tokens: list[_Token], above: str, below: str) -> list[str] | None:
        if any(token.text == ";" for token in tokens):
            return None  # whoever writes one statement behind the other does not break them
        value = [] if above.rstrip().endswith("\\") else _value(tokens)
        return (
            self._behind_comma(tokens, below)
            or (self._in_new_parentheses(value) if _has_operators(value) else None)
            or self._in_brackets(tokens, self._margin)
            or self._in_new_parentheses(value)
            or self._in_brackets(tokens, self._margin, _pairs)
        )

    def _in_brackets(
        self, tokens: Sequence[_Token], margin: str, choose: Callable[[Sequence[_Token]], Iterable[_Pair]] | None = None
    ) -> list[str] | None:
        """Some tokens of the line on one line, or with what is inside of a pair of brackets below it.

        Args:
            choose: gives the pairs of brackets that may be chosen; None: those of calls.
        """
        start, end = tokens[0].start, tokens[-1].end
        if len(margin) + end - start <= self._limit:
            return [margin + self.text[start:end]]
        for opening, closing in (choose or _calls)(tokens):
            head = margin + self.text[start : tokens[opening].end]
            tail = margin + self.text[tokens[closing].start : end]
            if max(len(head), len(tail)) <= self._limit:
                inside = self._filled(tokens[opening + 1 : closing], margin + self._unit)
                if inside is not None:
                    return [head, *inside, tail]
        return None

    def _in_new_parentheses(self, value: list[_Token]) -> list[str] | None:
        """What is assigned, in parentheses of its own on one line below the rest; a condition may take three."""
        head = self.text[: value[0].start].rstrip(_BLANKS) if value else ""
        for parts in ([value], _parts_of_condition(value)) if value else ():
            inside = [self._margin + self._unit + self.text[part[0].start : part[-1].end] for part in parts]
            if inside and max(map(len, inside)) <= self._limit:
                return [f"{head} (", *inside, f"{self._margin})"]
        return None

    def _filled(self, tokens: Sequence[_Token], margin: str) -> list[str] | None:
        """What is inside of brackets, broken behind its commas where it has to be."""
        lines: list[str] = []
        behind = 0
        for item in _items(tokens):
            beside = self.text[behind : item[-1].end]
            if lines and len(lines[-1] + beside) <= self._limit:
                lines[-1] += beside
            elif (broken := self._in_brackets(item, margin)) is not None:
                lines += broken
            else:
                return None
            behind = item[-1].end
        return lines

    def _behind_comma(self, tokens: list[_Token], below: str) -> list[str] | None:
        """A line of a bracket that spans several, broken behind its last comma that leaves no long line."""
        first, last = tokens[0].depth, tokens[-1].depth + (tokens[-1].text in _OPENING)
        for index in range(len(tokens) - 2, 0, -1):
            token = tokens[index]
            if token.text != "," or token.end > self._limit or token.depth == 0:
                continue
            if token.depth == last and last > first:
                margin = _margin_of(below)
            elif token.depth == first:
                margin = self._margin
            else:
                continue
            rest = self._in_brackets(tokens[index + 1 :], margin)
            if rest is not None:
                return [self.text[: token.end], *rest]
        return None


def _value(tokens: list[_Token]) -> list[_Token]:
    """What is assigned by a statement that is all of its line; nothing for other statements."""
    outside = [index for index, token in enumerate(tokens) if token.depth == 0]
    texts = {tokens[index].text for index in outside}
    if not outside or outside[0] != 0 or outside[-1] != len(tokens) - 1 or tokens[-1].text in _OPENING:
        return []
    assigned = [index for index in outside if tokens[index].text in _ASSIGNING]
    return [] if not assigned or texts & _NO_ASSIGNMENT_ALONE else tokens[assigned[-1] + 1 :]


def _has_operators(value: list[_Token]) -> bool:
    """Whether it is a sum, a condition or the like, other than a sign ahead of all."""
    texts = [token.text for token in value if token.depth == 0][1:]
    return any(iskeyword(text) or not (text[0].isalnum() or text[0] in "_.,'\"()[]{}") for text in texts)


def _parts_of_condition(value: list[_Token]) -> list[list[_Token]]:
    """`a`, `if test` and `else b` of `a if test else b`; nothing for other values."""
    words = [index for index, token in enumerate(value) if token.depth == 0 and token.text in ("if", "else")]
    if [value[index].text for index in words] != ["if", "else"]:
        return []
    return [value[: words[0]], value[words[0] : words[1]], value[words[1] :]]


def _calls(tokens: Sequence[_Token]) -> Iterator[_Pair]:
    """The pairs that are those of a call or subscript, not parentheses around a part of a sum."""
    for pair in _pairs(tokens):
        before = tokens[pair[0] - 1].text if pair[0] else ""
        if before in _CLOSING or (before.isidentifier() and not iskeyword(before)):
            yield pair


def _pairs(tokens: Sequence[_Token]) -> list[_Pair]:
    """The pairs of brackets that are inside of no other bracket, as indices: that with most inside first."""
    found: list[_Pair] = []
    outermost = min(token.depth for token in tokens)
    opening = None
    for index, token in enumerate(tokens):
        if token.depth != outermost:
            continue
        if token.text in _OPENING:
            opening = index
        elif token.text in _CLOSING:
            if opening is not None and index - opening > 1:
                found.append((opening, index))
            opening = None
    return sorted(found, key=lambda pair: tokens[pair[0]].end - tokens[pair[1]].start)


def _items(tokens: Sequence[_Token]) -> Iterator[Sequence[_Token]]:
    """What stands between the commas of a bracket, each with its comma."""
    depth = min(token.depth for token in tokens)
    first = 0
    for index, token in enumerate(tokens):
        if token.text == "," and token.depth == depth:
            yield tokens[first : index + 1]
            first = index + 1
    if first < len(tokens):
        yield tokens[first:]
