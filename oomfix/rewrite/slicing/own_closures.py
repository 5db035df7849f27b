"""Names that nothing outside of a slice mentions, though a function inside of it reads them: no output."""

from __future__ import annotations

import ast

from oomfix.rewrite.dataflow.liveness import FunctionNode, Liveness, names_bound, names_read
from oomfix.rewrite.facts.lift import Lift
from oomfix.script.syntax.nodes import walk


def of_own_closures(lift: Lift, liveness: Liveness) -> set[str]:
    """The names that a slice binds for itself: `best` in `list(map(lambda row: best(row), rows))`.

    A lambda may run at any time, and so what it reads may be read at any time; here it has the name of the slice.
    """
    scope, bound = lift.site.scope, names_bound(*lift.lifted)
    own = bound & liveness.always
    if isinstance(scope, ast.Module) or not own:
        return set()
    inside = {id(node) for node in walk(*lift.lifted)}
    others = {name for node in walk(scope) if id(node) not in inside for name in _mentioned(node)}
    return own - others - liveness.before(lift.lifted, names_read(lift.site.root))


def _mentioned(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            return {name}
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return set(names)
        case ast.ExceptHandler(name=str(name)):
            return {name}
        case ast.alias(name=name, asname=other):
            return {(other or name).split(".")[0]}
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return {name}
        case ast.ClassDef(name=name):
            return {name}
    return {node.name} if isinstance(node, FunctionNode) and not isinstance(node, ast.Lambda) else set()
