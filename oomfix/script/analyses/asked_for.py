"""Where an evaluation asks for a forward that stands in a function which training may run as well."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from dataclasses import replace

from oomfix.script.facts.definitions import Function
from oomfix.script.facts.trace import Forward, Trace


def where_asked_for(forwards: list[Forward], trace: Trace) -> list[Forward]:
    """Forwards in methods of networks that training runs as well, each at the call that an evaluation makes.

    `print(model.loss(x, y).item())`: there gradients can be turned off, where `def loss` calls the network they cannot.
    Where what is called differentiates on its way, as what adapts to each task does, they can be turned off nowhere.
    """
    calls = {id(call): call for call in trace.followed}
    through = trace.backpropagated - _only_asked_for_gradients(trace)
    trained = [forward for forward in trace.forwards.values() if forward.origin in through]
    shared: set[Hashable] = {id(forward.node) for forward in trained}
    for forward in trained:
        shared |= {*forward.site.way, *map(id, forward.code.nodes if forward.code is not None else ())}
    differentiating = {function for backward in trace.backwards for function in backward.site.functions}
    found = []
    for forward in forwards:
        asked = _at_caller(forward, calls, shared)
        within = forward.site.functions[: len(forward.site.functions) - len(asked.site.functions)]
        if differentiating.isdisjoint(within):
            found.append(asked)
    return found


def _only_asked_for_gradients(trace: Trace) -> frozenset[int]:
    """What `torch.autograd.grad` goes back through, and no backward."""
    asked, trained = set[int](), set[int]()
    for backward in trace.backwards:
        (asked if backward.is_grad_call else trained).update(backward.origins)
    return frozenset(asked - trained)


def where_graph_ends(forward: Forward, trace: Trace) -> Forward:
    """A forward of a pass that other files call, at the call whose function gives nobody the graph.

    What gives its caller a graph, such as a policy's `distribution(x)`, those files may call for training as well, but
    not what is named for evaluation.
    """
    site = forward.site
    calls = {id(call): call for call in trace.followed}
    called = [calls[step] for step in reversed(site.way) if step in calls]
    if site.way[:1] != ("entry",) or len(called) + 1 != len(site.functions):
        return forward
    node: ast.Call = forward.node
    for depth, (function, call) in enumerate(zip(site.functions, called, strict=False)):
        named = function.evaluates and not function.acts
        if named or forward.origin not in trace.given_back.get(id(call), {forward.origin}):
            return replace(forward, node=node, site=site._replace(functions=site.functions[depth:]))
        node = call
    return replace(forward, node=node, site=site._replace(functions=site.functions[-1:]))


def _at_caller(forward: Forward, calls: dict[int, ast.Call], shared: set[Hashable]) -> Forward:
    """The innermost call on the way to a forward that is none of the `shared`, through methods of networks only."""
    functions = forward.site.functions
    called = [forward.node, *(calls[step] for step in reversed(forward.site.way) if step in calls)]
    for depth, node in enumerate(called):
        if id(node) not in shared:
            return replace(forward, node=node, site=forward.site._replace(functions=functions[depth:]))
        if depth == len(functions) or not _is_of_network(functions[depth]):
            break
    return forward


def _is_of_network(function: Function) -> bool:
    return function.owner is not None and function.owner.is_module
