"""Calls of models that stay where they are, in loops, run in the preset's precision by `memory.forward`."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator

from oomfix.rewrite.dataflow.blocks import Blocks
from oomfix.rewrite.dataflow.liveness import FunctionNode
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.facts.verdict import Verdict
from oomfix.rewrite.text.manager_calls import through_manager
from oomfix.script import Script, TrainingLoop
from oomfix.script.facts.trace import Forward
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import arguments_of
from oomfix.script.syntax.patterns import Pattern

# a method that computes the loss too would compute it in half precision
_WITH_LOSS = Pattern(r"\.\w*(loss|step|elbo|nll|objective|log_prob)\w*$", re.IGNORECASE)

_GRADIENTS = Pattern(r"(^|_)grad(s|ients?)?$", re.IGNORECASE)
# a policy gradient is a loss
_NO_GRADIENTS = Pattern(r"clip|requires|zero|(no|enable)_grad$|policy_?grad", re.IGNORECASE)


def model_call_edits(reading: Reading, verdicts: list[Verdict], manager: str) -> list[Edit]:
    """The edits that run the models of loops in place through the manager, where nothing else decides precision.

    Gradients that are differentiated again (gradient penalties), and those that the script takes itself, of losses
    that the manager does not scale, underflow in fp16: such a file keeps fp32.

    Args:
        reading: the file after everything else was done to its loops.
        verdicts: of its loops, in the same order.
        manager: the name of the manager.
    """
    script, blocks = reading.script, reading.blocks
    precision = script.precision
    decided = precision.trains_in_half or precision.autocasts_out_of_sight or precision.uses_apex
    differentiates = "create_graph" in script.source.text
    if not script.may_run_on_cuda or decided or differentiates or len(reading.loops) != len(verdicts):
        return []
    if any(_takes_gradients(call, blocks) for call in script.imports.nodes.of(ast.Call)):
        return []
    calls: dict[ast.Call, None] = {}
    judged = list(zip(reading.loops, verdicts, strict=True))
    split = {id(one.node) for loop, verdict in judged if verdict.form != "in-place" for one in loop.forwards}
    for loop, verdict in judged:
        called = dict.fromkeys(_models_called(script, loop, blocks, split))
        if verdict.form == "in-place":
            calls |= called
        elif verdict.runs_ahead:
            calls.update(dict.fromkeys(call for call in called if not _is_lifted(call, loop, blocks)))
    return through_manager(reading.layout, calls, f"{manager}.forward")


def _takes_gradients(call: ast.Call, blocks: Blocks) -> bool:
    """Whether a call's value are gradients: `torch.autograd.grad(loss, x)`, `flat_gradients(loss, model)`."""
    if not arguments_of(call) or isinstance(next(blocks.ancestors(call)), ast.Expr):
        return False
    name = last_name(call)
    return bool(_GRADIENTS.search(name)) and not _NO_GRADIENTS.search(name)


def _is_lifted(call: ast.Call, loop: TrainingLoop, blocks: Blocks) -> bool:
    """Whether a call stands in a function that was made of a slice of the loop."""
    scope = blocks.scope_of(call)
    return isinstance(scope, FunctionNode) and any(parent is loop.node for parent in blocks.ancestors(scope))


def _is_part_of_model(forward: Forward) -> bool:
    """Whether a forward runs in a method of a model in sight, whose call runs it."""
    return any(function.owner is not None and function.owner.is_module for function in forward.site.functions)


def _models_called(script: Script, loop: TrainingLoop, blocks: Blocks, split: Container[int]) -> Iterator[ast.Call]:
    """The calls of models in a loop, in what runs its backward, and in helpers that none of the `split` calls is in."""
    bodies = {id(loop.node)}
    helped = [one for one in loop.forwards if id(one.node) not in split and not _is_part_of_model(one)]
    for event in (*loop.backwards, *helped):
        scope = blocks.scope_of(event.node)
        if isinstance(scope, FunctionNode) and all(parent is not loop.node for parent in blocks.ancestors(event.node)):
            bodies.add(id(scope))
    precise = {id(forward.node) for forward in loop.forwards if forward.site.autocast is not None}
    networks = {forward.path for forward in script.trace.forwards.values()} - {None}
    for forward in loop.forwards:
        call = forward.node
        if forward.given and all(path_of(given) in networks for given in forward.given):
            continue  # `average(model)` updates what it was made of
        inside = any(id(parent) in bodies for parent in blocks.ancestors(call))
        path = path_of(call.func)
        if inside and id(call) not in precise and path is not None and not _WITH_LOSS.search(path):
            if script.is_forward_of_network(forward) and not script.precision.has_autocast_alternative(forward):
                yield call
