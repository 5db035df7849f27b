"""`torch.autograd.backward((loss,))` of one tensor, written as the method of that tensor which it is."""

from __future__ import annotations

import ast

from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.edits import Edit, bounds
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import walk

_OF_TENSORS = frozenset("item detach backward".split())
"""What only a tensor is asked for, and no list of several."""


def functional_backward_edits(reading: Reading) -> list[Edit]:
    """The edits that make methods of functional backwards which differentiate a single tensor."""
    source, edits = reading.source, []
    for call in reading.script.imports.nodes.of(ast.Call):
        root = _only_root(call, reading) if _is_functional(call, reading) else None
        if root is not None:
            kept = ", ".join(f"{keyword.arg}={source.segment(keyword.value)}" for keyword in call.keywords)
            edits.append(Edit(*bounds(source, call), f"{source.segment(root)}.backward({kept})"))
    return edits


def _is_functional(call: ast.Call, reading: Reading) -> bool:
    options = {keyword.arg for keyword in call.keywords}
    if len(call.args) != 1 or not options <= {"retain_graph", "create_graph"}:
        return False
    return bool(reading.script.imports.qualified(call.func) & {"torch.autograd.backward"})


def _only_root(call: ast.Call, reading: Reading) -> ast.expr | None:
    """The one tensor that a functional backward differentiates; None where it may be several."""
    given = call.args[0]
    if isinstance(given, ast.Tuple | ast.List):
        root = given.elts[0] if len(given.elts) == 1 else None
        return root if root is not None and path_of(root) is not None else None
    scope = reading.blocks.scope_of(call)
    asked = (node for node in walk(scope) if isinstance(node, ast.Attribute)) if scope is not None else ()
    path = path_of(given)
    is_tensor = any(node.attr in _OF_TENSORS and path_of(node.value) == path for node in asked)
    return given if path is not None and is_tensor else None
