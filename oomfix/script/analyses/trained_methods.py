"""Methods of networks of other files that training certainly goes back through: they leave gradients on."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise

from oomfix.script.facts.named_like import is_likelihood, is_loss_not_weight
from oomfix.script.facts.trace import Backward, Forward, Step, Trace
from oomfix.script.syntax.names import MOVES, last_of, path_of, undistributed

_PARAMETERS = ("parameters", "named_parameters")
_OF_ITS_OWN = frozenset({"optimizer", "optim", "opt"})
"""Under these names a network holds the optimizer of its parameters."""


def methods_backpropagated_alone(trace: Trace) -> set[Hashable]:
    """Methods whose results alone, of all that networks of the file gave, are backpropagated somewhere."""
    each = [{forward.method for forward in trace.forwards_of(backward.origins)} for backward in trace.backwards]
    alone = {method for methods in each if len(methods) == 1 for method in methods}
    return alone | methods_of_terms(trace) | _losses_backpropagated(trace)


def _losses_backpropagated(trace: Trace) -> set[Hashable]:
    """Methods named like a loss or a likelihood, which a backward goes through together with others."""
    ran = (forward for origin, forward in trace.forwards.items() if origin in trace.backpropagated and forward.given)
    return {forward.method for forward in ran if is_likelihood(last_of(forward.path))}


def methods_of_terms(trace: Trace) -> set[Hashable]:
    """Methods whose results alone make a term of a loss: of those collected for a backward, or as a criterion gave it.

    A term without a graph would do nothing: `losses.append((returns - net.judge(x)).square().mean())`.
    """
    collected = (
        keep.origins
        for number, keep in trace.keeps.items()
        if number in trace.backpropagated and is_loss_not_weight(keep.target)
    )
    judged = (origins for origins in trace.judged if origins and origins <= trace.backpropagated)
    each = [{forward.method for forward in trace.forwards_of(origins)} for origins in chain(collected, judged)]
    return {method for methods in each if len(methods) == 1 for method in methods}


def methods_of_stepped(trace: Trace, assignments: Sequence[ast.Assign]) -> set[Hashable]:
    """Methods that are all that a loss was made with of the network whose optimizer then makes a step.

    Args:
        trace: what happens in the file.
        assignments: those of the file, some of which make optimizers.
    """
    stepped = _stepped_networks(assignments)
    found: set[Hashable] = set()
    for backward, step in _backwards_with_their_step(trace):
        network = _network_of(step.optimizer, stepped)
        if network is None:
            continue
        ran = list(trace.forwards_of(backward.origins))
        around = _made_around(network, assignments)
        methods = {forward.method for forward in ran if _is_of(forward, network)}
        if len(methods) == 1 and not any(forward.path in around for forward in ran):
            found |= methods
    return found


def methods_of_trained(trace: Trace, calls: Sequence[ast.Call], assignments: Sequence[ast.Assign]) -> set[Hashable]:
    """Methods that are all that runs a network of which the file trains the parameters.

    `loss = model.training_step(batch)` is all that is backpropagated; or nothing of the file calls the network itself.

    Args:
        trace: what happens in the file.
        calls: those of the file, some of which ask a network for its parameters or switch it to `train()`.
        assignments: those of the file, some of which wrap a network.
    """
    called = {path_of(call.func) for call in calls}
    found = methods_of_terms(trace)
    for backward in trace.backwards:
        ran = list(trace.forwards_of(backward.origins))
        for forward in ran:
            network = undistributed(forward.path or "").rpartition(".")[0]
            trained = any(f"{network}.{asked}" in called for asked in (*_PARAMETERS, "train"))
            if forward.direct or forward.evaluating or backward.unseen or not trained:
                continue
            if len({one.method for one in ran}) == 1 or _is_run_by_one_method(network, ran, called, assignments):
                found.add(forward.method)
    return found


def _is_run_by_one_method(
    network: str, ran: Iterable[Forward], called: set[str | None], assignments: Iterable[ast.Assign]
) -> bool:
    """Whether nothing calls a network or what wraps it, and all of it that ran for a loss is one method.

    What is on no device may be no network: `loader.train()` chooses between two sets of data.
    """
    around = _made_around(network, assignments)
    if network in called or any(forward.path in around for forward in ran):
        return False
    placed = any(f"{network}.{asked}" in called for asked in (*_PARAMETERS, *MOVES))
    return placed and len({forward.method for forward in ran if _is_of(forward, network)}) == 1


def _is_of(forward: Forward, network: str) -> bool:
    return f"{forward.path}.".startswith(f"{network}.")


def _backwards_with_their_step(trace: Trace) -> Iterator[tuple[Backward, Step]]:
    """Each backward that an optimizer's step follows in the same function, before any other backward."""
    events: list[Backward | Step] = sorted((*trace.backwards, *trace.steps), key=lambda event: event.order)
    for backward, step in pairwise(events):
        if isinstance(backward, Backward) and isinstance(step, Step) and backward.site.function is step.site.function:
            yield backward, step


def _network_of(optimizer: str, stepped: dict[str, set[str]]) -> str | None:
    """The one network that an optimizer steps: what it was made with, or what holds it (`actor.optimizer`)."""
    networks = stepped.get(optimizer)
    if networks is not None:
        return next(iter(networks)) if len(networks) == 1 else None
    holder, _, name = optimizer.rpartition(".")
    return holder if name in _OF_ITS_OWN and holder not in ("", "self") else None


def _stepped_networks(assignments: Iterable[ast.Assign]) -> dict[str, set[str]]:
    """By the path of what may be an optimizer, the networks whose parameters it was made with."""
    found: dict[str, set[str]] = {}
    for statement in assignments:
        if not isinstance(statement.value, ast.Call):
            continue
        networks = set(_given_parameters_of(statement.value))
        name = networks.pop() if len(networks) == 1 else ""  # made with something else, or with more than one network
        for target in statement.targets:
            if (path := path_of(target)) is not None:
                found.setdefault(path, set()).add(name)
    return {path: names for path, names in found.items() if names != {""}}


def _given_parameters_of(call: ast.Call) -> Iterator[str]:
    """The networks whose parameters a call is given: `make_optimizer("adam", net.parameters())`."""
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        match argument:
            case ast.Call(ast.Attribute(network, "parameters")):
                yield path_of(network) or ast.unparse(network)


def _made_around(network: str, assignments: Iterable[ast.Assign]) -> set[str | None]:
    """The paths of what is made with a network, and may run it: `elbo = SVI(net)`."""
    return {
        path_of(target)
        for statement in assignments
        if isinstance(statement.value, ast.Call) and network in map(path_of, statement.value.args)
        for target in statement.targets
    }
