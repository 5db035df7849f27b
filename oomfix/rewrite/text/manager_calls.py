"""The call of a model, written as a call of the manager: broken and aligned as the file does it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from oomfix.rewrite.text.layout import Layout
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.nodes import walk


def through_manager(layout: Layout, calls: Collection[ast.Call], method: str) -> list[Edit]:
    """`model(x)` as `memory.forward(model, x)`, or another method of the manager.

    Args:
        layout: the text.
        calls: of models.
        method: `memory.forward`, for example.
    """
    inside = {id(node) for call in calls for node in walk(call) if node is not call}
    written = (_Call(layout, call, method) for call in calls)
    return [edit for one in written for edit in one.edits(alone=id(one.call) not in inside)]


class _Call:
    """One call; offsets are those of the text before."""

    def __init__(self, layout: Layout, call: ast.Call, method: str) -> None:
        self.call = call
        self._layout = layout
        self._source = layout.source
        self._method = method
        self._start, self._function_end = bounds(self._source, call.func)
        self._model = self._source.text[self._start : self._function_end]
        self._behind = self._source.text.index("(", self._function_end) + 1
        self._arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        self._arguments.sort(key=lambda argument: (argument.lineno, argument.col_offset))

    def edits(self, *, alone: bool) -> Iterator[Edit]:
        """The edits of this call; one within another one that is written so keeps its lines."""
        yield Edit(self._start, self._function_end, self._method)
        if self._arguments and bounds(self._source, self._arguments[0])[0] < self._behind:
            yield from self._before_generator()
        elif not self._arguments or not alone or self._line_of(self._behind) == self.call.end_lineno:
            yield Edit(self._behind, self._behind, f"{self._model}, " if self._arguments else self._model)
        elif self._arguments[0].lineno > self._line_of(self._behind):
            yield self._on_the_first_arguments_line()
        else:
            yield from self._aligned()

    def _line_of(self, offset: int) -> int:
        return self._source.position(offset)[0]

    def _text_of(self, line: int) -> str:
        return self._source.lines[line - 1]

    def _before_generator(self) -> Iterator[Edit]:
        """`model(part for part in x)`: a generator that is not the only argument has parentheses of its own."""
        end = bounds(self._source, self.call)[1] - 1
        yield Edit(self._behind, self._behind, f"{self._model}, (")
        yield Edit(end, end, ")")

    def _on_the_first_arguments_line(self) -> Edit:
        """`model(` and its arguments below: the model is one more of them."""
        first = self._arguments[0]
        start = bounds(self._source, first)[0]
        beside = sum(argument.lineno == first.lineno for argument in self._arguments) > 1
        if beside and len(self._text_of(first.lineno)) + len(f"{self._model}, ") <= self._layout.longest_line:
            return Edit(start, start, f"{self._model}, ")
        margin = _margin(self._text_of(first.lineno))
        return Edit(start, start, f"{self._model},{self._layout.newline}{margin}")

    def _aligned(self) -> Iterator[Edit]:
        """Arguments that begin behind the parenthesis; lines that stand below them still do."""
        first = self._line_of(self._behind)
        column = self._behind - self._source.line_starts[first - 1]
        below = [
            number
            for number in range(first + 1, (self.call.end_lineno or first) + 1)
            if number not in self._layout.inside_strings and len(_margin(self._text_of(number))) >= column
        ]
        shift = len(self._method) - len(self._model)
        lines = [len(self._text_of(first)) + len(f"{self._method}, "), *(len(self._text_of(n)) + shift for n in below)]
        given = f"{self._model}, "
        if below and max(lines) > self._layout.longest_line:
            inner = _margin(self._text_of(first)) + self._layout.unit
            shift = len(inner) - column
            given = f"{self._layout.newline}{inner}{given}"
        yield Edit(self._behind, self._behind, given)
        for number in below:
            indented = self._source.line_starts[number - 1] + len(_margin(self._text_of(number)))
            yield Edit(indented + min(shift, 0), indented, " " * shift)


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]
