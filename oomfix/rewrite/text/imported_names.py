"""Names taken out of an import, whatever the lines and comments that they stand on."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

Gap = cst.BaseParenthesizableWhitespace
"""What stands between two names behind the comma; in brackets it may hold a comment on each of its lines."""


def without_names(statement: str, names: Collection[str]) -> str:
    """A `from module import ...` without some of the names that it binds, the rest as it was written.

    A comment behind a name goes with the name; one on a line of its own stays.

    Args:
        statement: the text of the statement.
        names: what is not to be imported any more; not all that the statement binds.

    Raises:
        ValueError: the statement imports no names from a module, or none would be left.
    """
    module = cst.parse_module(statement)
    line = module.body[0]
    imported = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if not isinstance(imported, cst.ImportFrom) or isinstance(imported.names, cst.ImportStar):
        raise ValueError(f"expected `from module import name, ...`, got {statement!r}")
    kept, gaps = list(imported.names), _gaps(imported)
    for alias in imported.names:
        if (alias.evaluated_alias or alias.evaluated_name) in names:
            index = kept.index(alias)
            gaps[index : index + 2] = [_joined(gaps[index], gaps[index + 1], index == 0, alias is kept[-1])]
            del kept[index]
    if not kept:
        raise ValueError(f"no name would be left in {statement!r}")
    return module.with_deep_changes(imported, **_with_gaps(imported, kept, gaps)).code


def _gaps(imported: cst.ImportFrom) -> list[Gap]:
    """What stands before the first name, between each two, and behind the last."""
    assert not isinstance(imported.names, cst.ImportStar)
    first = imported.lpar.whitespace_after if imported.lpar is not None else cst.SimpleWhitespace("")
    behind = [alias.comma.whitespace_after for alias in imported.names if isinstance(alias.comma, cst.Comma)]
    if len(behind) < len(imported.names):
        behind.append(imported.rpar.whitespace_before if imported.rpar is not None else cst.SimpleWhitespace(""))
    return [first, *behind]


def _joined(before: Gap, after: Gap, is_first: bool, is_last: bool) -> Gap:
    """What is left of the gaps on both sides of a name that goes."""
    if not isinstance(after, cst.ParenthesizedWhitespace):
        if not is_last:
            return before
        if isinstance(before, cst.ParenthesizedWhitespace) and _speaks(before):
            return before.with_changes(last_line=after)  # its comment stays, and the bracket below it
        return after
    if isinstance(before, cst.ParenthesizedWhitespace):
        return before.with_changes(empty_lines=[*before.empty_lines, *after.empty_lines], last_line=after.last_line)
    if is_first and not after.empty_lines:
        return before
    # between names of one line, the comment at its end speaks of the whole line
    return after.with_deep_changes(after.first_line, comment=None) if is_first or is_last else after


def _speaks(gap: cst.ParenthesizedWhitespace) -> bool:
    return gap.first_line.comment is not None or any(line.comment is not None for line in gap.empty_lines)


def _with_gaps(imported: cst.ImportFrom, kept: list[cst.ImportAlias], gaps: list[Gap]) -> dict[str, object]:
    """The changes of an import to these names, with these gaps around them."""
    changes: dict[str, object] = {}
    names = [
        alias.with_changes(comma=_comma(alias).with_changes(whitespace_after=gap))
        for alias, gap in zip(kept, gaps[1:], strict=True)
    ]
    assert not isinstance(imported.names, cst.ImportStar)
    if not isinstance(imported.names[-1].comma, cst.Comma):
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        if imported.rpar is not None:
            changes["rpar"] = imported.rpar.with_changes(whitespace_before=gaps[-1])
    if imported.lpar is not None:
        changes["lpar"] = imported.lpar.with_changes(whitespace_after=gaps[0])
    return {**changes, "names": names}


def _comma(alias: cst.ImportAlias) -> cst.Comma:
    return alias.comma if isinstance(alias.comma, cst.Comma) else cst.Comma()
