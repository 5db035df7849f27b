"""What a rewritten module needs around its loops: the manager at the top, tidy imports."""

from __future__ import annotations

import ast
import builtins

from oomfix.rewrite.layout import Layout, Lines
from oomfix.rewrite.liveness import FunctionNode, Scope, nodes_of_scope_body
from oomfix.script import Script
from oomfix.script.edits import Edit, bounds
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

Overrides = dict[str, object]

_AMP_MODULES = ("torch.cuda.amp", "torch.amp", "torch.cuda.amp.grad_scaler", "torch.amp.grad_scaler")


class Names:
    """Names that are free in a whole file: nothing binds or reads them anywhere.

    Args:
        tree: the module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._taken = set(dir(builtins))
        for node in walk(tree):
            if isinstance(node, ast.Name):
                self._taken.add(node.id)
            elif isinstance(node, ast.arg):
                self._taken.add(node.arg)
            elif isinstance(node, ast.alias):
                self._taken.add(node.asname or node.name.split(".")[0])
            elif isinstance(node, ast.Global | ast.Nonlocal):
                self._taken.update(node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self._taken.add(node.name)
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._taken.add(statement.name)

    def free(self, *wanted: str) -> str:
        """The first of these names that is free, else the last with a number."""
        for name in wanted:
            if name not in self._taken:
                return name
        number = 2
        while f"{wanted[-1]}_{number}" in self._taken:
            number += 1
        return f"{wanted[-1]}_{number}"


def manager_in(script: Script) -> str | None:
    """The name of the manager that a module has already made at its top, or None."""
    for statement in script.source.tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call) and len(statement.targets) == 1:
            if "oomfix.runtime.preset" in script.imports.qualified(statement.value.func):
                return path_of(statement.targets[0])
    return None


def runtime_name(names: Names) -> str:
    """What a module that does not import the runtime yet is to call it."""
    return names.free("runtime", "oomfix_runtime")


def header_edits(
    layout: Layout, names: Names, manager: str, preset: str, overrides: Overrides, first_use: int
) -> list[Edit]:
    """Import the runtime where it belongs among the imports, and make the manager behind them.

    Args:
        layout: the module's text.
        names: its free names.
        manager: the name for the manager.
        preset: the preset's name.
        overrides: fields of `Preset` to change.
        first_use: the first line outside of functions that will need the manager.
    """
    imported = runtime_name(names)
    alias = "" if imported == "runtime" else f" as {imported}"
    quote = _quote(layout)
    options = "".join(f", {field}={_literal(value, quote)}" for field, value in overrides.items())
    statement = f"from oomfix import runtime{alias}"
    made = f"{manager} = {imported}.preset({quote}{preset}{quote}{options})"
    newline = layout.newline
    last = _last_import(layout.source.tree.body, first_use)
    if last is None or last.end_lineno is None:
        start = _behind_head(layout)
        return [Edit(start, start, f"{statement}{newline}{newline}{made}{newline}{newline}")]
    end = layout.span(Lines(last.end_lineno, last.end_lineno))[1]
    line = _sorted_line(layout, last)
    if line > last.end_lineno:
        return [Edit(end, end, f"{newline}{statement}{newline}{newline}{made}")]
    start = layout.source.line_starts[line - 1]
    return [Edit(start, start, f"{statement}{newline}"), Edit(end, end, f"{newline}{newline}{made}")]


def _sorted_line(layout: Layout, last: ast.stmt) -> int:
    """The line that our import stands before: in its place among sorted imports with torch, else behind `last`."""
    behind = (last.end_lineno or last.lineno) + 1
    run = next((run for run in reversed(_runs_of_imports(layout, last)) if _imports_torch(run)), [])
    plain = [index for index, node in enumerate(run) if isinstance(node, ast.Import)]
    wanted = [node for node in run if isinstance(node, ast.ImportFrom) and not node.level]
    modules = [(node.module or "").lower() for node in wanted]
    sections = len(plain) + len(wanted) == len(run) and plain == list(range(len(plain)))
    if not run or not sections or modules != sorted(modules):
        return behind
    above = (node.lineno for node, module in zip(wanted, modules, strict=True) if module > "oomfix")
    return next(above, (run[-1].end_lineno or run[-1].lineno) + 1)


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


def unused_amp_imports(before: ast.Module, after: ast.Module, layout: Layout) -> list[Edit]:
    """Take out the names of `torch.cuda.amp` and `torch.amp` that were used before the rewrite and no longer are."""
    used_before, used_now = _loaded(before), _loaded(after)
    edits: list[Edit] = []
    for statement in walk(after):
        if not isinstance(statement, ast.ImportFrom) or statement.module not in _AMP_MODULES:
            continue
        unused = [alias for alias in statement.names if (alias.asname or alias.name) in used_before - used_now]
        if not unused or statement not in after.body:
            continue
        kept = [alias for alias in statement.names if alias not in unused]
        if kept:
            text = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in kept)
            edits.append(Edit(*bounds(layout.source, statement), f"from {statement.module} import {text}"))
        elif (lines := layout.own_lines(statement)) is not None:
            start, end = layout.span(lines)
            edits.append(Edit(start, min(end + len(layout.newline), len(layout.source.text)), ""))
    return edits


def unused_scalers(after: ast.Module, manager: str, layout: Layout) -> list[Edit]:
    """Take out variables that hold the manager's scaler and that nothing reads any more.

    One with a comment stays: it says something of the script's author. One of a module stays where another file may
    read it: nobody imports what trains at once.
    """
    edits: list[Edit] = []
    held = f"{manager}.scaler"
    if f"= {held}" not in layout.source.text:
        return []
    scopes: list[Scope] = [node for node in walk(after) if isinstance(node, FunctionNode)]
    calls = (node for node in nodes_of_scope_body(after) if isinstance(node, ast.Call))
    if any(path_of(call.func) == f"{manager}.step" for call in calls):
        scopes.append(after)
    for scope in scopes:
        nodes = list(walk(scope))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
        outside = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        blocks = [scope.body, *(node.body for node in scope.body if isinstance(node, ast.If))]
        # not the first, which a block may not do without
        for statement in (statement for block in blocks for statement in block[1:]):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(target, ast.Name) or target.id in read | outside or "locals" in read:
                continue
            line, above = layout.source.lines[statement.lineno - 1], layout.source.lines[statement.lineno - 2]
            if line.strip() == f"{target.id} = {held}" and not above.lstrip().startswith("#"):
                start, end = layout.span(Lines(statement.lineno, statement.lineno))
                edits.append(Edit(start, min(end + len(layout.newline), len(layout.source.text)), ""))
    return edits


def _loaded(tree: ast.Module) -> set[str]:
    return {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _last_import(body: list[ast.stmt], first_use: int) -> ast.stmt | None:
    """The last import at the top, ahead of the first definition or loop and of the first use of the manager."""
    last = None
    for statement in body:
        if statement.lineno >= first_use or not isinstance(
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


def _quote(layout: Layout) -> str:
    """The quote that the file writes short strings with."""
    text = layout.source.text
    return "'" if text.count("'") > text.count('"') else '"'


def _literal(value: object, quote: str) -> str:
    return f"{quote}{value}{quote}" if isinstance(value, str) else repr(value)
