"""What a script does with gradients by hand: zeroing them, dividing them, making steps with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import Nodes, Scope, walk

_DIVIDING = (".grad.div_", ".grad.mul_", ".grad.data.div_", ".grad.data.mul_")


def zeroed_by_hand(nodes: Nodes) -> Iterator[ast.Call]:
    """`p.grad.zero_()` on each of several parameters, in a loop."""
    if not any(node.attr == "zero_" for node in nodes.of(ast.Attribute)):
        return
    for loop in nodes.of(ast.For):
        for target in walk(loop.target):
            if isinstance(target, ast.Name):
                yield from _zeroed_gradients_of(target.id, loop)


def _zeroed_gradients_of(parameter: str, loop: ast.For) -> Iterator[ast.Call]:
    paths = (f"{parameter}.grad.zero_", f"{parameter}.grad.data.zero_")
    for node in walk(*loop.body):
        if isinstance(node, ast.Call) and path_of(node.func) in paths:
            yield node


def optimizes(node: ast.AST) -> bool:
    """Whether a node names an optimizer, or changes parameters by hand: `p.data -= rate * p.grad`."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name) | ast.ImportFrom(module=str(name)):
            return "optim" in name.lower()
        case ast.AugAssign(op=ast.Sub(), value=value) | ast.Assign([ast.Attribute(attr="data")], value):
            return _reads_gradients(value)
        case ast.Call(ast.Attribute(ast.Attribute(attr="data"), "add_" | "sub_" | "copy_"), given, keywords):
            return any(map(_reads_gradients, (*given, *(keyword.value for keyword in keywords))))
    return False


def _reads_gradients(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in walk(value))


def dividing_functions(nodes: Sequence[tuple[ast.AST, Scope]]) -> set[Scope]:
    """The functions that divide gradients by hand; None among them is the module itself.

    `nodes` are all nodes of the file, each with the function it is in.
    """
    return {function for node, function in nodes if _divides_gradients(node)}


def are_divided(loop: TrainingLoop, dividing: set[Scope], nodes: Sequence[tuple[ast.AST, Scope]]) -> bool:
    """Whether gradients are divided by hand before the step, where the loop is written or in what is named there.

    `dividing` are the functions that do so, `nodes` all nodes of the file, each with the function it is in.
    """
    if not dividing:
        return False
    events = [*loop.backwards, *loop.steps, *loop.later_steps]
    around: set[ast.AST | None] = {function.node for event in events for function in event.site.functions} or {None}
    named = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node, function in nodes
        if function in around and isinstance(node, ast.Name | ast.Attribute)
    }
    return any(function in around or (function is not None and function.name in named) for function in dividing)


def _divides_gradients(node: ast.AST) -> bool:
    """`p.grad /= k`, `p.grad.div_(k)`."""
    if isinstance(node, ast.AugAssign):
        divides = isinstance(node.op, ast.Div | ast.Mult)
        return divides and (path_of(node.target) or "").endswith((".grad", ".grad.data"))
    return isinstance(node, ast.Call) and (path_of(node.func) or "").endswith(_DIVIDING)


def differentiates_by_hand(nodes: Nodes, in_numpy: bool) -> bool:
    """Whether layers hand the gradient on themselves: what a `backward(error)` gives is used, as nothing of torch is.

    Args:
        nodes: those of the file.
        in_numpy: the file imports numpy. Where not, the gradient has to go into the backward of the layer before.
    """
    bound = [(target, node.value) for node in nodes.of(ast.Assign) for target in node.targets]
    if in_numpy:
        returned = (node.value for node in nodes.of(ast.Return))
        return any(map(_is_backward, (*returned, *(value for _, value in bound))))
    names = {path_of(target) for target, value in bound if _is_backward(value)} - {None}
    handed_on = (path_of(argument) for node in nodes.of(ast.Call) if _is_backward(node) for argument in node.args)
    return any(path in names for path in handed_on)


def _is_backward(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
