"""A keyword argument added to a call, in the layout that the call has."""

from __future__ import annotations

import ast
import re

from oomfix.script.syntax.edits import Edit, add_keyword, bounds, newline_of
from oomfix.script.syntax.patterns import Pattern
from oomfix.source import Source

_COMMA = Pattern(r"[ \t]*,")
_REST = Pattern(r"[ \t]*(#[^\r\n]*)?(?=[\r\n])")


def added_keyword(source: Source, call: ast.Call, keyword: str) -> tuple[Edit, ...]:
    """The edits that append a keyword argument to a call that has arguments.

    It gets a line of its own where each of the others has one.
    """
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    arguments = sorted(given, key=lambda argument: bounds(source, argument))
    keyword = _spaced(source, call, keyword)
    ((end, _, added),) = add_keyword(source, call, keyword)
    inline = Edit(end, end, added if _spaces_commas(source, arguments) else added.replace(", ", ",", 1))
    if not _stand_apart(call, arguments):
        return (inline,)
    start = f"{newline_of(source)}{_margin(source, arguments)}{keyword}"
    comma = _COMMA.match(source.text, end)
    end = end if comma is None else comma.end()
    rest = _REST.match(source.text, end)
    if comma is not None:
        at = end if rest is None else rest.end()
        return (Edit(at, at, f"{start},"),)
    if rest is None or not rest[0].strip():
        return (Edit(end, end, f",{start}"),)
    return (Edit(end, end, ","), Edit(rest.end(), rest.end(), start))


def _spaced(source: Source, call: ast.Call, keyword: str) -> str:
    """A keyword argument with spaces around its `=` where the last one of the call has some."""
    name, value = keyword.split("=", 1)
    written = [source.text[slice(*bounds(source, one))] for one in call.keywords if one.arg is not None]
    spaced = written and re.match(r"\w+ = ", written[-1])
    return f"{name} = {value}" if spaced else keyword


def _spaces_commas(source: Source, arguments: list[ast.expr | ast.keyword]) -> bool:
    """Whether the last comma between arguments has white space behind it."""
    before = source.text[: bounds(source, arguments[-1])[0]]
    return not before.endswith(",")


def _stand_apart(call: ast.Call, arguments: list[ast.expr | ast.keyword]) -> bool:
    """Whether each argument has a line of its own; the first may stand beside the parenthesis, unless it is alone."""
    lines = [argument.lineno for argument in arguments]
    if len(lines) == 1 and arguments[0].end_lineno == call.end_lineno:
        return False
    return len(set(lines)) == len(lines) and lines[-1] > call.lineno


def _margin(source: Source, arguments: list[ast.expr | ast.keyword]) -> str:
    """The white space ahead of the line that the last argument starts on; up to the first, where both are on one."""
    line = source.lines[arguments[-1].lineno - 1]
    if arguments[0].lineno < arguments[-1].lineno:
        return line[: len(line) - len(line.lstrip(" \t"))]
    start = bounds(source, arguments[0])[0]
    return re.sub(r"[^\t]", " ", source.text[source.line_starts[arguments[0].lineno - 1] : start])
