"""Functions that give away arrays only: nothing goes back through what they return."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from oomfix.script.facts.named_like import looks_like_logging, looks_like_loss
from oomfix.script.facts.torch_facts import INDEX_REDUCTIONS, INTEGER_RESULTS, LEAVING_THE_GRAPH
from oomfix.script.syntax.names import last_name, path_of, unpacked
from oomfix.script.syntax.nodes import children, walk

_METHODS = frozenset(("numpy", "tolist"))
_ARRAYS = frozenset(("np", "numpy"))
_TAKEN_OFF = LEAVING_THE_GRAPH | INTEGER_RESULTS | {"sample"}
"""What holds no graph; as an array is made of it, `sample` is that of a distribution."""
_SHAPES = frozenset("shape size dim ndim numel device dtype".split())
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
                within = walk(*arguments)
                return any(isinstance(part, ast.Attribute) and part.attr in _TAKEN_OFF for part in within)
            return method in _METHODS or _is_array(holder, nodes, depth)
        case ast.Subscript(holder):
            return _is_array(holder, nodes, depth)
    return False


def mentions_arrays(nodes: Sequence[ast.AST]) -> bool:
    """Whether anything in a function may be an array: what is asked first, of every function with a forward."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _METHODS)
        or (isinstance(node, ast.Name) and node.id in _ARRAYS)
        for node in nodes
    )


def becomes_array(made: ast.expr, nodes: Sequence[ast.AST], is_followed: Callable[[ast.Call], bool]) -> bool:
    """Whether a tensor becomes an array in its function, and goes nowhere else where it may be differentiated.

    Args:
        made: what gives the tensor.
        nodes: the function's.
        is_followed: whether it is known what a call does.
    """
    made_from = _MadeFrom(made, nodes)
    if any(map(made_from.needs_no_detaching, nodes)):
        return False
    return any(map(made_from.is_array, nodes)) and not any(made_from.leaves(node, is_followed) for node in nodes)


class _MadeFrom:
    """What holds a tensor, or what was computed from it, in a function."""

    def __init__(self, made: ast.expr, nodes: Sequence[ast.AST]) -> None:
        self._made = made
        bound = [pair for node in nodes for pair in _bound(node)]
        self._with_graph = self._names_of(bound, _SHAPES | _TAKEN_OFF)
        self._computed = self._names_of(bound, _SHAPES)

    def _names_of(self, bound: list[tuple[ast.expr, ast.expr]], without: frozenset[str]) -> set[str]:
        """The names that are bound to it, through each other, other than by some attributes."""
        names: set[str] = set()
        while (
            more := {
                part.id
                for target, value in bound
                if self._is_in(value, names, without)
                for part in (_but_indices(target, value) if without >= _TAKEN_OFF else unpacked(target))
                if isinstance(part, ast.Name)
            }
            - names
        ):
            names |= more
        return names

    def _is_in(self, node: ast.AST, names: set[str], without: frozenset[str]) -> bool:
        if node is self._made or (isinstance(node, ast.Name) and node.id in names):
            return True
        if isinstance(node, ast.Attribute) and node.attr in without:
            return False
        if without >= _TAKEN_OFF and isinstance(node, ast.Subscript) and _gives_indices(node.value):
            return ast.unparse(node.slice) != "1" and self._is_in(node.value, names, without)
        return any(self._is_in(child, names, without) for child in children(node))

    def _has_graph(self, node: ast.AST) -> bool:
        return self._is_in(node, self._with_graph, _SHAPES | _TAKEN_OFF)

    def is_array(self, node: ast.AST) -> bool:
        """`out.cpu().numpy()`, `np.asarray(out.detach())`."""
        if isinstance(node, ast.Call) and (path_of(node.func) or "").split(".")[0] in _ARRAYS:
            return any(self._is_in(argument, self._computed, _SHAPES) for argument in node.args)
        if not isinstance(node, ast.Attribute) or node.attr not in _METHODS:
            return False
        return self._is_in(node.value, self._computed, _SHAPES)

    def needs_no_detaching(self, node: ast.AST) -> bool:
        """`out.cpu().numpy()`, which torch refuses where a graph was recorded: there is none."""
        return isinstance(node, ast.Attribute) and node.attr == "numpy" and self._has_graph(node.value)

    def leaves(self, node: ast.AST, is_followed: Callable[[ast.Call], bool]) -> bool:
        """Whether it is returned, stored on something, or given to what is out of sight."""
        if isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            return any(map(self._has_graph, given)) and not (is_followed(node) or _has_no_effect(node))
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return node.value is not None and self._has_graph(node.value)
        return any(
            not isinstance(part, ast.Name) and self._has_graph(value)
            for target, value in _bound(node)
            for part in unpacked(target)
        )


def _bound(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """What a node binds, and to what."""
    match node:
        case ast.Assign(targets, value):
            return [(target, value) for target in targets]
        case ast.AugAssign(target, _, value) | ast.AnnAssign(target, _, ast.expr() as value):
            return [(target, value)]
        case ast.NamedExpr(target, value) | ast.For(target, value) | ast.comprehension(target, value):
            return [(target, value)]
    return []


def _gives_indices(value: ast.expr) -> bool:
    """`scores.topk(5)`, `torch.max(scores, 1)`: values, and indices without a graph."""
    return isinstance(value, ast.Call) and last_name(value) in INDEX_REDUCTIONS


def _but_indices(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """What a target binds, but for indices: `best` of `best, indices = scores.topk(5)`."""
    parts = list(unpacked(target))
    yield from parts[:1] if _gives_indices(value) and len(parts) == 2 else parts


def _has_no_effect(call: ast.Call) -> bool:
    """A call of torch, numpy or a builtin, of a tensor's own method, of a criterion, or for a log."""
    path = path_of(call.func)
    if path is None:
        return isinstance(call.func, ast.Attribute)  # `f(x).view(shape)`
    root, *rest = path.split(".")
    known = root in _WITHOUT_EFFECT
    return (known and "grad" not in rest) or looks_like_loss(path) or looks_like_logging(path)
