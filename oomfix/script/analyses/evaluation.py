"""Evaluation passes: forwards through which no backward goes."""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile

from oomfix.script.analyses.acting import acts_in_environment
from oomfix.script.analyses.input_gradients import (
    is_differentiated_out_of_sight,
    may_be_asked_for_gradients,
    may_differentiate_its_inputs,
    reads_gradients,
)
from oomfix.script.analyses.into_numbers import is_only_looked_at
from oomfix.script.analyses.rounds import read_behind, read_first
from oomfix.script.analyses.windows import is_window_test
from oomfix.script.facts.as_arrays import becomes_array
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.named_like import adapts_as_it_runs, looks_like_loss, looks_like_training
from oomfix.script.facts.trace import Backward, Forward, Guard, Loop, Site, Trace
from oomfix.script.syntax.names import last_name, last_of, path_of
from oomfix.script.syntax.nodes import names_in, walk
from oomfix.script.syntax.patterns import Pattern

_EVALUATION_DATA = Pattern(r"(^|_)(val|valid|validation|dev)(_|$)", re.IGNORECASE)
_AS_NUMBERS = frozenset(("numpy", "tolist", "item"))
_EVALUATION_LOADER = Pattern(r"(^|[^a-z])(val|valid|validation|test|dev(?!ice)|eval|infer|predict)", re.IGNORECASE)
_MOVES = frozenset(("to", "cuda"))
_TRAINING_FLAG = Pattern(r"^(do_?|is_?)?train(ing)?$", re.IGNORECASE)
_TRAINING_FLAGS = frozenset(("self.training", "self.is_training", "self.is_train", "is_training", "is_train"))


def find_evaluation_forwards(trace: Trace, training_runs: set[int], trained_methods: set[Hashable]) -> list[Forward]:
    """Every forward of an evaluation pass, on each way that leads to it.

    `training_runs` are the runs of loops in which a backward happens, `trained_methods` the methods of networks that
    training goes back through. Where an optimizer steps and no backward is in
    sight, it runs out of sight, in the loops that step.
    """
    with_backward = {run for backward in trace.backwards for run in backward.site.runs}
    stepping_alone = {step.site.runs[-1] for step in trace.steps if step.site.runs} - with_backward
    training_runs = training_runs | stepping_alone
    ended = [*(backward for backward in trace.backwards if backward.site.loops), *trace.fits]
    trained = [(event.order, _entry(event.site)) for event in ended]
    in_training_mode = {
        (forward.path, forward.site.runs[-1])
        for forward in trace.forwards.values()
        if forward.origin in trace.backpropagated and forward.site.runs and not forward.evaluating
    }
    waited_for = {
        id(scope.statement)
        for backward in trace.backwards
        for scope in backward.site.scopes
        if isinstance(scope, Guard)
    }
    differentiated = {origin for backward in trace.backwards if backward.is_grad_call for origin in backward.origins}
    needed = trace.backpropagated | differentiated
    differentiating = {backward.site.function for backward in trace.backwards}
    trained_by = _trained_by_their_function(trace)
    # a loss that asks for gradients of inputs, `def residual_loss(model, x)`, cannot do without them in an evaluation
    asking = differentiating - {None, *(one.site.function for one in trace.backwards if not one.is_grad_call)}
    return [
        forward
        for forward in trace.forwards.values()
        if (forward.direct or forward.taken_off or (forward.given and forward.method in trained_methods))
        and forward.origin not in needed
        and not forward.differentiates
        and not _is_in_training_branch(forward)
        and (forward.evaluating or stepping_alone.isdisjoint(forward.site.runs[-1:]))
        and not (forward.site.function in asking and _is_trained_elsewhere(forward, trace))
        and not _is_a_second_try(forward, trace)
        and (
            (_is_evaluation(forward, trace, training_runs, trained) and not _is_trained_out_of_sight(forward, trace))
            or (_is_between_steps(forward, in_training_mode) and not _feeds_a_network(forward, trace))
            or acts_in_environment(forward, trace)
            or _is_a_sample(forward, training_runs, waited_for)
            or (not forward.escaped and _is_left_out(forward, trained_by, trace))
        )
        and not is_differentiated_out_of_sight(forward, trace.followed)
        and not may_differentiate_its_inputs(forward, trace)
        and not adapts_as_it_runs(forward.path or "")
        and not reads_gradients(forward, differentiating)
    ]


def _is_evaluation(
    forward: Forward, trace: Trace, training_runs: set[int], trained: list[tuple[int, Hashable]]
) -> bool:
    site = forward.site
    # An action may leave with its log probability, and a loss out of sight go back through that.
    acted = forward.escaped and any(function.acts for function in site.functions)
    given = not training_runs.isdisjoint(site.runs) and _is_given_evaluation_data(forward) and not forward.escaped
    if site.runs and site.runs[-1] in training_runs:
        named = _is_asked_for_by_an_evaluation(forward, trace) and not acted
        # In a training iteration it may be a teacher or a sample for the discriminator: only what says so evaluates.
        return named or given or (_is_only_looked_at(forward, trace) and not _makes_kept_losses(forward, trace))
    if given:
        return True
    if forward.evaluating:
        # Whoever asks for a loss may backpropagate it, also through a network that is not trained itself.
        return not (forward.escaped and site.loop is None and _makes_a_loss(site.function))
    if _tries_itself_out(site) and not (site.loop is not None and _says_evaluation(site.loop)):
        return False
    if site.within_evaluation and not forward.stored and not _may_be_tried_out(forward, trace):
        if forward.escaped and (
            _is_named_for_training_too(forward, trace) or may_be_asked_for_gradients(forward, trace)
        ):
            return False
        return not acted
    if forward.escaped:
        return False
    if forward.made_for_evaluation:
        return True
    within_training = any(run in training_runs for run in site.runs[:-1])
    if not within_training and _becomes_numbers(forward, trace):
        return True
    if site.loop is None:
        # When the training loop of this very run of the script has ended, outside of all loops: nothing trains here.
        orders = [order for order, entry in trained if entry == _entry(site)]
        constructing = any(function.name == "__init__" for function in site.functions)  # how large is what it gives?
        if any(order < forward.order for order in orders) and not constructing:
            return True
        # A script that trains nothing may only be trying out the network.
        return (site.function is not None or bool(orders)) and _is_only_looked_at(forward, trace)
    if _says_evaluation(site.loop):
        return True
    if _is_only_looked_at(forward, trace):
        return True
    return not (within_training or _is_said_to_train(site) or _is_for_training(forward, trace))


def _is_said_to_train(site: Site) -> bool:
    """`if args.do_train:`, around a training whose backward is missing or out of sight."""
    guards = site.guards_within(None)
    return any(guard.value and _TRAINING_FLAG.match(last_of(path_of(guard.test))) for guard in guards)


def _is_for_training(forward: Forward, trace: Trace) -> bool:
    """Whether a forward may be part of an update that a round makes, with what no backward is seen to go through."""
    if _makes_kept_losses(forward, trace):
        return True
    function = forward.site.function
    if function is not None and looks_like_loss(function.name) and _is_trained_elsewhere(forward, trace):
        return True  # the loss before the update
    # few scripts come to this question, and every module is a third of a millisecond of each run
    from oomfix.script.analyses.fed_to_training import feeds_training

    return feeds_training(forward, _where_it_is_used(forward, trace), trace)


def _tries_itself_out(site: Site) -> bool:
    """Whether a network that is being made runs its own layers: how large is what they give?"""
    owner = site.functions[0].owner if site.functions else None
    made = (function.owner for function in site.functions[1:] if function.name == "__init__")
    return owner is not None and owner.is_module and owner in made


def _makes_kept_losses(forward: Forward, trace: Trace) -> bool:
    """`model(image)`, and a backward in the same run of a loop through nothing made there: layers keep the losses."""
    runs = forward.site.runs

    def is_of_this_run(event: Forward | Backward) -> bool:
        return event.site.runs[: len(runs)] == runs

    return forward.discarded and any(
        is_of_this_run(backward) and not any(map(is_of_this_run, trace.forwards_of(backward.origins)))
        for backward in trace.backwards
    )


def _is_trained_elsewhere(forward: Forward, trace: Trace) -> bool:
    """Whether training goes back through the same line on another way."""
    return any(other.node is forward.node and other.origin in trace.backpropagated for other in trace.forwards.values())


def _is_named_for_training_too(forward: Forward, trace: Trace) -> bool:
    """Whether training goes back through the same line of `predict_poses`, which says no more than what it gives."""
    named = {function for function in forward.site.functions if function.evaluates}
    return any(
        other.node is forward.node and other.origin in trace.backpropagated and named <= set(other.site.functions)
        for other in trace.forwards.values()
    )


def _may_be_tried_out(forward: Forward, trace: Trace) -> bool:
    """Whether one call, outside of all loops, runs what is trained under the name of an evaluation."""
    return forward.site.loop is None and _is_named_for_training_too(forward, trace)


def _is_in_training_branch(forward: Forward) -> bool:
    """`if self.training: out = self.model(x)` in an object that says itself which way it goes."""
    return any(guard.value and path_of(guard.test) in _TRAINING_FLAGS for guard in forward.site.guards)


def _is_a_second_try(forward: Forward, trace: Trace) -> bool:
    """`except RuntimeError: out = net(x)`, where training goes back through what the `try` has made for the same."""
    site = forward.site
    return site.handling_exception and any(
        other.path == forward.path and other.site.function is site.function and other.origin in trace.backpropagated
        for other in trace.forwards.values()
        if not other.site.handling_exception
    )


def _is_asked_for_by_an_evaluation(forward: Forward, trace: Trace) -> bool:
    """Whether its function says by its name that it evaluates, or one that asks it for numbers, and trains nothing.

    `validation_statistics()` asks for the errors that the steps of training ask for as well.
    """
    functions = forward.site.functions
    if not functions:
        return False
    if functions[0].evaluates and not _is_trained_beside(forward, trace):
        return True
    trained = {function for backward in trace.backwards for function in backward.site.functions}
    asking = list(takewhile(lambda function: function not in trained, functions))
    return not forward.escaped and not forward.stored and any(function.evaluates for function in asking[1:])


def _is_trained_beside(forward: Forward, trace: Trace) -> bool:
    """Whether the same iteration trains through the same line: `def generate` gives samples for both networks."""
    return any(
        other.node is forward.node and other.origin in trace.backpropagated and other.site.runs == forward.site.runs
        for other in trace.forwards.values()
    )


def _is_trained_out_of_sight(forward: Forward, trace: Trace) -> bool:
    """`model.train()`, and in a loop `model(x)` and `model.update()`, in a file that holds no backward."""
    site = forward.site
    if not forward.training or site.loop is None or trace.backwards:
        return False
    return not (site.within_evaluation or _says_evaluation(site.loop))


def _becomes_numbers(forward: Forward, trace: Trace) -> bool:
    """`return self.net(x).detach().numpy()`: whoever asks for it gets numbers, through which nothing goes back."""
    function = forward.site.function
    if function is None:
        return forward.site.loop is None and _becomes_array(forward, trace)
    if looks_like_training(function.name):
        return False
    if any(_ends_in_numbers(node, forward) for node in function.nodes):
        return True
    if not function.mentions_arrays:
        return False
    if not (function.gives_arrays or (forward.path or "").startswith("self.") or not trace.backwards):
        return False  # `targets(net, batch)`, for what trains
    trained = (*trace.backwards, *trace.steps)
    if any(other in forward.site.functions for event in trained for other in event.site.functions):
        return False
    return _becomes_array(forward, trace)


def _becomes_array(forward: Forward, trace: Trace) -> bool:
    networks = {other.node for other in trace.forwards.values()}
    nodes = list(_where_it_is_used(forward, trace))
    return becomes_array(forward.node, nodes, lambda call: call in networks or call in trace.followed)


def _is_only_looked_at(forward: Forward, trace: Trace) -> bool:
    """Whether what it gives becomes numbers, text or pictures: nothing goes back through it, nor into training."""
    origin, function = forward.origin, forward.site.function
    for_a_target = "target" in f"{forward.path} {function.name if function is not None else ''}".lower()
    if for_a_target or not forward.given:
        return False
    kept = any(origin in keep.origins for keep in trace.keeps.values())
    if forward.escaped or forward.stored or kept or any(origin in origins for _, origins in trace.handed_on):
        return False
    networks = {other.node for other in trace.forwards.values()}
    paths = {other.path for other in trace.forwards.values()}

    def goes_on(call: ast.Call) -> bool:
        return call in networks or call in trace.followed or (path_of(call.func) or "").rpartition(".")[0] in paths

    asked = _asked_by(forward, trace)
    around = [_used_in(forward.site.functions[depth:], forward, trace) for depth in range(len(asked) + 1)]
    return is_only_looked_at([forward.node, *asked], around, goes_on)


def _asked_by(forward: Forward, trace: Trace) -> list[ast.Call]:
    """The calls that led to a forward, innermost first; none where training goes through it, or the way is unclear.

    What a function gives that is handed to another, `memory.forward_backward(forward, x)`, goes to that one.
    """
    if _is_trained_elsewhere(forward, trace):
        return []  # in its functions gradients stay on
    site, calls = forward.site, {id(call): call for call in trace.followed}
    asked = [calls[step] for step in reversed(site.way) if step in calls]
    followed = site.functions[: len(asked)]
    plain = all(last_name(call) == function.name for call, function in zip(asked, followed, strict=False))
    return asked if plain and len(asked) == len(site.functions) - (site.way[:1] == ("entry",)) else []


def _where_it_is_used(forward: Forward, trace: Trace) -> Iterable[ast.AST]:
    return _used_in(forward.site.functions, forward, trace)


def _used_in(functions: Sequence[Function], forward: Forward, trace: Trace) -> Iterable[ast.AST]:
    """Where what the innermost of some functions makes may be used, or what the loops around all of them make."""
    if functions:
        return functions[0].nodes
    loops = forward.site.loops
    return walk(loops[0]) if loops else trace.module_level


def _ends_in_numbers(node: ast.AST, forward: Forward) -> bool:
    """`return self.net(x).sum().item()`."""
    match node:
        case ast.Return(ast.Call(ast.Attribute(attr=method)) as value) if method in _AS_NUMBERS:
            return any(part is forward.node for part in walk(value))
    return False


def _makes_a_loss(function: Function | None) -> bool:
    """`def perceptual_loss(net, out, target)`, `PerceptualLoss.__call__`: named like a loss, and not like a test."""
    if function is None or function.evaluates:
        return False
    return looks_like_loss(function.name) or (function.owner is not None and looks_like_loss(function.owner.name))


def _is_between_steps(forward: Forward, in_training_mode: set[tuple[str | None, int]]) -> bool:
    """`model.eval()` and a forward, in an iteration that trains the same network in its other mode."""
    runs = forward.site.runs
    return (
        forward.evaluating
        and not forward.escaped
        and not forward.stored
        and bool(runs)
        and (forward.path, runs[-1]) in in_training_mode
    )


def _feeds_a_network(forward: Forward, trace: Trace) -> bool:
    """Whether what is assigned from a forward goes into another one of the iteration: a sample for a discriminator."""
    loop = forward.site.loop
    taken = _taken(loop, forward) if loop is not None else set()
    first = read_first(loop) if taken and loop is not None else set()
    return any(
        path_of(part) in taken and (_is_later(other, forward) or path_of(part) in first)
        for other in trace.forwards.values()
        if other.site.loop is loop and (other.origin in trace.backpropagated or not other.evaluating)
        for part in walk(*other.given)
        if isinstance(part, ast.Name | ast.Attribute)
    )


def _is_later(other: Forward, forward: Forward) -> bool:
    """Whether a forward stands behind another one, or in another function."""
    return other.site.function is not forward.site.function or other.node.lineno > forward.node.lineno


def _trained_by_their_function(trace: Trace) -> set[tuple[int, Function | None]]:
    """Forwards whose own function backpropagates them under a condition: where a flag leaves that out, it evaluates."""
    return {
        (id(forward.node), forward.site.function)
        for backward in trace.backwards
        if backward.site.function is not None and not backward.is_grad_call
        for forward in trace.forwards_of(backward.origins)
        if forward.site.function is backward.site.function
    }


def _is_left_out(forward: Forward, trained_by: set[tuple[int, Function | None]], trace: Trace) -> bool:
    """Whether its function goes back through it on another way, and on this one through nothing."""
    here = forward.site.function, forward.site.way
    return (id(forward.node), forward.site.function) in trained_by and not any(
        (backward.site.function, backward.site.way) == here for backward in trace.backwards
    )


def _entry(site: Site) -> Hashable:
    """The function that is called out of sight, where the way to a place starts with one."""
    return site.way[:2] if site.way[:1] == ("entry",) else None


def _is_a_sample(forward: Forward, training_runs: set[int], waited_for: set[int]) -> bool:
    """`if i % 100 == 0: images = generator(noise)` in a training iteration: a look at the network.

    `waited_for` are the decisions that a backward waits for; what the rest of the iteration reads is part of it.
    """
    site = forward.site
    loop = next((loop for loop, run in zip(site.loops, site.runs, strict=True) if run in training_runs), None)
    if forward.escaped or loop is None:
        return False
    return any(
        isinstance(guard.statement, ast.If)
        and guard.value
        and (is_window_test(guard.test) or _picks_rounds(guard.test, loop))
        and id(guard.statement) not in waited_for
        and not _is_read_later(guard.statement, forward, loop)
        for guard in site.guards_within(loop)
    )


def _picks_rounds(test: ast.expr, loop: Loop) -> bool:
    """`i == 0`, `i == len(loader) - 1`, `i in shown`, of what a loop counts."""
    match test:
        case ast.Compare(ast.Name(counter), [ast.Eq() | ast.In()]):
            return counter in _counters(loop)
    return False


def _counters(loop: Loop) -> set[str]:
    """What a loop goes through by itself, and what its body counts: `batch += 1`."""
    counted = {
        statement.target.id
        for statement in loop.body
        if isinstance(statement, ast.AugAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    return counted if isinstance(loop, ast.While) else counted | names_in(loop.target)


def _is_read_later(decision: ast.If, forward: Forward, loop: Loop) -> bool:
    """Whether what is assigned from a forward is read after the decision that it is made under, or a round later."""
    taken = _taken(decision, forward)
    end = decision.end_lineno or decision.lineno
    return bool(taken & (read_first(loop) | read_behind(decision, loop))) or any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.lineno > end
        and path_of(node) in taken
        for node in walk(loop)
    )


def _taken(block: ast.stmt, forward: Forward) -> set[str | None]:
    """The paths that are assigned from a forward in a block."""
    return {
        path_of(target)
        for statement in walk(block)
        if isinstance(statement, ast.Assign) and any(node is forward.node for node in walk(statement.value))
        for listed in statement.targets
        for target in (listed.elts if isinstance(listed, ast.Tuple) else [listed])
    }


def _is_given_evaluation_data(forward: Forward) -> bool:
    """`model(val_x)`: the names of what goes in say it; in `model(x.to(dev))`, `dev` is a device."""
    nodes = list(walk(*forward.given))
    devices = {part for node in nodes for part in walk(*_devices_in(node))}
    return any(isinstance(node, ast.Name) and _EVALUATION_DATA.search(node.id) for node in nodes if node not in devices)


def _devices_in(node: ast.AST) -> list[ast.expr]:
    """`dev` of `x.to(dev)` and `torch.zeros(8, device=dev)`."""
    if isinstance(node, ast.Call) and last_name(node) in _MOVES:
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return [node.value] if isinstance(node, ast.keyword) and node.arg == "device" else []


def _says_evaluation(loop: Loop) -> bool:
    """A loop inside of a training iteration may be its time steps or scales; a validation loader says what it is."""
    return isinstance(loop, ast.For | ast.AsyncFor) and bool(_EVALUATION_LOADER.search(ast.unparse(loop.iter)))
