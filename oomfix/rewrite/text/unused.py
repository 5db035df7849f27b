"""What a rewrite leaves without use: imported names of mixed precision, local variables that hold a scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope, nodes_of_scope_body
from oomfix.rewrite.text.layout import Layout, Lines
from oomfix.rewrite.text.removal import without
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.imports import Imports
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import blocks, walk

_AMP_MODULES = ("torch.cuda.amp", "torch.amp", "torch.cuda.amp.grad_scaler", "torch.amp.grad_scaler")
_AMP_PARENTS = ("torch", "torch.cuda")


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
                edits.append(without(layout, statement, block) if gap else Edit(*layout.whole(lines), ""))
        elif unused and isinstance(statement, ast.ImportFrom):
            # imported here: most scripts import nothing that they stop using, and libcst takes a while
            from oomfix.rewrite.text.imported_names import without_names

            text = layout.source.segment(statement)
            edits.append(Edit(*bounds(layout.source, statement), without_names(text, unused)))
    return edits


def _imports(of: Imports) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[ast.stmt]]]:
    """The imports at the top of the module, and in functions outside of `try`, with their blocks."""
    tried = {id(inner) for node in of.nodes.of(ast.Try) for inner in walk(node)}
    inside = (node for function in of.nodes.functions for node in walk(function))
    branches = (node for node in inside if id(node) not in tried)
    for block in (of.tree.body, *{id(block): block for block in blocks(branches)}.values()):
        yield from ((statement, block) for statement in block if isinstance(statement, ast.Import | ast.ImportFrom))


def _is_amp(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
    """Whether an import of one name brings mixed precision."""
    if isinstance(statement, ast.Import):
        return alias.name in _AMP_MODULES
    return statement.module in _AMP_MODULES or (statement.module in _AMP_PARENTS and alias.name == "amp")


def _gone_by_path(before: Imports, after: Imports) -> set[str]:
    """`torch.cuda.amp` and the like if code no longer names it so, and `torch` itself is imported."""
    imported = (alias for one in after.tree.body if isinstance(one, ast.Import) for alias in one.names)
    if all(alias.name != "torch" or alias.asname for alias in imported):
        return set()
    named = [{path_of(node) for node in of.nodes.of(ast.Attribute)} for of in (before, after)]
    return {path for path in _AMP_MODULES if path in named[0] - named[1]}


def unused_scalers(after: ast.Module, manager: str, layout: Layout) -> list[Edit]:
    """Take out variables that hold the manager's scaler and that nothing reads any more.

    One with a comment stays: it says something of the script's author, unless it is about where torch has scalers. One
    of a module stays where another file may read it: nobody imports what trains at once.
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
        # a block may not do without its only statement
        for statement in (statement for block in blocks if len(block) > 1 for statement in block):
            name = _scaler_in(statement, held)
            if name is None or name in read | outside or "locals" in read:
                continue
            first, last = statement.lineno, _last_blank_line(statement, scope, layout)
            own, above = layout.source.lines[first - 1], layout.source.lines[first - 2]
            if own.strip() in ("try:", f"{name} = {held}") and not above.lstrip().startswith("#"):
                edits.append(Edit(*layout.whole(layout.with_gap(Lines(first, last))), ""))
    return edits


def _scaler_in(statement: ast.stmt, held: str) -> str | None:
    """`scaler` of `scaler = memory.scaler`, also tried in one place of torch and then in another; None for others."""
    match statement:
        case ast.Assign([ast.Name(name)], value) if path_of(value) == held:
            return name
        case ast.Try(finalbody=[]):
            blocks = [statement.body, *(handler.body for handler in statement.handlers), statement.orelse]
            names = {_scaler_in(inner, held) for block in blocks for inner in block}
            return names.pop() if len(names) == 1 else None
    return None


def _last_blank_line(statement: ast.stmt, scope: Scope, layout: Layout) -> int:
    """The line of a statement, or of the empty lines behind it where it is what a function begins with."""
    line = statement.end_lineno or statement.lineno
    while statement is scope.body[0] and not layout.source.lines[line].strip():
        line += 1
    return line


def _loaded(of: Imports) -> set[str]:
    return {node.id for node in of.nodes.of(ast.Name) if isinstance(node.ctx, ast.Load)}
