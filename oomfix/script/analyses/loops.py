"""Which loops of a script train, and which of its forwards and steps belong to each."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from itertools import takewhile

from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.analyses.windows import find_window
from oomfix.script.facts.named_like import looks_like_module
from oomfix.script.facts.trace import Backward, Forward, Loop, Step, Trace
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import names_in, walk
from oomfix.script.syntax.patterns import Pattern

_LOADER = Pattern(r"loader(_\w+)?\d*$|(^|_)dl\d*$", re.IGNORECASE)
_BATCH = Pattern(r"^(mini_?)?batch(_?(data|i|id|idx|index|no|num))?$", re.IGNORECASE)


def is_over_batches(loop: Loop) -> bool:
    """Whether names say what a loop is over: `for i, batch in enumerate(data)`, `for x, y in train_loader`."""
    if isinstance(loop, ast.While):
        return False
    iterable: ast.expr = loop.iter
    while isinstance(iterable, ast.Call) and iterable.args:
        iterable = iterable.args[0]  # `tqdm(enumerate(loader))`
    named = _LOADER.search(path_of(iterable) or "")
    return bool(named) or any(isinstance(node, ast.Name) and _BATCH.match(node.id) for node in walk(loop.target))


def is_over_networks(forward: Forward) -> bool:
    """Whether the loop around a forward makes its network or loads it in every round: over folds or checkpoints."""
    loop, called = forward.site.loop, (forward.path or "").split(".")[0]
    if loop is None or not called:
        return False
    helpers = takewhile(lambda function: loop not in function.nodes, forward.site.functions)
    nodes = [*walk(loop), *(node for function in helpers for node in function.nodes)]
    if any(isinstance(node, ast.Attribute) and node.attr == "load_state_dict" for node in nodes):
        return True
    assigned = [(node.value, set(map(path_of, node.targets))) for node in nodes if isinstance(node, ast.Assign)]
    return any(
        (value is forward.node and any(looks_like_module(target or "") for target in targets))
        or (called in targets and not any(isinstance(part, ast.Name) and part.id == called for part in walk(value)))
        for value, targets in assigned
    )


def find_training_loops(trace: Trace) -> list[TrainingLoop]:
    """Every training loop of a file, by line."""
    loops: dict[Loop, TrainingLoop] = {}
    parts = trace.pieces_of_batches.difference(*(step.site.loops for step in trace.steps))
    parts |= {loop for backward in trace.backwards for loop in backward.site.loops if _tries_again(loop)}
    for backward in trace.backwards:
        if backward.is_grad_call or not backward.site.loops:
            continue
        node = _batch_loop(backward, trace, parts)
        if node in trace.framework_loops:
            continue
        loop = loops.setdefault(node, TrainingLoop(node))
        loop.backwards.append(backward)
        loop.runs.add(backward.site.runs[backward.site.loops.index(node)])
        loop.framework = loop.framework or backward.framework or ("apex" if backward.site.apex else None)
    for node in [node for node, loop in loops.items() if _tries_again(node) and _is_inside_another(loop, loops)]:
        del loops[node]
    if outer := _around_others(loops):
        # few scripts come to this question, and every module is a third of a millisecond of each run
        from oomfix.script.analyses.whole_trainings import is_over_trainings

        for node in [node for node in loops if node in outer and is_over_trainings(loops[node], trace)]:
            del loops[node]
    _collect_forwards(loops, trace)
    _collect_steps(loops, trace)
    for loop in loops.values():
        loop.window = find_window(loop, trace)
        loop.batches = _loop_around_networks(loop, loops)
    return sorted(loops.values(), key=lambda loop: loop.line)


def _tries_again(loop: Loop) -> bool:
    """`while True:` around a `try` that ends with `break`, or `while not done:` around one that sets it: one batch."""
    if not isinstance(loop, ast.While):
        return False
    match loop.test:
        case ast.Constant():
            tried = loop.body[-1]
            return isinstance(tried, ast.Try) and any(
                isinstance(block[-1], ast.Break | ast.Return) for block in (tried.body, tried.orelse) if block
            )
        case ast.UnaryOp(ast.Not(), ast.Name(done)):
            tries = [statement for statement in loop.body if isinstance(statement, ast.Try)]
            return any(_says_so(statement, done) for tried in tries for statement in (*tried.body, *tried.orelse))
    return False


def _says_so(statement: ast.stmt, name: str) -> bool:
    """`done = True`."""
    match statement:
        case ast.Assign([ast.Name(assigned)], ast.Constant(True)):
            return assigned == name
    return False


def _is_inside_another(loop: TrainingLoop, loops: dict[Loop, TrainingLoop]) -> bool:
    """Whether the same backwards belong to another loop as well, where that calls for them."""
    others = {backward.node for other in loops.values() if other is not loop for backward in other.backwards}
    return all(backward.node in others for backward in loop.backwards)


def find_batch_loops(trace: Trace, training: list[TrainingLoop]) -> set[Loop]:
    """The innermost loops around the forwards of a file, and those that train; not those over networks."""
    inside = [forward for forward in trace.forwards.values() if forward.site.loops]
    outer = {loop for forward in inside for loop in forward.site.loops[:-1]}
    stages = {forward.site.loops[-1] for forward in inside if is_over_networks(forward)}
    over_batches = {forward.site.loops[-1] for forward in inside} - outer - stages
    return over_batches | {loop.node for loop in training}


def _batch_loop(backward: Backward, trace: Trace, parts: set[Loop]) -> Loop:
    """The innermost loop around both the backward and a forward it goes through.

    A loop over losses, scales or discriminators around the backward alone is part of an iteration, not a batch loop;
    nor is one of `parts`, which go over the pieces of a batch and leave the step to the loop around them, or try again.
    """
    around = backward.site.loops
    depths = [_shared_depth(around, forward.site.loops) for forward in trace.forwards_of(backward.origins)]
    depth = max(depths, default=0)
    while depth > 1 and around[depth - 1] in parts:
        depth -= 1
    if depth:
        return around[depth - 1]
    batches = [loop for loop in around if loop not in trace.loops_over_parts]
    return (batches or list(around))[-1]


def _shared_depth(first: tuple[Loop, ...], second: tuple[Loop, ...]) -> int:
    depth = 0
    for one, other in zip(first, second, strict=False):
        if one is not other:
            break
        depth += 1
    return depth


def _loop_around_networks(loop: TrainingLoop, loops: Mapping[Loop, TrainingLoop]) -> Loop | None:
    """`for x, y in loader:` around `for net, optimizer in zip(nets, optimizers):`, where no other loop in it trains."""
    depths = {forward.site.loops.index(loop.node) for forward in loop.forwards}
    if isinstance(loop.node, ast.While) or len(depths) != 1 or 0 in depths:
        return None
    around = loop.forwards[0].site.loops[depths.pop() - 1]
    others = (backward for other in loops.values() if other is not loop for backward in other.backwards)
    if isinstance(around, ast.While) or any(around in backward.site.loops for backward in others):
        return None
    taken, batch = names_in(loop.node.target), _made_of_batch(around)
    for forward in loop.forwards:
        given = names_in(*forward.given)
        if (forward.path or "").split(".")[0] not in taken or given & taken or not given & batch:
            return None
    return around


def _made_of_batch(loop: ast.For | ast.AsyncFor) -> set[str]:
    """What a loop binds in each round, and what its body makes of that: `x = x.cuda()`."""
    names = names_in(loop.target)
    for statement in loop.body:
        if isinstance(statement, ast.Assign) and names_in(statement.value) & names:
            names |= names_in(*statement.targets)
    return names


def _around_others(loops: Mapping[Loop, TrainingLoop]) -> set[Loop]:
    """The loops in which the backwards of others run."""
    inside = ((node, backward) for node, loop in loops.items() for backward in loop.backwards)
    return {outer for node, backward in inside for outer in backward.site.loops if outer is not node}


def _collect_forwards(loops: dict[Loop, TrainingLoop], trace: Trace) -> None:
    """Each forward belongs to the innermost training loop around it."""
    for forward in trace.forwards.values():
        node = next((node for node in reversed(forward.site.loops) if node in loops), None)
        if node is not None and (forward.origin in trace.backpropagated or _feeds_hooks(forward, loops[node])):
            loops[node].forwards.append(forward)


def _collect_steps(loops: dict[Loop, TrainingLoop], trace: Trace) -> None:
    """The steps in each loop, and those behind it in what surrounds it."""
    outside: dict[tuple[Loop, ...], list[TrainingLoop]] = {}
    for loop in loops.values():
        for around in {backward.site.loops[: backward.site.loops.index(loop.node)] for backward in loop.backwards}:
            outside.setdefault(around, []).append(loop)
    for step in trace.steps:
        for node in step.site.loops:
            if node in loops:
                loops[node].steps.append(step)
        for loop in outside.get(_around_optimizers(step), ()):
            if loop.node not in step.site.loops and _runs_after(step, loop):
                loop.later_steps.append(step)


def _feeds_hooks(forward: Forward, loop: TrainingLoop) -> bool:
    """A forward whose result nobody takes, in a training iteration: the loss gets at it by hooks or attributes."""
    return forward.discarded and forward.site.run_of(loop.node) in loop.runs and not forward.evaluating


def _around_optimizers(step: Step) -> tuple[Loop, ...]:
    """The loops around a step, but for `for optimizer in optimizers:`."""
    loops = step.site.loops
    while loops and isinstance(loops[-1], ast.For) and step.optimizer in names_in(loops[-1].target):
        loops = loops[:-1]
    return loops


def _runs_after(step: Step, loop: TrainingLoop) -> bool:
    """The step is behind the loop, in the same function or in the loop around it."""
    if step.node.lineno <= loop.end_line:
        return False
    return bool(step.site.loops) or step.site.function is loop.backwards[0].site.function
