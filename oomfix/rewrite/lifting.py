"""The micro-batched form: the slice of a loss, written as a function that the manager runs in parts."""

from __future__ import annotations

import ast

from oomfix.rewrite.layout import Layout, Lines
from oomfix.rewrite.slices import CannotLift, Lift
from oomfix.script.edits import Edit


def lift_edit(lift: Lift, layout: Layout, manager: str, function: str, longest_line: int) -> Edit:
    """The edit that puts a slice into a function and calls it in place of the backward.

    What stood between moves behind the call, comments with their statements; a comment above the first statement
    of the slice goes with it.

    Args:
        lift: the slice.
        layout: the text it stands in.
        manager: the name of the runtime's manager.
        function: a free name.
        longest_line: no line written here is longer, as long as it can be broken.

    Raises:
        CannotLift: statements share lines, so that their text cannot be moved.
    """
    block, header = lift.site.block, lift.site.header
    end = block.index(lift.site.statement)
    first = min((block.index(statement) for statement in (*lift.lifted, *lift.before, *lift.after)), default=end)
    chunks = {id(statement): _chunk(layout, statement, block, header) for statement in block[first : end + 1]}
    margin = layout.margin(lift.site.statement)
    inner = margin + layout.unit

    def moved(statement: ast.stmt, to: str) -> list[str]:
        lines = chunks[id(statement)]
        # a blank line between two statements stays between them
        blank = [""] if lines.first - 1 > header and not layout.source.lines[lines.first - 2].strip() else []
        return blank + layout.moved(lines, margin, to)

    body: list[str] = []
    for statement in lift.copied:
        own = _chunk(layout, statement, [statement], statement.lineno)
        body += layout.moved(own, margin, inner)
    for statement in lift.lifted:
        body += moved(statement, inner)
    body = body[1:] if body and not body[0] else body
    backward = chunks[id(lift.site.statement)]
    comments = layout.moved(Lines(backward.first, lift.site.statement.lineno - 1), margin, margin)
    root = layout.source.segment(lift.site.root)
    lines = [line for statement in lift.before for line in moved(statement, margin)]
    lines = lines[1:] if lines and not lines[0] else lines
    top = chunks[id(block[first])].first
    above = layout.source.lines[top - 2].strip() if top > 1 else ""
    if lines or (above and not above.endswith(":")):
        lines.append("")
    lines.append(f"{margin}def {function}({', '.join(lift.inputs)}):")
    lines += body
    returned = ", ".join([_in_brackets(lift.site.root, root), *lift.outputs])
    lines += _broken(f"{inner}return ", returned, longest_line, layout.unit)
    lines += ["", *comments]
    call = f"{manager}.forward_backward({', '.join([function, *lift.inputs])})"
    lines += _broken(margin + _targets(lift), call, longest_line, layout.unit)
    after = [line for statement in lift.after for line in moved(statement, margin)]
    start, _ = layout.span(chunks[id(block[first])])
    _, stop = layout.span(backward)
    trailing = layout.source.text[layout.source.offset(*_end(lift.site.statement)) : stop]
    if trailing.strip():
        lines[-1] += trailing.rstrip()
    return Edit(start, stop, layout.newline.join(lines + after))


def _end(statement: ast.stmt) -> tuple[int, int]:
    assert statement.end_lineno is not None and statement.end_col_offset is not None
    return statement.end_lineno, statement.end_col_offset


def _chunk(layout: Layout, statement: ast.stmt, block: list[ast.stmt], header: int) -> Lines:
    lines = layout.chunk(statement, block, header)
    if lines is None:
        raise CannotLift(f"line {statement.lineno} holds more than one statement")
    return lines


def _targets(lift: Lift) -> str:
    """`loss, out = ` as far as they are read later."""
    loss = lift.loss if lift.loss_is_read and lift.loss is not None else None
    if not lift.outputs:
        return f"{loss} = " if loss else ""
    return f"{', '.join([loss or '_', *lift.outputs])} = "


def _in_brackets(root: ast.expr, text: str) -> str:
    """An expression that may stand in a tuple, on as many lines as it has."""
    open_ended = isinstance(root, ast.Lambda | ast.IfExp | ast.Tuple | ast.NamedExpr) or (
        "\n" in text and not isinstance(root, ast.Call | ast.Subscript)
    )
    return f"({text})" if open_ended else text


def _broken(start: str, rest: str, longest_line: int, unit: str) -> list[str]:
    """One line, or one broken inside of the last call's brackets where it would be too long."""
    if len(start + rest) <= longest_line or "\n" in rest:
        return (start + rest).split("\n")
    margin = start[: len(start) - len(start.lstrip())]
    head, bracket, tail = rest.partition("(")
    if bracket and rest.endswith(")") and "." in head:
        return [f"{start}{head}(", f"{margin}{unit}{tail[:-1]}", f"{margin})"]
    return [f"{start}(", f"{margin}{unit}{rest}", f"{margin})"]
