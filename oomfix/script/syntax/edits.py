"""Edits of a source's text: every byte outside a span stays as it is."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.source import Source


class Edit(NamedTuple):
    """Replace `text[start:end]` of the decoded source by `replacement`; offsets count characters."""

    start: int
    end: int
    replacement: str


_STRINGS = (ast.Constant, ast.JoinedStr)
_OPENING = Pattern(r"""[rbfu]{0,2}(?!'{3}|"{3})(['"])""", re.IGNORECASE)
_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Tuple, ast.List, ast.Dict)


def bounds(source: Source, node: ast.expr | ast.stmt | ast.keyword | ast.alias) -> tuple[int, int]:
    """The character offsets of a node's first character and of the one behind its last."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return source.offset(node.lineno, node.col_offset), source.offset(node.end_lineno, node.end_col_offset)


def replace(source: Source, node: ast.expr | ast.stmt, text: str) -> tuple[Edit, ...]:
    """Put other text in the place of a node."""
    return (Edit(*bounds(source, node), text),)


def detach(source: Source, node: ast.expr) -> tuple[Edit, ...]:
    """`value` -> `value.detach()`, in parentheses where the operator would bind otherwise."""
    start, end = bounds(source, node)
    if isinstance(node, _ATOMS):
        return (Edit(end, end, ".detach()"),)
    enclosed = source.text[start - 1 : start] == "(" and source.text[end : end + 1] == ")"
    if enclosed and not _is_called(source, start - 1):
        return (Edit(end + 1, end + 1, ".detach()"),)
    return (Edit(start, start, "("), Edit(end, end, ").detach()"))


def _is_called(source: Source, parenthesis: int) -> bool:
    """Whether an opening parenthesis is that of a call."""
    before = source.text[:parenthesis].rstrip(" \t")
    return (
        bool(before)
        and (before[-1].isalnum() or before[-1] in "_)]'\"")
        and not re.search(r"\b(return|in|and|or|not|if|else|yield|lambda|print)$", before)
    )


def add_keyword(source: Source, call: ast.Call, keyword: str) -> tuple[Edit, ...]:
    """Append a keyword argument behind the last argument of a call."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments:
        end = bounds(source, call)[1] - 1
        return (Edit(end, end, keyword),)
    last = max(bounds(source, argument)[1] for argument in arguments)
    last = _behind_parentheses(source, last, bounds(source, call)[1] - 1)
    return (Edit(last, last, f", {keyword}"),)


def prepend_argument(source: Source, call: ast.Call, text: str, names: Sequence[str]) -> tuple[Edit, ...]:
    """Put an argument first; the positional ones become keyword arguments of these `names`, or stay as they are.

    Empty where that cannot be written: starred arguments have no names, a bare generator stands alone, and nothing
    positional follows a keyword.
    """
    bare = any(isinstance(argument, ast.GeneratorExp) for argument in call.args)
    if bare or (names and (any(isinstance(a, ast.Starred) for a in call.args) or len(call.args) > len(names))):
        return ()
    starts = _argument_starts(source, call)
    if not call.args and not call.keywords:
        return (Edit(starts[0], starts[0], text),)
    arguments = [max(start for start in starts[1:] if start <= bounds(source, node)[0]) for node in call.args]
    if arguments and arguments[0] != starts[1]:
        return ()
    named = dict(zip(arguments, (f"{name}=" for name in names), strict=False))
    named[starts[1]] = f"{text}, {named.get(starts[1], '')}"
    return tuple(Edit(at, at, prefix) for at, prefix in named.items())


def _argument_starts(source: Source, call: ast.Call) -> list[int]:
    """The offset behind a call's opening parenthesis, then that of the first character behind it and each comma.

    `ast` does not count the parentheses around an argument, the tokens do.
    """
    start, end = bounds(source, call)
    # in parentheses of its own, a call that was cut out of a larger expression is tokens that belong together
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n|$)", f"({source.text[start:end]})")
    offsets = [start - 1, *(start - 1 + length for length in accumulate(map(len, lines)))]
    readline = iter(lines)
    tokens = [
        (token.string, offsets[token.start[0] - 1] + token.start[1])
        for token in tokenize.generate_tokens(lambda: next(readline, ""))
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    ][1:-1]
    depth = 0
    opening = 0
    for index in range(len(tokens) - 1, -1, -1):
        depth += (tokens[index][0] in ")]}") - (tokens[index][0] in "([{")
        if depth == 0:
            opening = index
            break
    # commas inside of arguments do no harm: nobody asks for what starts there
    behind = [position for (string, _), (_, position) in pairwise(tokens[opening:]) if string == ","]
    return [tokens[opening][1] + 1, tokens[opening + 1][1], *behind]


def _behind_parentheses(source: Source, position: int, limit: int) -> int:
    """A parenthesised argument ends behind its closing parentheses, which `ast` does not count."""
    match = re.compile(r"(\s*\))+").match(source.text, position, limit)
    return match.end() if match else position


def remove_keyword(source: Source, call: ast.Call, name: str) -> tuple[Edit, ...]:
    """Take a keyword argument out of a call, with its comma."""
    index, keyword = next((i, k) for i, k in enumerate(call.keywords) if k.arg == name)
    start, end = bounds(source, keyword)
    before: list[ast.expr | ast.keyword] = [*call.args, *call.keywords[:index]]
    if before:
        previous = max(bounds(source, argument)[1] for argument in before)
        return (Edit(previous, end, ""),)
    after = re.compile(r"\s*,[ \t]*").match(source.text, end)
    return (Edit(start, after.end() if after else end, ""),)


def whole_lines(source: Source, statement: ast.stmt) -> tuple[int, int] | None:
    """The span of whole lines that a statement fills alone; None where it shares a line with others."""
    start, end = bounds(source, statement)
    line_start = source.line_starts[statement.lineno - 1]
    if source.text[line_start:start].strip():
        return None
    rest = re.compile(r"[ \t]*(#[^\r\n]*)?(\r\n|\r|\n|$)").match(source.text, end)
    if rest is None:
        return None
    return line_start, rest.end()


def remove_statement(source: Source, statement: ast.stmt, siblings: list[ast.stmt]) -> tuple[Edit, ...]:
    """Take a statement out of its block; a block left empty gets `pass`. Empty where it cannot be done.

    Of a line that it shares with others, it goes with one semicolon.
    """
    if len(siblings) == 1:
        return replace(source, statement, "pass")
    start, end = bounds(source, statement)
    index = siblings.index(statement)
    if index and siblings[index - 1].end_lineno == statement.lineno:
        return (Edit(bounds(source, siblings[index - 1])[1], end, ""),)
    if index + 1 < len(siblings) and siblings[index + 1].lineno == statement.end_lineno:
        return (Edit(start, bounds(source, siblings[index + 1])[0], ""),)
    lines = whole_lines(source, statement)
    return () if lines is None else (Edit(*lines, ""),)


def wrap(source: Source, statement: ast.stmt, header: str) -> tuple[Edit, ...]:
    """Put a statement under a new compound statement, one level deeper.

    Lines inside of multi-line strings are left where they are. Empty where the statement shares a line with others.
    """
    lines = whole_lines(source, statement)
    if lines is None:
        return ()
    start, end = lines
    margin = source.text[start : bounds(source, statement)[0]]
    unit = _unit_of(source, statement, margin) or indentation_unit(source)
    edits = [Edit(start, start, f"{margin}{header}{newline_of(source)}")]
    frozen = _inside_strings(source.text[start:end], statement.lineno)
    for number in range(statement.lineno, source.position(max(start, end - 1))[0] + 1):
        offset = source.line_starts[number - 1]
        if number not in frozen and source.lines[number - 1].strip():
            edits.append(Edit(offset, offset, unit))
    return tuple(edits)


def _unit_of(source: Source, statement: ast.stmt, margin: str) -> str:
    """How much deeper the block of a compound statement stands; "" where it has none in lines of its own."""
    blocks = [value for _, value in ast.iter_fields(statement) if isinstance(value, list)]
    for first in (block[0] for block in blocks if block and isinstance(block[0], ast.stmt)):
        deeper = source.text[source.line_starts[first.lineno - 1] : bounds(source, first)[0]]
        if not deeper.strip() and deeper.startswith(margin):
            return deeper.removeprefix(margin)
    return ""


@lru_cache(maxsize=1)
def quote_of(source: Source) -> str:
    """The quote that the file writes short strings with; apostrophes in comments and docstrings are none."""
    in_f_strings: set[ast.AST] = set()
    found: Counter[str] = Counter()
    for node in walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            in_f_strings.update(node.values)
        if isinstance(node, _STRINGS) and node not in in_f_strings:
            if (opened := _OPENING.match(source.text, source.offset(node.lineno, node.col_offset))) is not None:
                found[opened[1]] += 1
    return "'" if found["'"] > found['"'] else '"'


def indentation_unit(source: Source) -> str:
    """One level of indentation as the file writes it: in its blocks, else in the first of its lines that has some."""
    units = Counter(unit for statement in source.tree.body if (unit := _unit_of(source, statement, "")))
    if units:
        return units.most_common(1)[0][0]
    for line in source.lines:
        stripped = line.lstrip(" \t")
        if line[:1] == "\t" and stripped:
            return "\t"
        if line[:1] == " " and stripped and not stripped.startswith("#"):
            width = len(line) - len(stripped)
            if width in (2, 4, 8):
                return " " * width
    return "    "


def _inside_strings(block: str, first_line: int) -> set[int]:
    """The lines that start inside a multi-line string."""
    frozen: set[int] = set()
    lines = iter(("if 1:\n" + block).splitlines(keepends=True))
    try:
        for token in tokenize.generate_tokens(lambda: next(lines, "")):
            if token.end[0] > token.start[0] and token.type not in (tokenize.NEWLINE, tokenize.NL):
                frozen.update(range(first_line - 1 + token.start[0], first_line - 1 + token.end[0]))
    except (tokenize.TokenError, IndentationError):
        return set(range(first_line, first_line + block.count("\n") + 1))
    return frozen


def newline_of(source: Source) -> str:
    """The line ending that the file uses."""
    match = re.search(r"\r\n|\r|\n", source.text)
    return match.group() if match else "\n"


def line_start(source: Source, offset: int) -> int:
    """The offset of the first character of the line that an offset is on."""
    return source.line_starts[source.position(offset)[0] - 1]
