"""Loops whose every round is a training of its own: over seeds, folds, or images that are optimized one by one."""

from __future__ import annotations

import ast
from itertools import takewhile

from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.trace import Forward, Loop, Step, Trace
from oomfix.script.syntax.names import last_of, path_of, without_moves
from oomfix.script.syntax.nodes import names_in, walk
from oomfix.script.syntax.parameters import bind_call


def is_over_trainings(loop: TrainingLoop, trace: Trace) -> bool:
    """Whether each round trains what it has made, in a loop of its own or by a backward beside that.

    Args:
        loop: one around others in which backwards run.
        trace: what happens in the file.
    """
    steps = [step for step in trace.steps if step.site.loop is loop.node]
    if steps and all(_optimizes_what_the_round_makes(step, loop.node) for step in steps):
        return True
    trained = [forward for backward in loop.backwards for forward in trace.forwards_of(backward.origins)]
    return bool(trained) and all(_is_made_by_each_round(forward, loop.node) for forward in trained)


def _is_made_by_each_round(forward: Forward, loop: Loop) -> bool:
    """`net = Net(size).to(device)` in the loop, and what a call in it hands over is that."""
    nodes = list(walk(loop))
    made = {
        target
        for node in nodes
        if isinstance(node, ast.Assign) and _is_object(without_moves(node.value))
        for target in map(path_of, node.targets)
    }
    called = (forward.path or "").split(".")[0]
    names = {called} | {
        path_of(argument)
        for function in forward.site.functions
        for node in nodes
        if isinstance(node, ast.Call) and path_of(node.func) == function.name
        for parameter, argument in bind_call(node, function.node.args).given
        if parameter.arg == called
    }
    return bool(names & made)


def _is_object(value: ast.expr) -> bool:
    """`Net(size)`, `networks.Net(size)`."""
    return isinstance(value, ast.Call) and last_of(path_of(value.func))[:1].isupper()


def _optimizes_what_the_round_makes(step: Step, loop: Loop) -> bool:
    """`image = source.clone()` and `optimizer = LBFGS([image])` where the step is made: the next round has others."""
    within = takewhile(lambda function: loop not in function.nodes, step.site.functions)
    return any(_makes_and_optimizes(function, step.optimizer) for function in within)


def _makes_and_optimizes(function: Function, optimizer: str) -> bool:
    """Whether all optimizers of a name are made in a function, of tensors that it makes itself."""
    assignments = [node for node in function.nodes if isinstance(node, ast.Assign)]
    made = {name for node in assignments for name in names_in(*node.targets)}
    given = [
        node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
        for node in assignments
        if optimizer in map(path_of, node.targets)
    ]
    return bool(given) and all(
        isinstance(tensors, ast.List | ast.Tuple)
        and all(isinstance(one, ast.Name) and one.id in made for one in tensors.elts)
        for tensors in given
    )
