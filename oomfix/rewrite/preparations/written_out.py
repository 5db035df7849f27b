"""The lines of a helper as they stand in the place of a call of it, and the file without the helper."""

from __future__ import annotations

import ast
import io
import operator
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.edits import apply_edits
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.nodes import is_remark, walk

_COMPARING: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Call(NamedTuple):
    """A call of a helper that is a statement of its own.

    Attributes:
        statement: the call.
        given: the argument of each parameter: a name, a path or a constant.
    """

    statement: ast.Expr
    given: Mapping[str, ast.expr]


class _Place(NamedTuple):
    """The white space that a line begins with in the helper, and where it is written out."""

    before: str
    after: str


def statements_of(helper: ast.FunctionDef) -> list[ast.stmt]:
    """What a helper does: its body without what documents it."""
    return helper.body[1:] if is_remark(helper.body[0]) else helper.body


def lines_of(helper: ast.FunctionDef, layout: Layout) -> Lines:
    """The lines of what a helper does, with all comments among them and behind."""
    body = statements_of(helper)
    header = (helper.body[0].end_lineno or helper.lineno) if body is not helper.body else helper.lineno
    last = layout.last_comment(layout.last_line(body[-1]), layout.margin(helper))
    return Lines(_first_with_comments(body[0], header, layout), last)


def _first_with_comments(statement: ast.stmt, above: int, layout: Layout) -> int:
    """The first line of the comments between line `above` and a statement, or of the statement."""
    first = number = statement.lineno
    while number - 1 > above and layout.source.lines[number - 2].lstrip()[:1] in ("#", ""):
        number -= 1
        first = number if layout.source.lines[number - 1].strip() else first
    return first


class WrittenOut:
    """What stands in the place of a call.

    Args:
        call: the call.
        helper: what it calls.
        reading: the file.
    """

    def __init__(self, call: Call, helper: ast.FunctionDef, reading: Reading) -> None:
        self._call, self._source, self._layout = call, reading.source, reading.layout
        self._body = statements_of(helper)
        place = _Place(self._layout.margin(self._body[0]), self._layout.margin(call.statement))
        lines = lines_of(helper, self._layout)
        self._places = dict.fromkeys(range(lines.first, lines.last + 1), place)
        self._edits: list[Edit] = []
        self._decide(self._body, first=True)

    @property
    def nodes(self) -> list[ast.AST]:
        """What is left of the helper: all but the branches that the constants it is given rule out."""
        nodes = walk(*self._body)
        return [node for node in nodes if getattr(node, "lineno", 0) in self._places]

    def edit(self) -> Edit:
        """The edit that puts the lines in the place of the call, below the comments behind that."""
        own = self._layout.own_lines(self._call.statement)
        assert own is not None
        span = self._layout.span(own)
        margin = self._layout.margin(self._call.statement)
        comments = [f"{margin}{comment}" for comment in _comments(self._source.text[slice(*span)])]
        return Edit(*span, self._layout.newline.join([*comments, *self._lines()]))

    def _lines(self) -> Iterator[str]:
        edits = [one for one in self._replaced() if not any(_covers(other, one) for other in self._edits)] + self._edits
        blank = True
        for number, place in sorted(self._places.items()):
            start, end = self._layout.span(Lines(number, number))
            inside = [
                Edit(one.start - start, one.end - start, one.replacement) for one in edits if start <= one.start < end
            ]
            line = apply_edits(self._source.text[start:end], inside)
            if line.strip() or not blank:
                yield _moved(line, place)
            blank = not line.strip()

    def _replaced(self) -> Iterator[Edit]:
        """The edits that put arguments in the place of parameters, and what is known of those in that of tests."""
        known = [node for node in self.nodes if isinstance(node, ast.Compare) and self._is(node) is not None]
        decided = {id(inner) for inner in walk(*known)}
        yield from (Edit(*bounds(self._source, node), str(self._is(node))) for node in known)
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id in self._call.given and id(node) not in decided:
                yield Edit(*bounds(self._source, node), self._source.segment(self._call.given[node.id]))

    # -- branches --------------------------------------------------------------------------------------------------

    def _decide(self, block: Sequence[ast.stmt], *, first: bool = False) -> None:
        """Leave out the branches of a block that never run; `first` says that others come if it has no other lines."""
        for statement in block:
            runs = self._is(statement.test) if isinstance(statement, ast.If) else None
            if isinstance(statement, ast.If) and runs is not None:
                chosen = _without_pass(statement.body if runs else statement.orelse)
                if self._has_lines(statement, chosen):
                    self._leave(statement, chosen, alone=not first and len(block) == 1)
                    continue
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, [])
                if name == "orelse" and inner and self._is_elif(inner[0]):
                    self._decide(inner[0].body)
                    inner = inner[0].orelse
                self._decide(inner)

    def _leave(self, branches: ast.If, block: list[ast.stmt], *, alone: bool) -> None:
        """Leave one of the branches, or none."""
        place, layout = self._places[branches.lineno], self._layout
        lines = self._lines_of_branch(branches, block)
        above = layout.source.text.count("\n", 0, layout.above_comments(branches)) + 1
        for number in range(branches.lineno if block or alone else above, layout.last_line(branches) + 1):
            if number not in lines:
                self._places.pop(number, None)
        if not block and alone:
            self._places[branches.lineno] = place
            header = layout.span(Lines(branches.lineno, branches.lineno))
            self._edits.append(Edit(*header, f"{layout.margin(branches)}pass"))
        if not block:
            return
        if self._is_elif(block[0]):
            start = bounds(self._source, block[0])[0]
            self._edits.append(Edit(start, start + len("el"), ""))
        else:
            after = place.after + layout.margin(branches).removeprefix(place.before)
            self._places.update(dict.fromkeys(lines, _Place(layout.margin(block[0]), after)))
        self._decide(block)

    def _lines_of_branch(self, branches: ast.If, block: list[ast.stmt]) -> range:
        """The lines of a block of an `if`, with the comments in it."""
        if not block:
            return range(0)
        last = self._layout.last_line(branches)
        if block is branches.body and branches.orelse:
            behind = _first_with_comments(branches.orelse[0], block[-1].end_lineno or 0, self._layout)
            last = (branches.orelse[0].lineno if self._is_elif(branches.orelse[0]) else behind - 1) - 1
            lines, margin = self._source.lines, self._layout.margin(branches)
            # comments on the other branch
            while not lines[last - 1].strip() or lines[last - 1].startswith(f"{margin}#"):
                last -= 1
        return range(_first_with_comments(block[0], branches.lineno, self._layout), last + 1)

    def _has_lines(self, branches: ast.If, block: list[ast.stmt]) -> bool:
        """Whether a block of an `if`, or the `if` where it is none of its blocks, shares no lines with anything."""
        text, starts = self._source.text, self._source.line_starts
        heads = [branches, *block[:1], *(branches.orelse[:1] if block is branches.body else [])]
        return not any(text[starts[one.lineno - 1] : bounds(self._source, one)[0]].strip() for one in heads)

    def _is_elif(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.If) and self._source.segment(statement).startswith("elif")

    def _is(self, test: ast.expr) -> bool | None:
        """Whether a test is true: `clip is not None` of `clip=None`; None where only the run knows."""
        match test:
            case ast.Name(name):
                given = self._call.given.get(name)
                return bool(given.value) if isinstance(given, ast.Constant) else None
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._is(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                known, ends = [self._is(one) for one in values], isinstance(op, ast.Or)
                if ends in known and not any(isinstance(node, ast.Call) for node in walk(*values)):
                    return ends
                return None if None in known or ends in known else not ends
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._is_so(left, op, right)
        return None

    def _is_so(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        """Whether a comparison is true of constants, one of which the helper is given."""
        sides = [self._call.given.get(one.id) if isinstance(one, ast.Name) else one for one in (left, right)]
        values: list[Any] = [one.value for one in sides if isinstance(one, ast.Constant)]
        if len(values) < 2 or (not isinstance(left, ast.Name) and not isinstance(right, ast.Name)):
            return None
        if type(op) not in _COMPARING or (isinstance(op, ast.Is | ast.IsNot) and None not in values):
            return None
        try:
            return bool(_COMPARING[type(op)](*values))
        except TypeError:
            return None


def _covers(edit: Edit, other: Edit) -> bool:
    return edit.start <= other.start < edit.end


def _moved(line: str, place: _Place) -> str:
    """A line with its new margin; blank lines have none, and comments further left get it whole."""
    if not line.strip():
        return line
    return place.after + (line.removeprefix(place.before) if line.startswith(place.before) else line.lstrip(" \t"))


def _without_pass(block: list[ast.stmt]) -> list[ast.stmt]:
    return [] if all(isinstance(one, ast.Pass) for one in block) else block


def _comments(text: str) -> list[str]:
    """The comments in the lines of a statement."""
    tokens = tokenize.generate_tokens(io.StringIO(text.strip(), newline="").readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def without(helper: ast.FunctionDef, layout: Layout) -> Edit:
    """The edit that takes a helper out, with the blank lines behind it; at the end of a block, with those before it."""
    lines, margin, starts = layout.source.lines, layout.margin(helper), layout.source.line_starts
    first = layout.source.text.count("\n", 0, layout.above_comments(helper)) + 1
    last = behind = lines_of(helper, layout).last
    while behind < len(lines) and not lines[behind].strip():
        behind += 1
    if behind in (last, len(lines)) or not lines[behind].startswith(margin):
        while first > 1 and not lines[first - 2].strip():
            first -= 1
    else:
        last = behind
    return Edit(starts[first - 1], layout.whole(Lines(helper.lineno, last))[1], "")
