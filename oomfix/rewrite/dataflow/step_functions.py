"""Functions that make one training step each time they are called: `agent.train(batch)`, for a loop in another file."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from oomfix.script import Script, TrainingLoop
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.trace import Site


@dataclass(eq=False)
class StepFunction(TrainingLoop):
    """Such a function, as the loop around its calls: `node` stands in no file, but its body is the function's.

    Attributes:
        name: the function's name.
    """

    name: str = ""


def training_loops(script: Script) -> list[TrainingLoop]:
    """The training loops of a script and its step functions, by line."""
    own = [function for function in step_functions(script) if function.forwards]
    return sorted([*script.loops, *own], key=lambda loop: loop.line)


def step_functions(script: Script) -> list[StepFunction]:
    """Functions that nothing in the file calls, with a backward and a step, and no loop around the backward.

    The forwards of some of them are out of sight: what one method keeps, another backpropagates.
    """
    trace = script.trace
    found: dict[Function, StepFunction] = {}
    in_loops = {event.node for event in trace.backwards if event.site.loops}
    for backward in () if script.is_test_module else trace.backwards:
        entry = None if backward.is_grad_call or backward.node in in_loops else _entry(backward.site)
        if entry is not None:
            loop = found.setdefault(entry, _around(entry))
            loop.backwards.append(backward)
            loop.framework = loop.framework or backward.framework or ("apex" if backward.site.apex else None)
    for step in trace.steps:
        if (entry := _entry(step.site)) in found and not step.site.loops:
            found[entry].steps.append(step)
    for forward in trace.forwards.values():
        if forward.origin in trace.backpropagated and (entry := _entry(forward.site)) in found:
            found[entry].forwards.append(forward)
    return [function for function in found.values() if function.steps]


def _entry(site: Site) -> Function | None:
    """The function around a place that was entered for want of a caller in the file."""
    outermost = site.functions[-1] if site.functions else None
    entered = outermost is not None and site.way[:2] == ("entry", id(outermost.node))
    return outermost if entered else None


def _around(function: Function) -> StepFunction:
    node = function.node
    assert not isinstance(node, ast.Lambda)
    loop = ast.While(ast.Constant(True), node.body, [], lineno=node.lineno, col_offset=node.col_offset)
    loop.end_lineno = node.end_lineno
    return StepFunction(loop, name=function.name)
