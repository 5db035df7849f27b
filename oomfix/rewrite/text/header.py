"""The manager at the top of a rewritten module: the import of the runtime, and the line that makes it."""

from __future__ import annotations

import ast
import math

from oomfix.rewrite.text.free_names import FreeNames
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.script import Script
from oomfix.script.syntax.edits import Edit, quote_of
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.patterns import Pattern

Overrides = dict[str, object]

_BEGIN_OF_CELL = Pattern(r"\.\.\.  # \w+ \d+$")
"""The marker at the top of each cell of a notebook."""

_COMMENTED_OUT = Pattern(r"#[ \t]*(import [\w., ]+|from [\w.]+ import [\w*, ]+)(#.*)?$")
"""An import at the margin that is commented out."""


def manager_in(script: Script) -> str | None:
    """The name of the manager that a module has already made at its top, or None."""
    made = _manager_made_in(script)
    return None if made is None else path_of(made.targets[0])


def other_preset_in(script: Script, preset: str) -> str | None:
    """What to say of a manager that a module has already made for another preset; None where there is none."""
    match _manager_made_in(script):
        case ast.Assign(value=ast.Call(args=[ast.Constant(made), *_]), lineno=line) if made != preset:
            return f"line {line} makes the manager for {made!r}: write {preset!r} there to train in that"
    return None


def _manager_made_in(script: Script) -> ast.Assign | None:
    body = script.source.tree.body
    optional = (inner for statement in body if isinstance(statement, ast.Try) for inner in statement.body)
    for statement in (*body, *optional):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call) and len(statement.targets) == 1:
            if "oomfix.runtime.preset" in script.imports.qualified(statement.value.func):
                return statement
    return None


def runtime_name(body: list[ast.stmt], names: FreeNames) -> str:
    """What a module calls the runtime: by an import of its own at its top, or by one that it is to get."""
    return _runtime_imported(body) or names.one_of("runtime", "oomfix_runtime")


def _runtime_imported(body: list[ast.stmt]) -> str | None:
    last = _last_import(body)
    for statement in body[: body.index(last) + 1] if last is not None else ():
        if isinstance(statement, ast.ImportFrom) and statement.module == "oomfix" and not statement.level:
            for alias in statement.names:
                if alias.name == "runtime":
                    return alias.asname or alias.name
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.name == "oomfix.runtime":
                    return alias.asname or alias.name
    return None


def header_edits(
    layout: Layout, names: FreeNames, manager: str, preset: str, overrides: Overrides, first_use: int
) -> list[Edit]:
    """Import the runtime where it belongs among the imports, unless it is there, and make the manager behind them.

    Args:
        layout: the module's text.
        names: its free names.
        manager: the name for the manager.
        preset: the preset's name.
        overrides: fields of `Preset` to change.
        first_use: the first line outside of functions that will need the manager.
    """
    body = layout.source.tree.body
    imported = runtime_name(body, names)
    alias = "" if imported == "runtime" else f" as {imported}"
    quote = quote_of(layout.source)
    options = "".join(f", {field}={_literal(value, quote)}" for field, value in overrides.items())
    statement = f"from oomfix import runtime{alias}"
    made = f"{manager} = {imported}.preset({quote}{preset}{quote}{options})"
    newline = layout.newline
    optional = _optional_import(layout, first_use)
    if optional is not None and optional.end_lineno is not None:
        end, margin = layout.span(Lines(optional.end_lineno, optional.end_lineno))[1], layout.margin(optional)
        return [Edit(end, end, f"{newline}{margin}{statement}{newline}{newline}{margin}{made}")]
    last = _last_import(body, first_use, _first_cell_with_torch(layout))
    if last is None or last.end_lineno is None:
        start = _behind_head(layout)
        return [Edit(start, start, f"{statement}{newline}{newline}{made}{newline}{newline}")]
    stop = _behind_commented_out(layout, last.end_lineno)
    end = layout.span(Lines(stop, stop))[1]
    below = "".join(layout.source.lines[stop : stop + 1]).strip()
    made += newline if below and not _BEGIN_OF_CELL.match(below) else ""
    if _runtime_imported(body[: body.index(last) + 1]) is not None:
        return [Edit(end, end, f"{newline}{newline}{made}")]
    line = _sorted_line(layout, last)
    if line > last.end_lineno:
        return [Edit(end, end, f"{newline}{statement}{newline}{newline}{made}")]
    start = layout.source.line_starts[line - 1]
    return [Edit(start, start, f"{statement}{newline}"), Edit(end, end, f"{newline}{newline}{made}")]


def _behind_commented_out(layout: Layout, line: int) -> int:
    """The last of the imports that are commented out right below a line; that line where there are none."""
    lines = layout.source.lines
    while line < len(lines) and _COMMENTED_OUT.match(lines[line]):
        line += 1
    return line


def _sorted_line(layout: Layout, last: ast.stmt) -> int:
    """The line that our import stands before: in its place among sorted imports with torch, else behind those.

    Behind `last` where there are none, or where those go on with other code, as `sys.path.append("..")`.
    """
    run = next((run for run in reversed(_runs_of_imports(layout, last)) if _imports_torch(run)), [])
    behind = (run[-1].end_lineno or run[-1].lineno) + 1 if run else 0
    if not run or "".join(layout.source.lines[behind - 1 : behind]).strip():
        behind = (last.end_lineno or last.lineno) + 1
    plain = [index for index, node in enumerate(run) if isinstance(node, ast.Import)]
    wanted = [node for node in run if isinstance(node, ast.ImportFrom) and not node.level]
    modules = [(node.module or "").lower() for node in wanted]
    sections = len(plain) + len(wanted) == len(run) and plain == list(range(len(plain)))
    if not run or not sections or modules != sorted(modules):
        return behind
    return next((node.lineno for node, module in zip(wanted, modules, strict=True) if module > "oomfix"), behind)


def _runs_of_imports(layout: Layout, last: ast.stmt) -> list[list[ast.stmt]]:
    """The imports of the module up to `last`, in runs without an empty line between them."""
    runs: list[list[ast.stmt]] = []
    for statement in layout.source.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) and layout.own_lines(statement) is not None:
            if runs and (runs[-1][-1].end_lineno or 0) + 1 == statement.lineno:
                runs[-1].append(statement)
            else:
                runs.append([statement])
        if statement is last:
            break
    return runs


def _imports_torch(run: list[ast.stmt]) -> bool:
    roots = {alias.name.split(".")[0] for node in run if isinstance(node, ast.Import) for alias in node.names}
    return "torch" in roots | {(node.module or "").split(".")[0] for node in run if isinstance(node, ast.ImportFrom)}


def _optional_import(layout: Layout, first_use: int) -> ast.stmt | None:
    """The last import beside that of torch in the `try` of a module that goes on without torch; None for others."""
    body = layout.source.tree.body
    if any(_imports_torch([statement]) for statement in body):
        return None
    for statement in body:
        if isinstance(statement, ast.Try) and _imports_torch(statement.body) and statement.lineno < first_use:
            last = [node for node in statement.body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
            return last if layout.own_lines(last) is not None else None
    return None


def _first_cell_with_torch(layout: Layout) -> float:
    """The line behind the first cell of a notebook that imports torch: whoever trains runs that one for certain.

    Cells below, as one that connects to a drive, may be left out, or fail elsewhere. Infinity for a file.
    """
    marks = [number for number, line in enumerate(layout.source.lines, start=1) if _BEGIN_OF_CELL.match(line)]
    for statement in layout.source.tree.body:
        if _imports_torch([statement]):
            return next((mark for mark in marks if mark > statement.lineno), math.inf)
    return math.inf


def _last_import(body: list[ast.stmt], first_use: float = math.inf, end: float = math.inf) -> ast.stmt | None:
    """The last import at the top, ahead of `end`, of the first definition or loop and of the manager's first use."""
    last = None
    for statement in body:
        if statement.lineno >= min(first_use, end) or not isinstance(
            statement, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.AnnAssign | ast.If | ast.Try
        ):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom) or (
            isinstance(statement, ast.Try) and _imports(statement)
        ):
            last = statement
    return last


def _imports(statement: ast.Try) -> bool:
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in statement.body)


def _behind_head(layout: Layout) -> int:
    """The offset behind the comments and the docstring at the top of a module."""
    body = layout.source.tree.body
    lines = layout.source.lines
    number = 0
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        number = body[0].end_lineno or 0
    while number < len(lines) and lines[number].lstrip().startswith("#"):
        number += 1
    return layout.source.line_starts[number] if number < len(lines) else len(layout.source.text)


def _literal(value: object, quote: str) -> str:
    return f"{quote}{value}{quote}" if isinstance(value, str) else repr(value)
