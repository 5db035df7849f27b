"""Acting: a policy is asked what to do in an environment, and nothing goes back through the answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from oomfix.script.facts.trace import Forward, Trace
from oomfix.script.syntax.names import path_of, unpacked
from oomfix.script.syntax.nodes import walk
from oomfix.script.syntax.patterns import Pattern

_PARTS_OF_A_STEP = 3
"""An environment answers with an observation, a reward and whether it is over, at the least."""
_ENVIRONMENT = Pattern(r"(^|[._])env(ironment)?s?$", re.IGNORECASE)
"""Whose answer may be one object: the time step of dm_control, or what Unity tells of each brain."""


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
    if _goes_unread(forward, trace):
        return any(steps_of_environments(walk(forward.site.loops[-1])))
    asked = _asked(forward, trace)
    return any(_reaches(asked, step, nodes) for nodes in _around(forward) for step in steps_of_environments(nodes))


def _goes_unread(forward: Forward, trace: Trace) -> bool:
    """`q_values = net(state)` in a loop, where another function chooses the action: nobody asks for the name."""
    if forward.site.loop is None:
        return False
    function = forward.site.function
    nodes = trace.module_level if function is None else function.nodes
    names = {
        path_of(target)
        for node in nodes
        if isinstance(node, ast.Assign) and node.value is forward.node
        for target in node.targets
    }
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return bool(names) and None not in names and not any("." in (name or "") for name in names) and not names & read


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
    """The calls of `env.step(action)`, by what is assigned from them, or by the name of the environment."""
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        step, target = node.value, node.targets[0]
        while isinstance(step, ast.Subscript):
            step = step.value  # `env.step(actions)[brain_name]`
        if not (isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute)):
            continue
        if step.func.attr == "step" and step.args:
            of_parts = isinstance(target, ast.Tuple) and len(target.elts) >= _PARTS_OF_A_STEP
            if of_parts or _ENVIRONMENT.search(path_of(step.func.value) or ""):
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
