"""Rewriting an import of `torch.cuda.amp` or `torch.cpu.amp` in place, so that it imports from `torch.amp`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from oomfix.script.fixes.amp_names import AmpImport, renamed
from oomfix.script.syntax.edits import Edit, bounds, newline_of, remove_statement, whole_lines
from oomfix.script.syntax.patterns import Pattern

if TYPE_CHECKING:
    from oomfix.source import Source

_MODULE_OF_FROM = Pattern(r"from[ \t]+([\w.]+)")


class CannotRewrite(Exception):
    """A rewrite that would not surely mean the same; the message says why, in a few words."""


def rewrite_import(source: Source, found: AmpImport, block: list[ast.stmt]) -> tuple[Edit, ...]:
    """The edits that turn an import statement of a block to the new names.

    Names that `torch.amp` does not have stay in the old statement.

    Raises:
        CannotRewrite: the statement has to be split and shares its line, or its names have comments between them.
    """
    new_path = {alias: renamed(path) or path for alias, path in found.names}
    if isinstance(found.statement, ast.Import):
        return _rewrite_modules(source, found.statement, new_path, block)
    return _rewrite_names(source, found.statement, new_path)


def _rewrite_modules(
    source: Source, statement: ast.Import, new_path: dict[ast.alias, str], block: list[ast.stmt]
) -> tuple[Edit, ...]:
    """`import torch.cuda.amp as amp` -> `import torch.amp as amp`."""
    known = _plainly_imported(statement, block)
    texts = {}
    for alias in statement.names:
        name = new_path.get(alias, alias.name)
        if alias.asname is None and alias in new_path:
            # what it binds is `torch`; the submodule below `torch.amp` comes with it
            name = "torch.amp"
            if name in known:
                continue
            known.add(name)
        texts[alias] = name if alias.asname is None else f"{name} as {alias.asname}"
    if len(texts) == len(statement.names):
        return tuple(Edit(*bounds(source, alias), texts[alias]) for alias in new_path)
    if texts:
        return _replace_names(source, statement, list(texts.values()))
    lines = whole_lines(source, statement)
    if lines is None or "#" in source.text[bounds(source, statement)[1] : lines[1]]:
        return (Edit(*bounds(source, statement), "import torch.amp"),)
    return remove_statement(source, statement, block)


def _plainly_imported(statement: ast.Import, block: list[ast.stmt]) -> set[str]:
    """The modules that `import` statements above it in the block name, as they will be after the rewrite."""
    above = block[: block.index(statement)]
    names = {
        alias.name for other in above if isinstance(other, ast.Import) for alias in other.names if alias.asname is None
    }
    return {"torch.amp"} if any((renamed(name) or name).startswith("torch.amp") for name in names) else set()


def _rewrite_names(source: Source, statement: ast.ImportFrom, new_path: dict[ast.alias, str]) -> tuple[Edit, ...]:
    """`from torch.cuda import amp, Event` -> `from torch import amp` and `from torch.cuda import Event`."""
    starred = statement.names[0].name == "*"
    module = next(iter(new_path.values()))
    if not starred:
        module = module.rpartition(".")[0]
    if len(new_path) == len(statement.names):
        start = bounds(source, statement)[0]
        match = _MODULE_OF_FROM.match(source.text, start)
        if match is None or match[1] != statement.module:
            raise CannotRewrite("its module is written over several lines")
        return (Edit(match.start(1), match.end(1), module),)
    kept = [alias for alias in statement.names if alias not in new_path]
    moved = ", ".join(_spelled(alias) for alias in new_path)
    return (
        insert_before(source, statement, f"from {module} import {moved}"),
        *_replace_names(source, statement, [_spelled(alias) for alias in kept]),
    )


def insert_before(source: Source, statement: ast.stmt, text: str) -> Edit:
    """A line of its own above a statement, indented as it is.

    Raises:
        CannotRewrite: the statement shares its line with another one before it.
    """
    line_start = source.line_starts[statement.lineno - 1]
    start = bounds(source, statement)[0]
    margin = source.text[line_start:start]
    if margin.strip() or source.text[: max(line_start - 1, 0)].rstrip("\r").endswith("\\"):
        raise CannotRewrite("the import shares its line")
    return Edit(start, start, f"{text}{newline_of(source)}{margin}")


def _replace_names(source: Source, statement: ast.Import | ast.ImportFrom, names: list[str]) -> tuple[Edit, ...]:
    """Put other names in the place of the imported ones, separated as they are."""
    spans = [bounds(source, alias) for alias in statement.names]
    start, end = spans[0][0], spans[-1][1]
    if "#" in source.text[start:end]:
        raise CannotRewrite("the imported names have comments between them")
    separator = source.text[spans[0][1] : spans[1][0]]
    return (Edit(start, end, separator.join(names)),)


def _spelled(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
