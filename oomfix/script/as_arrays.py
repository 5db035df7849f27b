"""Functions that give away arrays only: nothing goes back through what they return."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from oomfix.script.named_like import looks_like_logging, looks_like_loss
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

_METHODS = frozenset(("numpy", "tolist"))
_ARRAYS = frozenset(("np", "numpy"))
_TAKEN_OFF = _METHODS | {"detach", "data"}
_WITHOUT_EFFECT = _ARRAYS | frozenset("torch F nn print len range zip enumerate list sum float int".split())
_DEEPEST = 4
"""`image = out.numpy()`, and no name that is made of itself for ever."""


def gives_arrays(nodes: Sequence[ast.AST]) -> bool:
    """Whether all that a function returns are arrays, made of tensors, by the way it is written.

    Args:
        nodes: the function's.
    """
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
    return bool(returned) and all(_is_array(value, nodes, _DEEPEST) for value in returned)


def _is_array(value: ast.expr, nodes: Sequence[ast.AST], depth: int) -> bool:
    """`out.cpu().numpy()[0]`, `np.asarray(out.detach())`, a name that is only ever assigned such, several of them."""
    match value:
        case ast.Tuple(parts) | ast.List(parts):
            return bool(parts) and all(_is_array(part, nodes, depth) for part in parts)
        case ast.Name(name) if depth:
            assigned = [node for node in nodes if isinstance(node, ast.Assign) and name in map(path_of, node.targets)]
            return bool(assigned) and all(_is_array(node.value, nodes, depth - 1) for node in assigned)
        case ast.ListComp():
            return _is_array(value.elt, nodes, depth)
        case ast.Call(ast.Attribute(holder, method), arguments):
            if (path_of(holder) or "").split(".")[0] in _ARRAYS:
                within = (part for argument in arguments for part in walk(argument))
                return any(isinstance(part, ast.Attribute) and part.attr in _TAKEN_OFF for part in within)
            return method in _METHODS or _is_array(holder, nodes, depth)
        case ast.Subscript(holder):
            return _is_array(holder, nodes, depth)
    return False


def leaves_as_array(made: ast.expr, nodes: Sequence[ast.AST], is_followed: Callable[[ast.Call], bool]) -> bool:
    """Whether a tensor goes into what its function returns, and nowhere else where it may be differentiated.

    Args:
        made: what gives the tensor.
        nodes: those of a function that `gives_arrays`.
        is_followed: whether it is known what a call does.
    """
    names = _made_from(made, nodes)

    def holds(root: ast.AST) -> bool:
        return any(part is made or (isinstance(part, ast.expr) and path_of(part) in names) for part in walk(root))

    if any("." in name or "[" in name for name in names):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and node is not made]
    out_of_sight = (call for call in calls if not (is_followed(call) or _has_no_effect(call)))
    if any(holds(argument) for call in out_of_sight for argument in [*call.args, *call.keywords]):
        return False
    return any(isinstance(node, ast.Return) and node.value is not None and holds(node.value) for node in nodes)


def _made_from(made: ast.expr, nodes: Sequence[ast.AST]) -> set[str]:
    """The names and places that are assigned from a value, through each other."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    names: set[str] = set()
    while True:
        more = {
            path_of(target) or ast.unparse(target)
            for node in assigned
            if any(part is made or (isinstance(part, ast.Name) and part.id in names) for part in walk(node.value))
            for listed in node.targets
            for target in (listed.elts if isinstance(listed, ast.Tuple) else [listed])
        }
        if more <= names:
            return names
        names |= more


def _has_no_effect(call: ast.Call) -> bool:
    """A call of torch, numpy or a builtin, of a tensor's own method, of a criterion, or for a log."""
    path = path_of(call.func)
    if path is None:
        return True  # `f(x).view(shape)`
    root, *rest = path.split(".")
    known = root in _WITHOUT_EFFECT
    return (known and "grad" not in rest) or looks_like_loss(path) or looks_like_logging(path)
