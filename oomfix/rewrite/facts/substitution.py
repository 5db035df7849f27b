"""Names put in the place of expressions of a statement, in its text."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Mapping

from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.text.edits import apply_edits
from oomfix.script.syntax.edits import Edit, bounds


def substituted(reading: Reading, statement: ast.stmt, texts: Mapping[ast.expr, str]) -> list[Edit]:
    """The edits that put names in the place of expressions; none where the text would not mean that.

    Older Pythons tell wrong places for what is inside of f-strings.
    """
    source, layout = reading.source, reading.layout
    edits = [Edit(*bounds(source, node), text) for node, text in texts.items()]
    lines = layout.own_lines(statement)
    if lines is None:
        return []
    start, end = layout.span(lines)
    moved = [Edit(one.start - start, one.end - start, one.replacement) for one in edits]
    if any(one.start < 0 or one.end > end - start for one in moved):
        return []
    names = {id(node): ast.Name(text, ast.Load()) for node, text in texts.items()}
    wanted = ast.unparse(copy.deepcopy(statement, names))
    try:
        text = apply_edits(source.text[start:end], moved)
        found = ast.unparse(ast.parse(textwrap.dedent(text)))
    except (SyntaxError, ValueError):
        return []
    return edits if found == wanted else []
