"""What a statement does about gradients: it makes, keeps, clips or resets them."""

from __future__ import annotations

import ast
import re

from oomfix.rewrite.dataflow.calls import called_name, calls_in
from oomfix.rewrite.dataflow.changes import OUTPUT_RECEIVERS, object_changed
from oomfix.rewrite.dataflow.collectives import is_collective
from oomfix.rewrite.dataflow.liveness import COMPREHENSIONS, nodes_of_scope
from oomfix.script.facts.named_like import looks_like_optimizer
from oomfix.script.syntax.names import last_name, last_of, path_of
from oomfix.script.syntax.nodes import arguments_of, only_argument
from oomfix.script.syntax.patterns import Pattern

CLIPPING = Pattern(r"^clip_(grad|coef)|clip_?g?norm|grad\w*_?(clip|norm)|clip\w*_?grad", re.IGNORECASE)
"""What clips gradients, or asks for their norm: `clip_grad_norm_`, `gradient_clipping`, `clip_gnorm`."""

_HARMLESS = Pattern(
    r"log|print|write|update|append|extend|^add|record|plot|show|save|dump|display|visuali[sz]|^draw|render|"
    r"set_desc|set_postfix|tick|tic|toc|stop|lr|learning_rate|warmup|sched|anneal|start|push|count|meter|"
    r"measure|synchronize|info|debug|warning|error|report|track|store|collect|exit|sleep|insert|put|flush|assert|close|makedir|mkdir",
    re.IGNORECASE,
)

_RECORDS = Pattern(r"hist(ory)?(_|$)|averager?(_|$)|meters?(_|$)|metrics?(_|$)|losses(_|$)", re.IGNORECASE)
"""Objects that are told numbers: `train_loss_hist.send(value)`."""

_ABOUT_RATES = Pattern(r"lr|learning_?rate|warm_?up|sched|anneal|log|print|report|track", re.IGNORECASE)
"""What functions that are given an optimizer say in their names when they look at nothing but its learning rate."""

_STEPPING = frozenset("step backward".split())

_TOLD_OF_STEPS = Pattern(
    r"(^|_)((p|progress_?)?bar|progress|meters?|metrics?|scores?|stats?|(stats?_?)?keeper|logger|recorder|history)$|"
    r"[a-z](Meter|Metric|Logger|Keeper)s?$"
)
"""Objects whose `step(...)` is told how far training is: `metrics.step(loss=loss)`."""


def is_zero_grad(statement: ast.stmt) -> bool:
    """Whether a statement only drops or zeroes gradients, all of them or those of some of its branches."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_name(statement.value) == "zero_grad" or _zeroes_gradient(statement.value)
    if isinstance(statement, ast.For) and not statement.orelse:
        return all(_drops_gradient(child) or is_zero_grad(child) for child in statement.body)
    if isinstance(statement, ast.If):
        return all(map(is_zero_grad, (*statement.body, *statement.orelse))) and not any(calls_in(statement.test))
    return False


def frees_gradients_of(statement: ast.stmt, path: str | None) -> bool:
    """Whether a statement frees an optimizer's gradients; filled with zeros, they go on moving momenta."""
    return (
        path is not None
        and isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr == "zero_grad"
        and path_of(statement.value.func.value) == path
        and getattr(only_argument(statement.value), "value", None) is not False
    )


def _zeroes_gradient(call: ast.Call) -> bool:
    """`parameter.grad.zero_()`, `parameter.grad.data.zero_()`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "zero_" else None
    if isinstance(owner, ast.Attribute) and owner.attr == "data":
        owner = owner.value
    return isinstance(owner, ast.Attribute) and owner.attr == "grad"


def only_clips(statement: ast.stmt) -> bool:
    """Whether a statement clips gradients, and nothing takes their norm: ahead of a backward, those from before."""
    return isinstance(statement, ast.Expr) and bool(CLIPPING.search(called_name(statement.value)))


def _drops_gradient(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is None
        and all(isinstance(target, ast.Attribute) and target.attr == "grad" for target in statement.targets)
    )


def keeps_gradients(node: ast.AST) -> bool:
    """Whether a node asks for the gradient of something computed, which a backward then leaves there or gives away."""
    return any(last_name(call) in ("retain_grad", "register_hook") for call in calls_in(node))


def may_reset_gradients(statement: ast.stmt) -> bool:
    """Whether a statement resets gradients, or calls something that might: for its effect, or with an optimizer."""
    if any("grad" in last_name(call) and "no_grad" not in last_name(call) for call in calls_in(statement)):
        return True
    if any(_takes_optimizer(call) and not _ABOUT_RATES.search(last_name(call)) for call in calls_in(statement)):
        return True
    for node in nodes_of_scope(statement):
        if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store):
            return True
        for call in _calls_for_effect(node):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            harmless = (
                _HARMLESS.search(last_name(call))
                or only_tells_of_step(call)
                or (
                    owner is not None
                    and (OUTPUT_RECEIVERS.search(object_changed(owner)) or _RECORDS.search(last_of(path_of(owner))))
                )
            )
            if not harmless and not _averages_a_result(call, statement):
                return True
    return False


def _takes_optimizer(call: ast.Call) -> bool:
    given = arguments_of(call)
    return any(looks_like_optimizer(path_of(argument) or "") for argument in given)


def _calls_for_effect(node: ast.AST) -> list[ast.Call]:
    """The calls of a statement whose results nobody takes: `f(x)`, `[p.data.clamp_(0, 1) for p in parameters]`."""
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(value, COMPREHENSIONS):
        value = value.elt if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp) else None
    return [value] if isinstance(value, ast.Call) else []


def _averages_a_result(call: ast.Call, statement: ast.stmt) -> bool:
    """`dist.all_reduce(accuracy)`, but not `for p in model.parameters(): dist.all_reduce(p)`."""
    if not is_collective(call):
        return False
    return not any(isinstance(node, ast.For | ast.While) for node in nodes_of_scope(statement)) and all(
        isinstance(argument, ast.Name) for argument in call.args
    )


def trains(node: ast.AST) -> bool:
    """Whether a node runs a backward or a step."""
    return any(last_name(call) in _STEPPING and not only_tells_of_step(call) for call in calls_in(node))


def only_tells_of_step(call: ast.Call) -> bool:
    """`metrics.step(loss=loss)`, `bar.step(1)`: an optimizer's step is given nothing, or a function."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else None
    if owner is None or (not call.args and not call.keywords) or not _TOLD_OF_STEPS.search(last_of(path_of(owner))):
        return False
    return not _takes_optimizer(call) and not any(isinstance(one, ast.Lambda) for one in arguments_of(call))
