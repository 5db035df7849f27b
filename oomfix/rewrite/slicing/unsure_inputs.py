"""What is bound only on some ways ahead of a slice, and may be given to it all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomfix.rewrite.dataflow.liveness import definitely_bound, names_bound, names_read
from oomfix.script.syntax.nodes import children, walk

_PURE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context),
)


def read_at_once(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that statements read whatever happens, before they may have bound them.

    A name that has no value ends the run there, as it does where it is passed.
    """
    found: set[str] = set()
    bound: set[str] = set()
    for statement in _in_any_case(statements):
        found |= _read_in_any_case(statement) - bound
        bound |= names_bound(statement)
    return found


def tests_of(names: set[str], ahead: Sequence[ast.stmt], lifted: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """The test under which each of some names is bound ahead of a slice and read in it; others are left out.

    `if mixes: x, y_a, y_b = mixed(x, y)` and, further down, `if mixes: loss = criterion(out, y_a)`, or
    `loss = mixed_loss(out, y_a, y_b) if mixes else criterion(out, y)`.
    """
    found = {}
    for name in names:
        for index, statement in enumerate(ahead):
            if not isinstance(statement, ast.If) or name not in definitely_bound(statement.body):
                continue
            since = [statement, *ahead[index + 1 :], *lifted]
            if _means_the_same(statement.test, since) and _read_only_under(statement.test, name, lifted):
                found[name] = statement.test
    return found


def _in_any_case(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt | ast.withitem]:
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from statement.items
            yield from _in_any_case(statement.body)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
            yield statement
        else:
            return


def _read_in_any_case(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    if isinstance(node, ast.Lambda):
        return set()
    if isinstance(node, ast.AnnAssign):
        return set() if node.value is None else _read_in_any_case(node.value)
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return _read_in_any_case(node.generators[0].iter)
    if isinstance(node, ast.IfExp):
        return _read_in_any_case(node.test)
    if isinstance(node, ast.BoolOp):
        return _read_in_any_case(node.values[0])
    if isinstance(node, ast.Compare):
        return _read_in_any_case(node.left) | _read_in_any_case(node.comparators[0])
    return {name for child in children(node) for name in _read_in_any_case(child)}


def _means_the_same(test: ast.expr, since: Sequence[ast.stmt]) -> bool:
    """Whether a test asked again behind some statements costs nothing and has the same answer."""
    bound = names_bound(*since)
    return all(isinstance(node, _PURE) for node in walk(test)) and not names_read(test) & bound


def _read_only_under(test: ast.expr, name: str, statements: Sequence[ast.stmt]) -> bool:
    asked = ast.unparse(test)
    for statement in statements:
        if name not in names_read(statement):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == asked:
            blocks = [statement.orelse]
        elif isinstance(statement, ast.With) and name not in names_read(*statement.items):
            blocks = [statement.body]
        elif isinstance(statement, ast.If) and name not in names_read(statement.test):
            blocks = [statement.body, statement.orelse]
        elif _read_in_conditions(asked, name, statement):
            continue
        else:
            return False
        if not all(_read_only_under(test, name, block) for block in blocks):
            return False
    return True


def _read_in_conditions(asked: str, name: str, node: ast.AST) -> bool:
    """Whether a node reads a name nowhere but in the first value of `a if test else b`."""
    if isinstance(node, ast.IfExp) and ast.unparse(node.test) == asked:
        return _read_in_conditions(asked, name, node.orelse)
    if isinstance(node, ast.Name):
        return node.id != name
    return all(_read_in_conditions(asked, name, child) for child in children(node))
