"""The test under which a slice binds a name, where it does not on all of its ways: `if mixes: y_a, y_b = mixed(y)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomfix.rewrite.dataflow.blocks import Loop
from oomfix.rewrite.dataflow.changes import changed_paths, overlap, paths_read
from oomfix.rewrite.dataflow.liveness import definitely_bound, names_bound, names_read, nodes_of_scope
from oomfix.rewrite.facts.lift import Lift
from oomfix.script.syntax.nodes import walk

_PURE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp),
    *(ast.Tuple, ast.List, ast.Set, ast.cmpop, ast.boolop, ast.unaryop, ast.operator, ast.expr_context),
)
_ASKING_FOR_PARTS = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
"""What gives the same for parts of a batch and for the whole."""


def test_of_binding(name: str, lift: Lift) -> ast.expr | None:
    """The test that is true where a slice has bound a name, and false where it has not; None where there is no such.

    It says the same when it is asked again behind the slice.
    """
    place = next((index for index, one in enumerate(lift.lifted) if name in names_bound(one)), None)
    if place is None or lift.site.branch is not None:
        return None
    test = _test_in([lift.lifted[place]], name)
    if test is None or not all(_only_changes(name, one) for one in lift.lifted[place + 1 :]):
        return None
    if lift.state is not None and any(isinstance(node, ast.Attribute | ast.Subscript) for node in walk(test)):
        return None  # what the slice leaves behind in objects may be what the test asks for
    return test if _says_the_same(test, lift.lifted[place:]) else None


def _only_changes(name: str, statement: ast.stmt) -> bool:
    """Whether a statement binds a name to nothing but what it makes of its value: `soft = F.softmax(soft / 4, 1)`."""
    stores = [node for node in nodes_of_scope(statement) if isinstance(node, ast.Name) and node.id == name]
    stores = [node for node in stores if not isinstance(node.ctx, ast.Load)]
    changes = (node for node in nodes_of_scope(statement) if isinstance(node, ast.Assign | ast.AugAssign))
    changed = {part for node in changes if name in names_read(node) for part in walk(node)}
    return all(store in changed for store in stores)


def asks_for_rows(test: ast.expr, lift: Lift) -> bool:
    """Whether a test looks into what a slice is given of the batch, so that parts of it may give something else."""
    batch = set(lift.inputs).difference(*map(_counted_by, lift.site.loops))
    plain = set(walk(*_asking_for_parts(test)))
    return any(isinstance(node, ast.Name) and node.id in batch and node not in plain for node in walk(test))


def _counted_by(loop: Loop) -> set[str]:
    """`number` of `for number, (x, y) in enumerate(loader)` and `for number in range(10)`."""
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(name), *_]), iter=ast.Call(func=ast.Name("enumerate"))):
            return {name}
        case ast.For(target=ast.Name(name), iter=ast.Call(func=ast.Name("range"))):
            return {name}
    return set()


def _asking_for_parts(test: ast.expr) -> Iterator[ast.Compare]:
    """`"label" in batch`, `mask is None`."""
    for node in walk(test):
        if isinstance(node, ast.Compare) and all(isinstance(op, _ASKING_FOR_PARTS) for op in node.ops):
            if all(isinstance(one, ast.Name | ast.Constant) for one in (node.left, *node.comparators)):
                yield node


def _test_in(block: Sequence[ast.stmt], name: str) -> ast.expr | None:
    """The test for a name to be bound behind a block; `True` where it is in any case."""
    binding = [one for one in block if name in names_bound(one)]
    if not binding:
        return ast.Constant(value=False)
    deletes = any(isinstance(node, ast.Delete) for node in walk(*binding))
    if name in definitely_bound(binding) and not deletes:
        return ast.Constant(value=True)
    if len(binding) > 1 or deletes:
        return None
    match binding[0]:
        case ast.With(items=items, body=body) if name not in names_bound(*items):
            return _test_in(body, name)
        case ast.If(test=test, body=body, orelse=orelse):
            if name in names_bound(test):
                return None
            then, otherwise = _test_in(body, name), _test_in(orelse, name)
            return None if then is None or otherwise is None else _either(test, then, otherwise)
    return None


def _either(test: ast.expr, body: ast.expr, orelse: ast.expr) -> ast.expr:
    """`body if test else orelse`, as it is written by hand: `test or other` for `True if test else other`."""
    match body, orelse:
        case ast.Constant(value=True), ast.Constant(value=False):
            return test
        case ast.Constant(value=True), _:
            return _joined(ast.Or(), test, orelse)
        case ast.Constant(value=False), ast.Constant(value=True):
            return _denied(test)
        case ast.Constant(value=False), _:
            return _joined(ast.And(), _denied(test), orelse)
        case _, ast.Constant(value=False):
            return _joined(ast.And(), test, body)
    return _joined(ast.Or(), _joined(ast.And(), test, body), _joined(ast.And(), _denied(test), orelse))


def _joined(operator: ast.boolop, one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.fix_missing_locations(ast.BoolOp(op=operator, values=[one, other]))


_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def _denied(test: ast.expr) -> ast.expr:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in _OPPOSITES:
            other = ast.Compare(left=left, ops=[_OPPOSITES[type(op)]()], comparators=comparators)
            return ast.fix_missing_locations(other)
    return ast.fix_missing_locations(ast.UnaryOp(op=ast.Not(), operand=test))


def _says_the_same(test: ast.expr, since: Sequence[ast.stmt]) -> bool:
    """Whether a test asked again behind some statements costs nothing and has the same answer."""
    if not all(isinstance(node, _PURE) for node in walk(test)) or names_read(test) & names_bound(*since):
        return False
    return not any(overlap(changed_paths(one), paths_read(test)) for one in since)
