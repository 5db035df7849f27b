"""Acting: a policy is asked what to do in an environment, and nothing goes back through the answer."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from oomfix.script.names import unpacked
from oomfix.script.nodes import walk
from oomfix.script.trace import Forward, Trace

_PARTS_OF_A_STEP = 3
"""An environment answers with an observation, a reward and whether it is over, at the least."""


def acts_in_environment(forward: Forward, trace: Trace) -> bool:
    """`obs, reward, done, _ = env.step(action)`, and the action comes from this forward, which nothing else takes.

    To be asked of a forward that no backward in sight goes through.

    A forward that leaves its graph anywhere (the log probability, a value) may be trained through.
    """
    origin = forward.origin
    if forward.escaped:
        return False
    if any(origin in origins for _, origins in trace.handed_on):
        return False
    if any(origin in keep.origins for keep in trace.keeps.values()):
        return False
    asked = _asked(forward, trace)
    return any(_reaches(asked, step, nodes) for nodes in _around(forward) for step in steps_of_environments(nodes))


def _asked(forward: Forward, trace: Trace) -> set[ast.AST]:
    """A forward, and the calls of functions of the file that led to it: `action = select(state)`."""
    way = set(forward.site.way)
    return {forward.node, *(call for call in trace.followed if id(call) in way)}


def _around(forward: Forward) -> Iterator[Sequence[ast.AST]]:
    """What stands in the loop around a forward, and in its functions, which may make a single step for a loop."""
    if forward.site.loop is not None:
        yield list(walk(forward.site.loop))
    for function in forward.site.functions:
        yield function.nodes


def steps_of_environments(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls of `env.step(action)`, by what is assigned from them."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call):
            step, parts = node.value, node.targets[0].elts
            named = isinstance(step.func, ast.Attribute) and step.func.attr == "step"
            if named and step.args and len(parts) >= _PARTS_OF_A_STEP:
                yield step


def _reaches(asked: set[ast.AST], step: ast.Call, nodes: Sequence[ast.AST]) -> bool:
    """Whether what a call is given was made from what one of those asked gives, by the assignments among the nodes."""
    made_from: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _bound(target):
                    made_from.setdefault(name, []).append(node.value)
    waiting: list[ast.expr] = list(step.args)
    seen: set[str] = set()
    while waiting:
        value = waiting.pop()
        if any(node in asked for node in walk(value)):
            return True
        for name in set(_names(value, ast.Load)) - seen:
            seen.add(name)
            waiting += made_from.get(name, [])
    return False


def _bound(target: ast.expr) -> Iterator[str]:
    """The names that an assignment binds, or of which it changes a part: `action[0][1] = steering`."""
    yield from _names(target, ast.Store)
    for part in unpacked(target):
        while isinstance(part, ast.Subscript):
            part = part.value
            if isinstance(part, ast.Name):
                yield part.id


def _names(node: ast.expr, context: type[ast.expr_context]) -> Iterator[str]:
    for part in walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, context):
            yield part.id
