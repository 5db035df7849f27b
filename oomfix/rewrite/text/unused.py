"""What a rewrite leaves without use: imported names of mixed precision, local variables of scalers and settings."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope, nodes_of_scope_body
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import path_of, root_of
from oomfix.script.syntax.nodes import blocks, walk
from oomfix.script.syntax.patterns import Pattern

_AMP_MODULES = ("torch.cuda.amp", "torch.amp", "torch.cuda.amp.grad_scaler", "torch.amp.grad_scaler")
_OF_AMP = {"torch": ("amp", "autocast", "GradScaler"), "torch.cuda": ("amp",)}
_ABOUT_SCALERS = Pattern(r"scaler|mixed.?precision|\bamp\b|\bfp16\b", re.IGNORECASE)


def unused_amp_imports(before: Imports, after: Imports, layout: Layout) -> list[Edit]:
    """Take out `torch.cuda.amp`, `torch.amp` and their names that were used before the rewrite and no longer are.

    What a `try` or a branch of the module imports stays: it may be there for another file.

    Args:
        before: the imports and nodes of the file as it was.
        after: those of the rewritten one.
        layout: its lines.
    """
    if "amp" not in layout.source.text:
        return []
    gone = _loaded(before) - _loaded(after)
    edits: list[Edit] = []
    for statement, block in _imports(after):
        if isinstance(statement, ast.Import) and any(_is_amp(statement, alias) for alias in statement.names):
            gone |= _gone_by_path(before, after)
        of_amp = {alias.asname or alias.name for alias in statement.names if _is_amp(statement, alias)}
        unused = of_amp & gone
        if len(unused) == len(statement.names):
            if (lines := layout.own_lines(statement)) is not None:
                gap = block is not after.tree.body
                edits.append(without(layout, statement, block) if gap else layout.removed(lines))
        elif unused and isinstance(statement, ast.ImportFrom):
            # imported here: most scripts import nothing that they stop using, and libcst takes a while
            from oomfix.rewrite.text.imported_names import without_names

            text = layout.source.segment(statement)
            edits.append(Edit(*bounds(layout.source, statement), without_names(text, unused)))
    return edits


def _imports(of: Imports) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[ast.stmt]]]:
    """The imports at the top of the module, and in functions outside of `try`, with their blocks."""
    tried = {id(inner) for inner in walk(*of.nodes.of(ast.Try))}
    inside = walk(*of.nodes.functions)
    branches = (node for node in inside if id(node) not in tried)
    for block in (of.tree.body, *{id(block): block for block in blocks(branches)}.values()):
        yield from ((statement, block) for statement in block if isinstance(statement, ast.Import | ast.ImportFrom))


def _is_amp(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
    """Whether an import of one name brings mixed precision."""
    if isinstance(statement, ast.Import):
        return alias.name in _AMP_MODULES
    return statement.module in _AMP_MODULES or alias.name in _OF_AMP.get(statement.module or "", ())


def _gone_by_path(before: Imports, after: Imports) -> set[str]:
    """`torch.cuda.amp` and the like if code no longer names it so, and `torch` itself is imported."""
    imported = (alias for one in after.tree.body if isinstance(one, ast.Import) for alias in one.names)
    if all(alias.name != "torch" or alias.asname for alias in imported):
        return set()
    named = [{path_of(node) for node in of.nodes.of(ast.Attribute)} for of in (before, after)]
    return {path for path in _AMP_MODULES if path in named[0] - named[1]}


def unused_flags(before: Imports, after: Imports, layout: Layout) -> list[Edit]:
    """Take out local names of settings that were read before the rewrite and no longer are: `fp16 = args.fp16`.

    One under a comment stays: that may speak of more. So does one of the manager's scaler, see `unused_scalers`.

    Args:
        before: the imports and nodes of the file as it was.
        after: those of the rewritten one.
        layout: its lines.
    """
    gone = _loaded(before) - _loaded(after)
    if not gone or "locals" in _loaded(after):
        return []
    written = Counter(node.id for node in after.nodes.of(ast.Name) if not isinstance(node.ctx, ast.Load))
    declared = {name for node in after.nodes.of(ast.Global) for name in node.names}
    declared |= {name for node in after.nodes.of(ast.Nonlocal) for name in node.names}
    gone = {name for name in gone - declared if written[name] == 1}
    edits: list[Edit] = []
    for block in (block for function in after.nodes.functions for block in _blocks_of(function) if len(block) > 1):
        for statement in block:
            match statement:
                case ast.Assign([ast.Name(name)], ast.Attribute() as setting) if name in gone:
                    lines = layout.own_lines(statement)
                    was_read = root_of(path_of(setting) or "") in _loaded(before)
                    if was_read and lines is not None and not _is_under_comment(lines, layout):
                        edits.append(Edit(*layout.whole(lines), ""))
    return edits


def _is_under_comment(lines: Lines, layout: Layout) -> bool:
    return layout.source.lines[lines.first - 2].lstrip().startswith("#")


def unused_scalers(after: ast.Module, manager: str, layout: Layout) -> list[Edit]:
    """Take out variables that hold the manager's scaler and that nothing reads any more.

    One with a comment on something else stays: it says something of the script's author. One of a module stays where
    another file may read it: nobody imports what trains at once.
    """
    held = f"{manager}.scaler"
    if f"= {held}" not in layout.source.text:
        return []
    edits: list[Edit] = []
    scopes: list[Scope] = [node for node in walk(after) if isinstance(node, FunctionNode)]
    calls = (node for node in nodes_of_scope_body(after) if isinstance(node, ast.Call))
    if any(path_of(call.func) == f"{manager}.step" for call in calls):
        scopes.append(after)
    for scope in scopes:
        nodes = list(walk(scope))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
        outside = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        within: set[ast.AST] = set()
        # a block may not do without its only statement
        for statement in (one for block in _blocks_of(scope) if len(block) > 1 for one in block):
            name = _scaler_in(statement, held) if held in layout.source.segment(statement) else None
            if name is None or name in read | outside or "locals" in read or statement in within:
                continue
            if (lines := _with_comment(statement, layout)) is not None:
                within |= set(walk(statement))
                last = _last_blank_line(statement, scope, layout)
                edits.append(layout.removed(layout.with_gap(lines._replace(last=last))))
    return edits


def _blocks_of(scope: Scope) -> Iterator[list[ast.stmt]]:
    """The blocks of a scope, those around others first, without functions inside of it and what is tried."""
    apart = (FunctionNode, ast.Try, ast.ExceptHandler)
    yield scope.body
    yield from blocks(node for node in nodes_of_scope_body(scope) if not isinstance(node, apart))


def _scaler_in(statement: ast.stmt, held: str, *, inside: bool = False) -> str | None:
    """`scaler` of `scaler = memory.scaler`, under a test or tried in two places of torch; None for others.

    Args:
        statement: the statement.
        held: what it may hold.
        inside: whether it is part of another one, so that it may hold nothing as well.
    """
    match statement:
        case ast.Assign([ast.Name(name)], ast.IfExp(test, value, ast.Constant(None))):
            return name if path_of(value) == held and _only_looks(test) else None
        case ast.Assign([ast.Name(name)], value):
            nothing = inside and isinstance(value, ast.Constant) and value.value is None
            return name if nothing or path_of(value) == held else None
        case ast.Try(finalbody=[]) | ast.If():
            if isinstance(statement, ast.If) and not _only_looks(statement.test):
                return None
            handlers = (handler.body for handler in getattr(statement, "handlers", ()))
            sides = [statement.body, *handlers, statement.orelse]
            names = {_scaler_in(inner, held, inside=True) for side in sides for inner in side}
            return names.pop() if len(names) == 1 else None
    return None


def _only_looks(test: ast.expr) -> bool:
    return not any(isinstance(node, ast.Call | ast.NamedExpr | ast.Await) for node in walk(test))


def _with_comment(statement: ast.stmt, layout: Layout) -> Lines | None:
    """The lines of a statement with its comment, if that speaks of mixed precision alone; None where it does not."""
    own, lines = layout.own_lines(statement), layout.source.lines
    if own is None:
        return None
    beside = lines[own.first - 1].partition("#")[2]
    ahead = (line.strip() for line in reversed(lines[: own.first - 1]))
    above = list(itertools.takewhile(lambda line: line.startswith("#"), ahead))
    if len(above) > 1 or not all(map(_ABOUT_SCALERS.search, filter(None, [beside, *above]))):
        return None
    return own._replace(first=own.first - len(above))


def _last_blank_line(statement: ast.stmt, scope: Scope, layout: Layout) -> int:
    """The line of a statement, or of the empty lines behind it where it is what a function begins with."""
    line = statement.end_lineno or statement.lineno
    while statement is scope.body[0] and not layout.source.lines[line].strip():
        line += 1
    return line


def _loaded(of: Imports) -> set[str]:
    return {node.id for node in of.nodes.of(ast.Name) if isinstance(node.ctx, ast.Load)}
