"""Where an evaluation asks for a forward that stands in a method which training runs as well."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from dataclasses import replace

from oomfix.script.definitions import Function
from oomfix.script.trace import Forward, Trace


def where_asked_for(forwards: list[Forward], trace: Trace) -> list[Forward]:
    """Forwards in methods of networks that training runs as well, each at the call that an evaluation makes.

    `print(model.loss(x, y).item())`: there gradients can be turned off, where `def loss` calls the network they cannot.
    """
    calls = {id(call): call for call in trace.followed}
    trained = {forward for forward in trace.forwards.values() if forward.origin in trace.backpropagated}
    shared = {id(forward.node) for forward in trained} | {step for forward in trained for step in forward.site.way}
    return [_at_caller(forward, calls, shared) for forward in forwards]


def _at_caller(forward: Forward, calls: dict[int, ast.Call], shared: set[Hashable]) -> Forward:
    """The innermost call on the way to a forward that is none of the `shared`, through methods of networks only."""
    functions = forward.site.functions
    called = [forward.node, *(calls[step] for step in reversed(forward.site.way) if step in calls)]
    for depth, node in enumerate(called):
        if id(node) not in shared:
            return replace(forward, node=node, site=replace(forward.site, functions=functions[depth:]))
        if depth == len(functions) or not _is_of_network(functions[depth]):
            break
    return forward


def _is_of_network(function: Function) -> bool:
    return function.owner is not None and function.owner.is_module
