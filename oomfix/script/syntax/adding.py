"""What an expression adds to a sum or to a list: `loss` in `total + loss` and in `[*kept, loss]`."""

from __future__ import annotations

import ast

from oomfix.script.syntax.names import path_of

_CONCATENATIONS = frozenset({"torch.cat", "torch.concat", "torch.hstack", "torch.vstack"})


def added_to(node: ast.expr, path: str) -> list[ast.expr]:
    """What an expression adds to the sum or the list under a path; empty where it makes something else."""
    for part in _parts(node):
        if isinstance(part, ast.BinOp) and _adds_to(part, path):
            return [term for term in _terms(part, path) if not _adds_to(term, path)]
        for joined in (_concatenated(part), _summed(part)):
            if path in map(path_of, joined):
                return [element for element in joined if path_of(element) != path]
    return _added_to_copy(node, path)


def joins_parts(node: ast.expr) -> bool:
    """Whether an expression writes down the parts that it joins: `torch.cat([outputs, out])`."""
    return any(map(_concatenated, _parts(node)))


def _adds_to(node: ast.expr, path: str) -> bool:
    """The value under a path, as it is written, goes into an expression by arithmetic."""
    if isinstance(node, ast.BinOp):
        return _adds_to(node.left, path) or _adds_to(node.right, path)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        # `log.get("loss", 0) + loss`
        return path == f"{ast.unparse(node.func.value)}[{ast.unparse(node.args[0])}]"
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and ast.unparse(node) == path


def _terms(node: ast.expr, path: str) -> list[ast.expr]:
    """The terms of a sum that adds to what is under a path."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return _terms(left, path) + _terms(right, path)
        case ast.BinOp(ast.BinOp() as total, ast.Div() | ast.Mult()) if _adds_to(total, path):
            return _terms(total, path)  # `(mean * n + loss) / (n + 1)`, and not `(1 - beta) * loss`
    return [node]


def _parts(node: ast.expr) -> tuple[ast.expr, ...]:
    return (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)


def _concatenated(node: ast.expr) -> list[ast.expr]:
    """The parts of `torch.cat([outputs, out])`, where they are written down."""
    if not isinstance(node, ast.Call) or path_of(node.func) not in _CONCATENATIONS or not node.args:
        return []
    return node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else []


def _summed(node: ast.expr) -> list[ast.expr]:
    """The terms of `sum([total, loss])` and `torch.add(total, loss)`, where they are written down."""
    match node:
        case ast.Call(ast.Name("sum"), [ast.Tuple(terms) | ast.List(terms)], []):
            return terms
        case ast.Call(ast.Attribute(ast.Name("torch"), "add"), [_, _] as terms, []):
            return terms
    return []


def _added_to_copy(node: ast.expr, path: str) -> list[ast.expr]:
    """What `[*kept, loss]`, `{**kept, key: loss}` or `(sums[0] + loss, sums[1])` adds to what is under a path."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        spread = [element for element in node.elts if isinstance(element, ast.Starred)]
        copied = any(path_of(element.value) == path for element in spread)
        if copied:
            return [element for element in node.elts if element not in spread]
        if not isinstance(node, ast.Set):  # `mean = (mean[0] * 0.9 + loss, mean[1] * 0.9 + 1)`
            return [term for index, item in enumerate(node.elts) for term in added_to(item, f"{path}[{index}]")]
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
        copied = any(key is None and path_of(value) == path for key, value in pairs)
        return [value for key, value in pairs if key is not None] if copied else []
    return []
