"""Recurrent and memory states that are carried from one iteration into the next with their graph."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from oomfix.script.facts.named_like import looks_like_state
from oomfix.script.facts.trace import Forward, Loop, Trace
from oomfix.script.syntax.names import path_of, unpacked


class CarriedState(NamedTuple):
    """A recurrent state that is carried into the next iteration with its graph."""

    statement: ast.stmt
    name: str
    trains: bool
    """A backward runs in each iteration."""


def carried_states(trace: Trace, evaluation_forwards: list[Forward]) -> Iterator[CarriedState]:
    """States that go, graph and all, into a forward of the next iteration.

    The loop calls backward in each iteration, or the forward is of an evaluation and nothing is backpropagated.
    """
    retaining = {event.site.loop for event in trace.backwards if event.retains}
    training = {event.site.loop for event in trace.backwards}
    trained = {forward.node for origin, forward in trace.forwards.items() if origin in trace.backpropagated}
    evaluating = {
        forward.origin for forward in evaluation_forwards if forward.records_graph and forward.node not in trained
    }
    for statement, loop, origin in trace.carries.values():
        trains = loop in training
        if not isinstance(statement, ast.Assign) or not (trains or origin in evaluating):
            continue
        if origin in trace.backpropagated and not _goes_back_in(loop, origin, trace):
            continue
        if _is_layer_of(loop, trace.forwards[origin].path):
            continue
        names = [path_of(name) or "" for target in statement.targets for name in unpacked(target)]
        states = list(filter(looks_like_state, names))
        if states or loop in retaining:
            yield CarriedState(statement, (states or names)[-1], trains)


def _goes_back_in(loop: Loop, origin: int, trace: Trace) -> bool:
    """Whether a backward of each round goes through a forward, as far as is known."""
    backwards = [event for event in trace.backwards if event.site.loop is loop]
    return any(not event.origins or origin in event.origins for event in backwards)


def _is_layer_of(loop: Loop, path: str | None) -> bool:
    """`for layer in layers: h = layer(h)`: what is handed on is an activation, not a state."""
    if path is None or isinstance(loop, ast.While):
        return False
    return path in {path_of(target) for target in unpacked(loop.target)}
