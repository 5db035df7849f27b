"""What is kept with its graph beyond an iteration: sums, lists, meters, attention maps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from oomfix.script.analyses.loops import is_over_batches
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.trace import Backward, Forward, Guard, Keep, Loop, ModuleAttribute, Trace
from oomfix.script.syntax.names import path_of
from oomfix.script.syntax.nodes import names_in, walk
from oomfix.script.syntax.patterns import Pattern

_ATTENTION_NAME = Pattern(r"attn|attention", re.IGNORECASE)
_EMPTYING = Pattern(r"(clear|reset|empty|flush)(_|$)", re.IGNORECASE)


def kept_graphs(trace: Trace, training_runs: set[int], evaluation_forwards: list[Forward]) -> Iterator[Keep]:
    """Everything that is kept with its graph beyond an iteration and never backpropagated."""
    evaluated = {forward.origin for forward in evaluation_forwards}
    backwards_of: dict[Function | None, list[Backward]] = {}
    for backward in trace.backwards:
        backwards_of.setdefault(backward.site.function, []).append(backward)
    # What is backpropagated on any way is a term of a loss, not a log; what numpy reads requires no gradients, unless
    # a backward runs on it.
    seen = {
        keep.node
        for number, keep in trace.keeps.items()
        if number in trace.backpropagated
        or (number in trace.read_by_numpy and not _is_differentiated(keep, backwards_of.get(keep.site.function, ())))
    }
    for keep in trace.keeps.values():
        if _goes_in_again(keep, trace) or _closes_a_window(keep, backwards_of.get(keep.site.function, ())):
            continue
        if not keep.certain or keep.node in seen or _is_given_to_another(keep, trace):
            continue
        if _is_part_of_one(keep, trace, training_runs):
            continue
        grows = (
            _grows_by_iteration(keep, trace, training_runs, evaluated, backwards_of)
            if keep.crossed
            else _grows_by_call(keep, backwards_of)
        )
        if grows:
            seen.add(keep.node)
            yield keep


def _is_differentiated(keep: Keep, backwards: Iterable[Backward]) -> bool:
    """Whether a backward of its function runs on the very name that is kept."""
    kept = path_of(keep.value)
    return kept is not None and any(_runs_on(backward, kept) for backward in backwards)


def _closes_a_window(keep: Keep, backwards: Iterable[Backward]) -> bool:
    """`loss += part`, and in other rounds of the same loop `loss.backward()`: what is added up is a loss."""
    return keep.manner == "add" and any(
        _runs_on(backward, keep.target) and not set(keep.crossed).isdisjoint(backward.site.loops)
        for backward in backwards
    )


def _runs_on(backward: Backward, path: str) -> bool:
    return any(path_of(part) == path for part in walk(backward.node) if isinstance(part, ast.Name | ast.Attribute))


def _grows_by_iteration(
    keep: Keep,
    trace: Trace,
    training_runs: set[int],
    evaluated: set[int],
    backwards_of: Mapping[Function | None, list[Backward]],
) -> bool:
    """Each round of the outermost loop that the target outlives makes a graph of its own.

    What is collected within a training iteration (samples, time steps, scales) goes with the iteration, unless it is
    that of a test in between. So do the steps in which an evaluation decodes a batch, and what each such step collects.
    """
    crossed = _outlived(keep)
    if not crossed:
        return False
    outside = len(keep.site.loops) - len(crossed)
    around = keep.site.loops[:outside]
    if around and is_over_batches(around[-1]) and isinstance(crossed[0], ast.While):
        return False
    if any(map(is_over_batches, around[:-1])):
        return False
    forwards = list(trace.forwards_of(keep.origins))
    in_test = keep.site.within_evaluation or (bool(forwards) and all(one.origin in evaluated for one in forwards))
    if any(run in training_runs for run in keep.site.runs[:outside]) and not in_test:
        return False
    if _is_a_step(keep, outside, backwards_of.get(keep.site.function, ())):
        return False
    if not forwards:
        return any(run in training_runs for run in keep.site.runs[outside:])
    trained = {run for forward in forwards for run in forward.site.runs} | set(keep.site.runs[outside:])
    if keep.returned and not trained & training_runs:
        function = keep.site.function
        evaluating = any(forward.evaluating for forward in forwards)
        if not evaluating and not (function is not None and function.evaluates):
            return False
    return any(crossed[0] in forward.site.loops for forward in forwards)


def _outlived(keep: Keep) -> tuple[Loop, ...]:
    """The loops whose iterations a target outlives: those within the last one of which each round starts it anew.

    One whose first round does so is the outermost of them: `for i, part in enumerate(parts):` with
    `if i == 0: total = loss`, `else: total += loss` in it.
    """
    crossed = keep.crossed
    for guard in keep.site.guards:
        counter = _compared_with_zero(guard.test) if isinstance(guard.statement, ast.If) else None
        if counter is not None and any(_resets(other, keep.target) for other in _other_side(guard)):
            inner = [index for index, loop in enumerate(crossed) if counter in _taken_by(loop)]
            crossed = crossed[inner[-1] :] if inner else crossed
            break
    anew = [index for index, loop in enumerate(crossed) if _starts_anew(loop, keep)]
    return crossed[anew[-1] + 1 :] if anew else crossed


def _starts_anew(loop: Loop, keep: Keep) -> bool:
    return any(_empties(statement, keep.target) for statement in loop.body if statement is not keep.statement)


def _other_side(guard: Guard) -> list[ast.stmt]:
    assert isinstance(guard.statement, ast.If)
    return guard.statement.orelse if guard.value else guard.statement.body


def _taken_by(loop: Loop) -> set[str]:
    """The names that a loop binds."""
    return set() if isinstance(loop, ast.While) else names_in(loop.target)


def _compared_with_zero(test: ast.expr) -> str | None:
    """`i` of `i == 0`, `i != 0` and `i > 0`."""
    match test:
        case ast.Compare(ast.Name(name), [ast.Eq() | ast.NotEq() | ast.Gt()], [ast.Constant(0)]):
            return name
    return None


def _grows_by_call(keep: Keep, backwards_of: Mapping[Function | None, list[Backward]]) -> bool:
    """Each call of a method that trains leaves a graph on its object, and no call takes it off.

    It is called for every batch: a backward runs in it, outside of loops, or it is called again and again in sight.
    """
    function = keep.site.function
    if function is None or any(_empties(part, keep.target) for part in _run_by(function)):
        return False
    backwards = [backward for backward in backwards_of.get(function, ()) if backward.site.way == keep.site.way]
    return any(not backward.site.loops for backward in backwards) or (bool(backwards) and function.calls > 1)


def _run_by(function: Function) -> Iterator[ast.AST]:
    """The statements that each call of a method comes to, and all of the methods of its object that it calls."""
    if not isinstance(function.node, ast.Lambda):
        yield from function.node.body
    for node in function.nodes:
        path = path_of(node.func) if isinstance(node, ast.Call) else None
        if path is not None and path.startswith("self.") and function.owner is not None:
            own = function.owner.find(path.removeprefix("self."))
            yield from own.nodes if own is not None and own is not function else ()


def _empties(statement: ast.AST, path: str) -> bool:
    """`self.losses = []`, `self.losses.clear()`, `del self.losses[:]`, and `memory.clear()` of `memory.losses`."""
    if isinstance(statement, ast.Assign):
        return _resets(statement, path)
    if isinstance(statement, ast.Delete):
        return any(
            path_of(target.value if isinstance(target, ast.Subscript) else target) == path
            for target in statement.targets
        )
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(holder, method), [], [])):
            if path_of(holder) == path.rpartition(".")[0] != "self":
                return bool(_EMPTYING.match(method))
            return path_of(holder) == path and method == "clear"
    return False


def _goes_in_again(keep: Keep, trace: Trace) -> bool:
    """`x = x - step * net(x)`, `x = torch.cat([x, net(x)])`: a sample in the making; mend the forward, or the state."""
    given = (argument for forward in trace.forwards_of(keep.origins) for argument in forward.given)
    return any(isinstance(part, ast.expr) and path_of(part) == keep.target for part in walk(*given))


def _is_given_to_another(keep: Keep, trace: Trace) -> bool:
    """`outs = torch.cat((outs, out))` and `attention(outs)` in its function: what is kept is what a network goes on."""
    return any(
        path_of(part) == keep.target
        for forward in trace.forwards.values()
        if forward.site.function is keep.site.function and forward.origin not in keep.origins
        for part in walk(*forward.given)
        if isinstance(part, ast.expr)
    )


def _is_part_of_one(keep: Keep, trace: Trace, training_runs: set[int]) -> bool:
    """Whether what is kept is a part of one graph, that of all rounds of its loop."""
    if _goes_through_layers(keep.crossed):
        return True
    if len(keep.crossed) != 1:
        return False
    if _is_of_an_ensemble(keep) or (keep.returned and _goes_through_samples(keep.crossed[0])):
        return True
    if not _goes_on_through_all(keep, trace):
        return False
    return isinstance(keep.node, ast.Subscript) or _is_of_one_sample(keep, training_runs)


def _goes_through_layers(loops: tuple[Loop, ...]) -> bool:
    """Whether loops go through layers, also block by block: `for block in blocks: for layer in block: x = layer(x)`."""
    if not loops or not _runs_layer_by_layer(loops[-1]):
        return False
    return all(
        not isinstance(inner, ast.While) and path_of(inner.iter) in _taken_by(outer) for outer, inner in pairwise(loops)
    )


def _runs_layer_by_layer(loop: Loop) -> bool:
    """`for layer in net.children(): x = layer(x)`: every round goes on with what the one before has made."""
    layers = _taken_by(loop)
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and path_of(node.value.func) in layers
        and not names_in(*node.targets).isdisjoint(map(path_of, node.value.args))
        for node in walk(loop)
    )


def _is_of_an_ensemble(keep: Keep) -> bool:
    """`outputs[:, i] = member(x)` of the members of an ensemble, returned for whoever asks."""
    if not isinstance(keep.node, ast.Subscript):
        return False
    return keep.returned and isinstance(keep.node.slice, ast.Tuple) and not is_over_batches(keep.crossed[0])


def _goes_through_samples(loop: Loop) -> bool:
    """`for i in range(x.size(0)): net(x[i])`: what is returned of that is as large as what one forward of `x` gives."""
    match loop:
        case ast.For(
            iter=ast.Call(
                ast.Name("range"),
                [
                    ast.Call(ast.Attribute(whole, "size"), [ast.Constant(0)])
                    | ast.Subscript(ast.Attribute(whole, "shape"), ast.Constant(0))
                ],
            )
        ):
            taken = (node.value for node in walk(loop) if isinstance(node, ast.Subscript))
            return any(path_of(part) == path_of(whole) is not None for part in taken)
    return False


def _goes_on_through_all(keep: Keep, trace: Trace) -> bool:
    """`outputs[t] = output`, of a network that is given its own state at every step: one graph reaches through all."""
    steps = [forward for forward in trace.forwards_of(keep.origins) if keep.crossed[0] in forward.site.loops]
    return bool(steps) and all(forward.carried for forward in steps)


def _is_of_one_sample(keep: Keep, training_runs: set[int]) -> bool:
    """Whether its loop goes through one batch or sample, training on nothing: what it leaves goes with that.

    A test may also add up losses from batch to batch of one long sequence.
    """
    loop = keep.crossed[0]
    if keep.site.run_of(loop) in training_runs or is_over_batches(loop):
        return False
    around = keep.site.loops[: -len(keep.crossed)]
    return any(map(is_over_batches, around)) or (keep.manner == "store" and keep.site.within_evaluation)


def _is_a_step(keep: Keep, outside: int, backwards: Iterable[Backward]) -> bool:
    """Its function goes backwards once, later and where the target was made: its loops are the steps of one sample."""
    site = keep.site
    return site.function is not None and any(
        backward.site.way == site.way
        and backward.site.loops == site.loops[:outside]
        and backward.node.lineno > keep.node.lineno
        for backward in backwards
    )


def attention_maps(trace: Trace) -> list[ModuleAttribute]:
    """Attention maps that a module's forward leaves on the module with their graph."""
    return [kept for kept in trace.module_attributes.values() if _ATTENTION_NAME.search(kept.name)]


def _resets(statement: ast.stmt, path: str) -> bool:
    """Whether a statement sets a path anew, and not from what it held."""
    if not isinstance(statement, ast.Assign) or path not in map(path_of, statement.targets):
        return False
    return all(path_of(node) != path for node in walk(statement.value) if isinstance(node, ast.expr))
