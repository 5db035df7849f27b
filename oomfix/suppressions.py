"""Comments that silence findings: `# oomfix: ignore[OOM101]`, `# oomfix: ignore`, `# oomfix: ignore-file`."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from oomfix.rules.base import Severity
from oomfix.source import Source

_DIRECTIVE = re.compile(r"#\s*oomfix:\s*(?P<text>[^#]*)")
_CODE_OUTSIDE = re.compile(r"[\s:=(,]*(OOM\d+)", re.IGNORECASE)
_IGNORE = re.compile(r"(?P<scope>ignore-file|ignore)(\s*\[(?P<codes>[\w\s,]*)\])?(?![-\w\[])")
_LAYOUT = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT})


class UnusedSuppression:
    """A `# oomfix:` comment silences nothing.

    Why: a comment that outlives its finding hides the next one on that line.

    Quiet when: the rule it names was not run (`--select`, `--ignore`).

    Fix: remove the comment. Where comments belong:

    - `# oomfix: ignore[OOM101]`, or `# oomfix: ignore` for every rule, at the end of any line of the statement;
    - `# oomfix: ignore-file` or `# oomfix: ignore-file[OOM101]` anywhere in the file.
    """

    code: ClassVar[str] = "OOM001"
    name: ClassVar[str] = "unused-suppression"
    severity: ClassVar[Severity] = Severity.NOTE


class Comment(NamedTuple):
    """One `# oomfix:` comment.

    Attributes:
        line, column, end_column: its place in the source, 1-based, in characters, the end exclusive.
        codes: the codes or prefixes it names; empty for every rule.
        whole_file: whether it is an `ignore-file`.
        problem: why it can silence nothing, or None.
    """

    line: int
    column: int
    end_column: int
    codes: tuple[str, ...]
    whole_file: bool
    problem: str | None

    def names(self, code: str) -> bool:
        """Whether the comment speaks of findings with this code."""
        return not self.codes or code.startswith(self.codes)


def comments(source: Source) -> list[Comment]:
    """Every `# oomfix:` comment of a source, by line. A string that looks like one is none."""
    if "oomfix:" not in source.text:
        return []
    return list(_comments(source))


def _comments(source: Source) -> Iterator[Comment]:
    lines = iter([line + "\n" for line in source.lines])
    last_code_line = 0
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type not in _LAYOUT:
            last_code_line = token.end[0]
        match = _DIRECTIVE.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            line, start = token.start
            yield _read(match, line, start + match.start() + 1, after_code=last_code_line == line)


def _read(match: re.Match[str], line: int, column: int, *, after_code: bool) -> Comment:
    text = match["text"].rstrip()
    end_column = column + len(match.group().rstrip())
    ignore = _IGNORE.match(text)
    if not ignore:
        message = f"`oomfix: {text}` is not understood; expected `ignore`, `ignore[OOM101]` or `ignore-file`"
        return Comment(line, column, end_column, (), False, message)
    codes = tuple(code.upper() for code in re.split(r"[\s,]+", ignore["codes"] or "") if code)
    whole_file = ignore["scope"] == "ignore-file"
    problem: str | None = None
    outside = _CODE_OUTSIDE.match(text, ignore.end()) if ignore["codes"] is None else None
    if outside:
        # taken as `ignore`, it would silence every rule where one was meant
        problem = f"{outside[1].upper()} stands outside of brackets; write `{ignore['scope']}[{outside[1].upper()}]`"
    elif ignore["codes"] is not None and not codes:
        problem = "the brackets are empty; name a code, as in `ignore[OOM101]`"
    elif not whole_file and not after_code:
        problem = "silences nothing on a line of its own; put it at the end of a line of the statement"
    return Comment(line, column, end_column, codes, whole_file, problem)


class Statements:
    """The lines of every statement, to find the one that a finding belongs to.

    Of a compound statement (`if`, `for`, `with`, `def`) only the header counts: a comment inside the body
    belongs to the statements there.
    """

    def __init__(self, tree: ast.Module) -> None:
        extents = (_extent(node) for node in ast.walk(tree) if isinstance(node, ast.stmt))
        self._of_line: dict[int, range] = {}
        # outermost first, so that the last one around a line is the innermost
        for first, last, header in sorted(extents, key=lambda e: (e[0], -e[1])):
            self._of_line.update((line, range(first, header + 1)) for line in range(first, header + 1))
            # an `except` or `else` line lies in its statement, but in no header
            self._of_line.update((line, range(line, line + 1)) for line in range(header + 1, last + 1))

    def lines(self, line: int) -> range:
        """The lines of the innermost statement around a line."""
        return self._of_line.get(line, range(line, line + 1))


def _extent(node: ast.stmt) -> tuple[int, int, int]:
    """First line, last line, last line of the header."""
    last = node.end_lineno or node.lineno
    first = _first_line(node)
    if isinstance(node, ast.Match):
        body_line = node.cases[0].pattern.lineno
    elif isinstance(body := getattr(node, "body", None), list):
        body_line = _first_line(body[0])
    else:
        return first, last, last
    return first, last, max(node.lineno, body_line - 1)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
