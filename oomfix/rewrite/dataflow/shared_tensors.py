"""Tensors that other names hold too, and that statements change in place under those: `total = one; total += two`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence, Set

from oomfix.rewrite.dataflow.calls import called_name
from oomfix.rewrite.dataflow.changes import CHANGING, object_changed, works_in_place
from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import FunctionNode, nodes_of_scope
from oomfix.script.syntax.names import path_of, unpacked
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.parameters import Bound

_VIEWING = frozenset(
    "view view_as reshape flatten squeeze unsqueeze expand expand_as permute transpose t narrow select detach".split()
)
"""Methods of tensors whose result is a view of them."""

_SHARING_METHODS = frozenset(
    "view view_as reshape flatten squeeze unsqueeze expand expand_as permute transpose t narrow select unbind chunk "
    "split tensor_split detach to type float double half bfloat16 cpu cuda numpy contiguous as_tensor from_numpy get "
    "pop popleft popitem setdefault values items copy reduce deque".split()
)
"""Methods whose result may share memory with what they are called on or given, or hold it."""

_MOVING = frozenset({"to", "type", "cpu", "cuda"})
"""Methods that are given where their tensor is to be, or what type it is to have."""

_SHARING_FUNCTIONS = frozenset(
    "next iter max min reduce list tuple dict zip sorted reversed enumerate filter deque".split()
)
_SHARING_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "real"})


def are_changed_in_place(
    names: Iterable[str],
    statements: Sequence[ast.stmt],
    functions: FunctionsCalled,
    ahead: Sequence[ast.stmt] = (),
) -> bool:
    """Whether statements may change tensors in place that names stand for, under these or other names.

    Args:
        names: the names.
        statements: in any order.
        functions: those of the file, which may change what they are given.
        ahead: what runs before, and may give the tensors those other names.
    """
    if not any(_may_change_in_place(statement, functions) for statement in statements):
        return False
    held = _held_with(set(names), [*ahead, *statements])
    if any(_changes(node, held) for node in nodes_of_scope(*statements)):
        return True
    calls = (node for node in walk(*statements) if isinstance(node, ast.Call))
    runs = ((function, functions.bound(call, function)) for call in calls for function in functions.by(call))
    return any(_changes_given(function, bound, held) for function, bound in runs)


def _may_change_in_place(statement: ast.stmt, functions: FunctionsCalled) -> bool:
    """Whether a statement writes to some tensor, or calls a function of the file, which may."""
    return any(
        isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Call) and (bool(_written_by(node)) or bool(functions.by(node))))
        for node in walk(statement)
    )


def sharing_memory(names: Set[str], statements: Sequence[ast.stmt]) -> set[str]:
    """Names, and the paths of whatever statements may make share memory with them, or hold them."""
    return _held_with(set(names), statements)


def one_by_one(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What an assignment binds to what: two pairs for `x, y = x.cuda(), y.cuda()`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def with_views(names: Set[str], statements: Iterable[ast.stmt]) -> set[str]:
    """Names, and those that statements bind to the same tensors or to views of them: `w = y.view(-1)` for `y`."""
    found, size = set(names), 0
    nodes = [node for node in nodes_of_scope(*statements) if isinstance(node, ast.Assign)]
    pairs = [{node.targets[0].id, _viewed(node.value)} for node in nodes if isinstance(node.targets[0], ast.Name)]
    while len(found) > size:
        size = len(found)
        found = found.union(*(pair for pair in pairs if "" not in pair and not found.isdisjoint(pair)))
    return found


def _viewed(value: ast.expr) -> str:
    """The name of the tensor that an expression is, or is a view of; "" for anything else."""
    while not isinstance(value, ast.Name):
        key = getattr(value.slice, "value", None) if isinstance(value, ast.Subscript) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWING:
            value = value.func.value
        elif isinstance(value, ast.Subscript) and not isinstance(key, str):
            value = value.value  # a row, but no entry of a mapping
        elif isinstance(value, ast.Attribute) and value.attr in _SHARING_ATTRIBUTES:
            value = value.value
        else:
            return ""
    return value.id


def taken_out(statement: ast.stmt) -> dict[str, str]:
    """The names that a statement binds to a part of something, with the path of that: `scores = log[task]`."""
    found: dict[str, str] = {}
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and called_name(value) in ("get", "setdefault"):
                value = value.func
            if isinstance(value, ast.Subscript | ast.Attribute) and (path := object_changed(value.value)):
                found[node.targets[0].id] = path
    return found


def _held_with(names: set[str], statements: Sequence[ast.stmt]) -> set[str]:
    """The names, and the paths of whatever may share memory with them or hold them."""
    pairs = [pair for node in nodes_of_scope(*statements) for pair in _sharing(node)]
    held, size = set(names), 0
    while len(held) > size:
        size = len(held)
        for targets, sources in pairs:
            if not held.isdisjoint(targets | sources):
                held |= (targets | sources) - {""}
    return held


def _sharing(node: ast.AST) -> Iterator[tuple[set[str], set[str]]]:
    """What a node makes share memory: the paths of what it binds or fills, and of what these may be."""
    match node:
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1:
                for target, value in one_by_one(targets[0], node.value):
                    yield set(_bound(target)), set(_may_be(value))
            else:
                yield {path for target in targets for path in _bound(target)}, set(_may_be(node.value))
        case ast.For():
            yield set(_bound(node.target)), set(_may_be(node.iter))
        case ast.AugAssign(value=ast.List() | ast.Tuple()):
            yield set(_bound(node.target)), set(_may_be(node.value))
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in CHANGING:
            given = {path for argument in node.args for path in _may_be(argument)}
            yield set(_may_be(owner)), given


def _bound(target: ast.expr) -> Iterator[str]:
    return (path for one in unpacked(target) for path in _may_be(one))


def _given(call: ast.Call) -> list[ast.expr]:
    """What a call is given, and first what it is a method of."""
    return [*([call.func.value] if isinstance(call.func, ast.Attribute) else []), *call.args]


def _gives_the_same(call: ast.Call) -> bool:
    known = _SHARING_METHODS if isinstance(call.func, ast.Attribute) else _SHARING_FUNCTIONS
    return called_name(call) in known


def _is_in_place(call: ast.Call) -> bool:
    """`one.mul_(2)`, `F.relu_(one)`, `F.relu(one, inplace=True)`."""
    name = called_name(call)
    return works_in_place(name) or any(one.arg == "inplace" for one in call.keywords)


def _may_be(node: ast.expr) -> Iterator[str]:
    """The paths of what an expression may share memory with: `a` for `a[0]` and `a.view(-1)`, nothing for `a + 1`."""
    parts: list[ast.expr] = []
    match node:
        case ast.Name():
            yield node.id
        case ast.Attribute() if node.attr not in _SHARING_ATTRIBUTES:
            yield path_of(node) or ""
        case ast.Attribute() | ast.Subscript() | ast.Starred() | ast.NamedExpr():
            parts = [node.value]
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.BoolOp() | ast.Dict():
            parts = node.values
        case ast.Tuple() | ast.List():
            parts = node.elts
        case ast.DictComp():
            parts = [node.value, *(generator.iter for generator in node.generators)]
        case ast.ListComp() | ast.GeneratorExp():
            parts = [node.elt, *(generator.iter for generator in node.generators)]
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _MOVING:
            parts = [owner]
        case ast.Call() if _gives_the_same(node) or _is_in_place(node):
            parts = _given(node)
    for part in parts:
        yield from _may_be(part)


def _changes(node: ast.AST, held: set[str]) -> bool:
    """Whether a node writes to one of the tensors: `total += one`, `one.mul_(2)`."""
    if isinstance(node, ast.AugAssign):
        return not isinstance(node.value, ast.List | ast.Tuple) and not held.isdisjoint(_bound(node.target))
    if isinstance(node, ast.Call):
        return not held.isdisjoint(path for one in _written_by(node) for path in _may_be(one))
    return False


def _written_by(call: ast.Call) -> list[ast.expr]:
    """What a call writes to in place, if it does."""
    written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
    return written + (_given(call)[:2] if _is_in_place(call) else [])


def _changes_given(function: FunctionNode, bound: Bound[ast.expr], held: set[str]) -> bool:
    """Whether a function changes one of the tensors that a call gives it."""
    given = {one.arg for one, value in bound.all if not held.isdisjoint(_may_be(value))}
    if not given:
        return False
    inside = _held_with(given, function.body)
    return any(_changes(node, inside) for node in nodes_of_scope(*function.body))
