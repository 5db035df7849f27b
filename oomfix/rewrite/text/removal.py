"""Taking a statement out of its block, with what would be left hanging without it."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.text.layout import Layout, is_code
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.patterns import Pattern

_ABOUT_GRADIENTS = Pattern(
    r"zero|reset|clear|flush|clean|empt|none|initiali[sz]|updates? (the )?scale|scaler?\b.*(next|updat)|"
    r"normali[sz]e|(scale|divide|average|reduce|account).*(accum|step|batch)|grad\w*\b.*\b0\b|"
    r"更新\s*(scaler|缩放)|梯度.*(清|零|空|重置|初始)|(清|零|重置|初始).*梯度|"
    r"勾配.*(ゼロ|初期|リセット)|기울기.*(0|초기)",
    re.IGNORECASE,
)
_ABOUT_MORE = Pattern(
    r"forward|backward|\bstep\b|optimi[sz]e\b|compute|train|传播|更新(?!\s*(scaler|缩放))|优化|训练|计算|"
    r"逆伝播|学習|역전파|학습",
    re.IGNORECASE,
)

_END_OF_STATEMENTS = Pattern(r"[ \t]*(#|\r|\n|$)")


def without(layout: Layout, statement: ast.stmt, block: list[ast.stmt]) -> Edit:
    """The edit that takes out a statement that resets gradients, updates a loss scale or divides a loss.

    With it go a comment above that speaks of nothing else, the lines that its own comment goes on in, and one of two
    blank lines that would meet. A block left empty gets `pass`.
    """
    own = layout.own_lines(statement)
    if own is None or len(block) == 1:
        return _without_neighbours(layout, statement, block)
    lines = layout.source.lines
    first, last = own.first, _last_of_comment(layout, statement, own.last)
    if first >= 2 and _is_about(lines[first - 2]) and not (first >= 3 and _is_in_words(lines[first - 3])):
        first -= 1
    above = lines[first - 2].strip() if first >= 2 else ""
    below = lines[last + 1].lstrip() if last + 1 < len(lines) else ""
    # a comment that stays is one on what follows, if that has none
    heads = not above or above.endswith(":") or (above.startswith("#") and not below.startswith("#"))
    parted = last >= len(lines) or not lines[last].strip()
    if statement is not block[-1] and heads and parted:
        last += 1
    elif statement is block[-1] and not above and parted:
        first -= 1
    return layout.removed(own._replace(first=first, last=last))


def _last_of_comment(layout: Layout, statement: ast.stmt, last: int) -> int:
    """The last line of the comment behind a statement, which goes on in lines that are indented deeper than it."""
    lines, margin = layout.source.lines, layout.margin(statement)
    end = bounds(layout.source, statement)[1]
    if "#" not in layout.source.text[end : layout.source.line_starts[last - 1] + len(lines[last - 1])]:
        return last
    while last < len(lines) and lines[last].startswith((f"{margin} ", f"{margin}\t")):
        if not lines[last].lstrip().startswith("#"):
            break
        last += 1
    return last


def _without_neighbours(layout: Layout, statement: ast.stmt, block: list[ast.stmt]) -> Edit:
    """The edit that takes out a statement alone, of a line or block that it shares or fills; `pass` if it has to."""
    start, end = bounds(layout.source, statement)
    index = block.index(statement)
    if index + 1 < len(block) and block[index + 1].lineno == statement.end_lineno:
        return Edit(start, bounds(layout.source, block[index + 1])[0], "")
    if index and block[index - 1].end_lineno == statement.lineno:
        return Edit(bounds(layout.source, block[index - 1])[1], end, "")
    return Edit(start, end, "pass")


def together(text: str, edits: list[Edit]) -> list[Edit]:
    """Edits in which those that take out neighbours on one line, and so overlap, are one.

    The `;` ahead of it goes too where nothing follows on the line.
    """
    united: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        last = united[-1] if united else None
        if last is None or last.replacement or edit.replacement or edit.start >= last.end:
            united.append(edit)
            continue
        start, end = last.start, max(last.end, edit.end)
        if _END_OF_STATEMENTS.match(text, end):
            start = len(text[:start].rstrip(" \t;"))
        united[-1] = Edit(start, end, "")
    return united


def _is_in_words(line: str) -> bool:
    """Whether a line is a comment, and no code that is commented out."""
    comment = line.strip()
    return comment.startswith("#") and not is_code([comment[1:]])


def _is_about(line: str) -> bool:
    comment = line.strip()
    return comment.startswith("#") and bool(_ABOUT_GRADIENTS.search(comment)) and not _ABOUT_MORE.search(comment)
