"""The tensors that gradients are asked for, where graphs begin."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.script.syntax.names import last_name, path_of


def asks_for_gradients(call: ast.Call) -> bool:
    """Whether a call makes a tensor to be trained, for certain: `torch.randn(3, requires_grad=True)`."""
    for keyword in call.keywords:
        if keyword.arg == "requires_grad":
            return isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    return False


def leaves_of(node: ast.AST) -> Iterator[str]:
    """The names of what one statement or call may ask gradients for.

    `x` in `x.requires_grad_()`, `x.requires_grad = flag`, `x = torch.randn(3, requires_grad=True)`,
    `x = nn.Parameter(start)` and `x = start.detach().requires_grad_().to(device)`.
    """
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        if any(map(_may_make_a_leaf, _chain(node.value))):
            found = node.targets
        elif not _is_off(node.value):
            owners = (target for target in node.targets if isinstance(target, ast.Attribute))
            found = [owner.value for owner in owners if owner.attr == "requires_grad"]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _may_switch_on(node):
        found = [node.func.value]
    yield from (path for path in map(path_of, found) if path is not None)


def _chain(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of `torch.zeros(3).requires_grad_().to(device)`, the last one first."""
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func


def _may_make_a_leaf(call: ast.Call) -> bool:
    if last_name(call) == "Parameter":
        return True
    return _may_switch_on(call) or any(not _is_off(value) for value in _by_keyword(call))


def _may_switch_on(call: ast.Call) -> bool:
    """`x.requires_grad_()`, and not `x.requires_grad_(False)`."""
    return last_name(call) == "requires_grad_" and not any(map(_is_off, [*call.args, *_by_keyword(call)]))


def _by_keyword(call: ast.Call) -> Iterator[ast.expr]:
    return (keyword.value for keyword in call.keywords if keyword.arg == "requires_grad")


def _is_off(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value
