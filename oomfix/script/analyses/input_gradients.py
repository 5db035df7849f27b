"""Networks that are evaluated on inputs whose gradients are asked for."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence, Set

from oomfix.script.facts.definitions import Class, Function
from oomfix.script.facts.leaves import leaves_of
from oomfix.script.facts.named_like import looks_like_differentiating
from oomfix.script.facts.trace import Backward, Forward, Trace
from oomfix.script.syntax.names import last_of, path_of, root_of
from oomfix.script.syntax.nodes import arguments_of, walk

_READING = frozenset("torch F nn np numpy plt ax axes print zip len".split())
"""What is called of these differentiates nothing."""


def differentiates_its_inputs(forward: Forward, evaluated: Sequence[Forward]) -> bool:
    """Whether an evaluation asks for the gradients of what it gives to the network of a forward.

    `x.requires_grad_()`, and `model(x)` that no backward follows: the network itself differentiates by its inputs, as
    energies, potentials and flows do, and stops where gradients are off.

    Args:
        evaluated: the forwards of all evaluations of the file.
    """
    networks = _networks(forward)
    return any(not networks.isdisjoint(_networks(other)) and _is_given_a_leaf(other) for other in evaluated)


def may_differentiate_its_inputs(forward: Forward, trace: Trace) -> bool:
    """Whether a method out of sight says so, `net.time_derivative(x)`, or is given what gradients are asked for."""
    if forward.direct or forward.code is not None:
        return False
    if looks_like_differentiating(last_of(forward.path)):
        return True
    function = forward.site.function
    return _is_given_one_of(forward, function.nodes if function is not None else trace.module_level)


def is_differentiated_out_of_sight(forward: Forward, followed: Collection[ast.Call]) -> bool:
    """Whether what a forward gives leaves together with an input of it whose gradients are asked for.

    `residual(x, net(x))`: what a physical law says of a network is its derivatives, in an evaluation as well.

    Args:
        followed: the calls of functions of the file.
    """
    block = _block(forward)
    leaves = set(map(path_of, forward.given)) & _leaves(block) if block is not None else set()
    if block is None or not leaves:
        return False
    bound = {
        path_of(target)
        for node in walk(block)
        if isinstance(node, ast.Assign) and node.value is forward.node
        for target in node.targets
    }
    for call in walk(block):
        if isinstance(call, ast.Call) and call not in followed and root_of(path_of(call.func) or "") not in _READING:
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            paths = set(map(path_of, arguments))
            if paths & leaves and (forward.node in arguments or paths & bound - {None}):
                return True
    return False


def reads_gradients(forward: Forward, differentiating: Set[Function | None]) -> bool:
    """Whether gradients are read behind a forward that no backward of its function has left: what ran it ran one.

    `attributor(x)` and `scores = features.grad`.

    Args:
        forward: through which no backward goes.
        differentiating: the functions in which backwards run; None: those outside of all.
    """
    block = _block(forward)
    if block is None or forward.site.function in differentiating:
        return False
    called = {node.func for node in walk(block) if isinstance(node, ast.Call)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "grad"
        and isinstance(node.ctx, ast.Load)
        and node.lineno > forward.node.lineno
        and node not in called  # `torch.autograd.grad(out, x)` is what computes them
        for node in walk(block)
    )


def may_be_asked_for_gradients(forward: Forward, trace: Trace) -> bool:
    """Whether its class has a method for callers out of sight that asks for gradients of inputs: an attribution.

    `def input_gradients(self, outputs, inputs)` is given what `def predict_logits(self, inputs)` gives.
    """
    owner = forward.site.function.owner if forward.site.function is not None else None
    return owner is not None and any(
        not backward.origins and _asks_for_inputs(backward, owner) for backward in trace.backwards
    )


def _asks_for_inputs(backward: Backward, owner: Class) -> bool:
    """Whether a method of a class differentiates one of its parameters, and hands out the gradient of another."""
    function = backward.site.function
    if function is None or function.owner is not owner or backward.site.way[:1] != ("entry",):
        return False
    if backward.is_grad_call:
        return all(path_of(one) in function.parameters for one in arguments_of(backward.node)[:2])
    return any(
        isinstance(node, ast.Attribute) and node.attr == "grad" and path_of(node.value) in function.parameters
        for node in function.nodes
    )


def _networks(forward: Forward) -> set[str]:
    """What may be the network of `model(x)`, `model.decode(z)` or `self.model(x)`."""
    path = forward.path or ""
    return {path, path.rpartition(".")[0]} - {"", "self"}


def _is_given_a_leaf(forward: Forward) -> bool:
    """Whether gradients are asked for one of its inputs in the loop around it, or in its function."""
    block = _block(forward)
    return block is not None and _is_given_one_of(forward, walk(block))


def _is_given_one_of(forward: Forward, nodes: Iterable[ast.AST]) -> bool:
    """Whether a forward is given, or a part of, what gradients are asked for among some nodes."""
    given = {path_of(node) for node in walk(*forward.given) if isinstance(node, ast.expr)}
    return any(leaf in given for node in nodes for leaf in leaves_of(node))


def _block(forward: Forward) -> ast.AST | None:
    line, site = forward.node.lineno, forward.site
    around = [loop for loop in site.loops if loop.lineno <= line <= (loop.end_lineno or loop.lineno)]
    if around:
        return around[0]
    return site.function.node if site.function is not None else None


def _leaves(block: ast.AST) -> set[str]:
    return {leaf for node in walk(block) for leaf in leaves_of(node)}
