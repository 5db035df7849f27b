"""The micro-batched form: the slice of a loss, written as a function that the manager runs in parts."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from oomfix.rewrite.dataflow.on_gradients import trains
from oomfix.rewrite.facts.lift import CannotLift, JoinedStatements, Lift
from oomfix.rewrite.text.free_names import FreeNames
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.nodes import blocks, is_remark, walk


class Lifting:
    """Writes slices as functions.

    Args:
        layout: the text they stand in.
        manager: the name of the runtime's manager.
        names: the free names of the file.
    """

    def __init__(self, layout: Layout, manager: str, names: FreeNames) -> None:
        self._layout = layout
        self._names = names
        self._source = layout.source
        self._manager = manager
        self._unread = names.one_of("loss", "batch_loss")
        """For a loss that nobody reads where `_` is taken."""
        self._function = self._method = ""
        self._parted = -1
        """Where the text goes on below an edit that ends with a blank line."""

    def edits(self, lift: Lift, function: str, method: str) -> list[Edit]:
        """The edits that put a slice into a function of this name, and have a method of the manager run it.

        The call takes the place of the backward. What stood between moves behind it; comments and blank lines stay with
        their statements.

        Raises:
            CannotLift: statements share lines, so that their text cannot be moved.
        """
        self._function, self._method = function, f"{self._manager}.{method}"
        text = _Text(lift, self._layout)
        definition = self._definition(lift, text)
        after = [line for statement in lift.after for line in text.moved(statement, text.margin)]
        newline = self._layout.newline
        if lift.site.branch is not None:
            return [*self._around_branch(lift, text, definition, after), *self._without_names(lift)]
        backward = text.chunk(lift.site.statement)
        comments = self._layout.moved(Lines(backward.first, lift.site.statement.lineno - 1), text.margin, text.margin)
        call = self._call(lift, self._method, text.margin)
        end = self._layout.last_line(lift.site.statement)
        below = self._layout.moved(Lines(end + 1, backward.last), text.margin, text.margin)
        _, stop = self._layout.span(backward)
        _, ended = self._layout.span(Lines(end, end))
        behind = self._source.text[bounds(self._source, lift.site.statement)[1] : ended].strip()
        if behind.startswith("#") and len(f"{call[-1]}  {behind}") > self._layout.longest_line:
            comments, behind = [*comments, text.margin + behind], ""
        behind = f"  {behind}" if behind and not behind.startswith(";") else behind
        if after and text.begins_a_paragraph(lift):
            after.append("")
        resets = [line for statement in self._resets_behind(lift) for line in text.moved(statement, text.margin)]
        if resets and resets[0].strip():
            resets = ["", *resets]
        if not resets or text.is_parted(lift.site.statement):
            resets.append("")
        bound = self._bound_under_tests(lift, text.margin)
        if text.start == self._parted and definition[0] == "":
            del definition[0]
        lines = [*definition, *resets, *comments, *call[:-1], call[-1] + behind, *bound, *below, *after]
        self._parted = -1 if lines[-1] else stop + len(newline)
        return [Edit(text.start, stop, newline.join(lines)), *self._without_names(lift)]

    @staticmethod
    def _resets_behind(lift: Lift) -> list[ast.stmt]:
        """The resets of gradients that stood behind all of the slice: between function and call, they stay in place.

        So do strings about them and about the backward.
        """
        if lift.site.branch is not None or not lift.lifted:
            return []
        behind = (one for one in lift.before if one.lineno > lift.lifted[-1].lineno)
        return [one for one in behind if one in lift.resets or is_remark(one)]

    def _without_names(self, lift: Lift) -> Iterator[Edit]:
        """What is not needed any more outside of the function."""
        yield from self._without_deleted(lift)
        lines = self._source.lines
        for statement in lift.moved:
            if self._layout.own_lines(statement) and not lines[statement.lineno - 2].lstrip().startswith("#"):
                yield without(self._layout, statement, lift.site.block)

    def _without_deleted(self, lift: Lift) -> Iterator[Edit]:
        """Names that live in the function now, taken out of the `del` behind it."""
        for statement, names in lift.deletes.items():
            kept = [t for t in statement.targets if not (isinstance(t, ast.Name) and t.id in names)]
            if not names:
                continue
            start, end = bounds(self._source, statement)
            if kept:
                yield Edit(start, end, f"del {', '.join(self._source.segment(target) for target in kept)}")
                continue
            lines = self._layout.own_lines(statement)
            if lines is None or any(block == [statement] for block in blocks(walk(lift.site.scope))):
                yield Edit(start, end, "pass")
            else:
                yield self._layout.removed(self._layout.with_gap(lines))

    def _around_branch(self, lift: Lift, text: _Text, definition: list[str], after: list[str]) -> list[Edit]:
        """A loss that only `if train:` differentiates; on the other side it is evaluated, read or not.

        A network draws numbers for dropout and counts batches there too. `with timer():` has no other side.
        """
        branch, newline = lift.site.branch, self._layout.newline
        assert branch is not None
        chunk = text.chunk(branch)
        start, stop = self._layout.span(chunk._replace(last=self._layout.last_line(branch)))
        statement = lift.site.statement
        if self._layout.own_lines(statement) is None:
            raise JoinedStatements(statement.lineno)
        inner = self._layout.margin(statement)
        call = newline.join(self._call(lift, self._method, inner))
        edits = [Edit(text.start, start, newline.join([*definition, "", ""]))]
        if lift.reading:
            edits += self._ahead_of_readers(lift, call)
        else:
            edits.append(Edit(*bounds(self._source, statement), call[len(inner) :]))
        for block in filter(None, lift.site.other_sides):
            edits.append(self._evaluation_at_top(lift, block, text))
        if [] in lift.site.other_sides:
            after = [f"{text.margin}else:", *self._call(lift, f"{self._manager}.evaluate", inner), *after]
        if after:
            edits.append(Edit(stop, stop, "".join(newline + line for line in after)))
        return edits

    def _evaluation_at_top(self, lift: Lift, block: list[ast.stmt], text: _Text) -> Edit:
        """The call that evaluates the loss, ahead of a branch that does not differentiate it through the manager.

        One that a flag of the script switches off may still differentiate it by itself: `if amp: ... else: ...`.
        """
        line = block[0].lineno
        margin = self._layout.margin(block[0])
        if self._layout.chunk(block[0], block, line - 1) is None or margin == text.margin:
            raise CannotLift(f"the branch that begins in line {line} shares its line")
        here = self._source.line_starts[line - 1]
        trained = any(map(trains, block))
        lines = self._call(lift, "" if trained else f"{self._manager}.evaluate", margin)
        return self._layout.inserted(here, lines)

    def _ahead_of_readers(self, lift: Lift, call: str) -> Iterator[Edit]:
        """The call ahead of what reads its result in the branch, where the backward stood behind that."""
        branch = lift.site.branch
        assert branch is not None
        first = self._layout.chunk(lift.reading[0], lift.site.side, branch.lineno)
        backward = self._layout.own_lines(lift.site.statement)
        if first is None or backward is None or lift.reading[0].lineno == branch.lineno:
            raise JoinedStatements(lift.reading[0].lineno)
        here = self._layout.span(first)[0]
        yield Edit(here, here, call + self._layout.newline)
        yield self._layout.removed(backward)

    def _definition(self, lift: Lift, text: _Text) -> list[str]:
        body: list[str] = []
        for statement in lift.copied:
            own = self._layout.chunk(statement, [statement], statement.lineno)
            if own is None:
                raise JoinedStatements(statement.lineno)
            body += self._layout.moved(own, text.margin, text.inner)
        for statement in lift.lifted:
            body += text.moved(statement, text.inner)
        body = body[1:] if body and not body[0] else body
        resets = self._resets_behind(lift)
        ahead = (statement for statement in lift.before if statement not in resets)
        lines = [line for statement in ahead for line in text.moved(statement, text.margin)]
        stands_below = text.above and not text.above.endswith(":")
        lines = lines[1:] if lines and not lines[0].strip() and not stands_below else lines
        if lines or stands_below:
            lines.append("")
        lines += self._broken(f"{text.margin}def {self._function}(", lift.inputs, "):")
        lines += body
        root = self._moved_root(lift.site.root, text)
        if lift.outputs or "\n" in root:
            root = _in_brackets(lift.site.root, root)
        outputs = [self._given(name, lift.bound_if.get(name)) for name in lift.outputs]
        returned = ", ".join([root, *outputs])
        if "\n" in returned or len(text.inner) + 7 + len(returned) <= self._layout.longest_line:
            return [*lines, *f"{text.inner}return {returned}".splitlines()]
        return [*lines, *self._broken(f"{text.inner}return (", [root, *outputs], ")")]

    def _root_text(self, root: ast.expr) -> str:
        """The loss as the file writes it; one that was put together here has no place in the file."""
        text = self._source.segment(root) if root.lineno > 1 else ""
        return text if text and ast.unparse(root) == _unparsed(text) else ast.unparse(root)

    def _moved_root(self, root: ast.expr, text: _Text) -> str:
        """The loss behind `return`, its further lines as far to the right of it as they were."""
        first, *further = self._root_text(root).split("\n")
        strings = (node for node in walk(root) if isinstance(node, ast.Constant | ast.JoinedStr))
        if not further or "\t" in text.inner or any(node.end_lineno != node.lineno for node in strings):
            return "\n".join([first, *further])
        columns = [len(line) - len(line.lstrip()) for line in further]
        moved = len(text.inner) - len(text.margin)
        if min(columns) == len(text.margin + self._layout.unit) and not first.endswith(("(", "[", "{")):
            moved += len("return (") - len(self._layout.unit)  # all of it stood a level in, within brackets
        elif not first.endswith(("(", "[", "{")):
            moved += len("return ")
        margins = (" " * max(column + moved, len(text.inner)) for column in columns)
        return "\n".join(
            [first, *((margin + line.strip()).rstrip() for margin, line in zip(margins, further, strict=True))]
        )

    def _call(self, lift: Lift, method: str, margin: str) -> list[str]:
        """The call of the slice's function, by a method of the manager or, for "", as any other."""
        given = [self._given(name, lift.given_if.get(name)) for name in lift.inputs]
        # one sample: never cut, since it keeps state or is one sequence
        size = ["batch_size=1"] if lift.state is not None or lift.one_sample is not None else []
        called, arguments = (method, [self._function, *given, *size]) if method else (self._function, given)
        targets = self._targets(lift)
        start = f"{margin}{', '.join(targets)} = " if targets else margin
        above: list[str] = []
        if len(targets) > 1 and len(f"{start}{called}(") > self._layout.longest_line:
            above, start = [f"{margin}(", *self._filled(margin, targets)], f"{margin}) = "
        return [*above, *self._broken(f"{start}{called}(", arguments, ")")]

    def _targets(self, lift: Lift) -> list[str]:
        """`loss, out` as far as they are read later."""
        loss = lift.loss if lift.loss_is_read else None
        if not lift.outputs:
            return [loss] if loss else []
        unread = (lift.loss or self._unread) if lift.underscore_is_taken else "_"
        names = [self._names.one_of(f"its_{name}") if name in lift.bound_if else name for name in lift.outputs]
        return [loss or unread, *names]

    def _bound_under_tests(self, lift: Lift, margin: str) -> list[str]:
        """What binds the outputs that are bound under tests alone, as the slice did: on other ways they stay."""
        lines = []
        for test, names in itertools.groupby(lift.bound_if, key=lambda name: self._test_text(lift.bound_if[name])):
            targets = list(names)
            values = ", ".join(self._names.one_of(f"its_{name}") for name in targets)
            lines += [f"{margin}if {test}:", f"{margin}{self._layout.unit}{', '.join(targets)} = {values}"]
        return lines

    def _given(self, name: str, test: ast.expr | None) -> str:
        if test is None:
            return name
        return f"{name} if {self._test_text(test)} else None"

    def _test_text(self, test: ast.expr) -> str:
        text = self._root_text(test)
        return text if text.isprintable() else ast.unparse(test)

    def _broken(self, start: str, items: list[str], end: str) -> list[str]:
        """One line, or as many as it takes where that would be too long."""
        inside = ", ".join(items)
        if not items or len(start + inside + end) <= self._layout.longest_line:
            return [start + inside + end]
        margin = start[: len(start) - len(start.lstrip())]
        return [start, *self._filled(margin, items), f"{margin}{end}"]

    def _filled(self, margin: str, items: list[str]) -> list[str]:
        """The lines between brackets that stand at a margin, each as full as may be."""
        inner = margin + self._layout.unit
        filled = [inner + items[0]]
        for item in items[1:]:
            if len(f"{filled[-1]}, {item},") <= self._layout.longest_line:
                filled[-1] += f", {item}"
            else:
                filled[-1] += ","
                filled.append(inner + item)
        return filled


class _Text:
    """The text of the block that a slice stands in."""

    def __init__(self, lift: Lift, layout: Layout) -> None:
        site = lift.site
        self._layout = layout
        self._header = site.header
        end = site.block.index(site.end)
        first = min((site.block.index(other) for other in (*lift.lifted, *lift.before, *lift.after)), default=end)
        self._chunks: dict[int, Lines] = {}
        for statement in site.block[first : end + 1]:
            lines = layout.chunk(statement, site.block, site.header)
            if lines is None:
                raise JoinedStatements(statement.lineno)
            self._chunks[id(statement)] = lines
        top = self._chunks[id(site.block[first])]
        self.margin = layout.margin(site.end)
        self.inner = self.margin + self._unit()
        self.start = layout.span(top)[0]
        self.above = layout.source.lines[top.first - 2].strip() if top.first > 1 else ""

    def _unit(self) -> str:
        """One level of indentation as the blocks around the slice are written."""
        line = self._layout.source.lines[self._header - 1] if self._header else ""
        outer = line[: len(line) - len(line.lstrip(" \t"))]
        if line.strip() and self.margin.startswith(outer) and len(outer) < len(self.margin):
            return self.margin[len(outer) :]
        return self._layout.unit

    def chunk(self, statement: ast.stmt) -> Lines:
        """A statement's lines, comments above it included."""
        return self._chunks[id(statement)]

    def moved(self, statement: ast.stmt, to: str) -> list[str]:
        """A statement's lines at another margin, with the blank line that stands above them."""
        lines = self.chunk(statement)
        blank = Lines(lines.first - 1, lines.first - 1)
        above = self._layout.moved(blank, self.margin, to) if self.is_parted(statement) else []
        return above + self._layout.moved(lines, self.margin, to)

    def is_parted(self, statement: ast.stmt) -> bool:
        """Whether a blank line stands above a statement and its comments."""
        above = self.chunk(statement).first - 1
        return above > self._header and not self._layout.source.lines[above - 1].strip()

    def begins_a_paragraph(self, lift: Lift) -> bool:
        """Whether the backward, and what goes up with it, leaves the rest of a paragraph without its blank line."""
        block, gone = lift.site.block, {id(statement) for statement in (*lift.lifted, *lift.before)}
        first: ast.stmt = lift.site.statement
        while not self.is_parted(first) and (index := block.index(first)) and id(block[index - 1]) in gone:
            first = block[index - 1]
        lines, last = self._layout.source.lines, self.chunk(lift.site.statement).last
        below = lines[last] if last < len(lines) else ""
        return self.is_parted(first) and below.startswith(self.margin) and bool(below.strip())


def _unparsed(text: str) -> str:
    try:
        return ast.unparse(ast.parse(f"({text}\n)", mode="eval"))
    except SyntaxError:
        return ""


def _in_brackets(root: ast.expr, text: str) -> str:
    """An expression that may stand in a tuple, on as many lines as it has."""
    open_ended = isinstance(root, ast.Lambda | ast.IfExp | ast.Tuple | ast.NamedExpr) or (
        "\n" in text and not isinstance(root, ast.Call | ast.Subscript)
    )
    return f"({text})" if open_ended else text
