"""Taking gradients off an evaluation pass, where nothing that is run with it may need them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from oomfix.script.analyses.asked_for import where_graph_ends
from oomfix.script.analyses.input_gradients import differentiates_its_inputs
from oomfix.script.facts.definitions import Function
from oomfix.script.facts.named_like import looks_like_differentiating, looks_like_logging, looks_like_training
from oomfix.script.facts.trace import Backward, Forward, Loop
from oomfix.script.syntax.edits import Edit, line_start, newline_of, wrap
from oomfix.script.syntax.names import last_of, path_of
from oomfix.script.syntax.nodes import walk

if TYPE_CHECKING:
    from oomfix.script import Script


def no_grad_edits(script: Script, forward: Forward) -> tuple[Edit, ...]:
    """Take gradients off an evaluation pass: decorate its function where it never trains, else wrap its loop.

    A helper that gives its caller a graph is left alone where other files may call it: its caller is decorated.
    Empty where neither is certain: the forward is trained through on another way, its result goes out of sight, its
    network differentiates by its inputs, or no import has bound `torch` there.
    """
    if forward.escaped:
        return ()
    if differentiates_its_inputs(forward, script.evaluation_forwards):
        return ()
    forward = where_graph_ends(forward, script.trace)
    if _is_switched_on_again(script, forward):
        return ()
    function = forward.site.function
    if function is None:
        return _wrapped_loop(script, forward)
    node = function.node
    if script.trains_in(node) or _leaves_a_graph(script, node) or _reads_what_trains(script, node):
        return _wrapped_loop(script, forward)
    if isinstance(node, ast.Lambda) or node in script.nodes_trained_through:
        return ()
    if isinstance(node, ast.AsyncFunctionDef) or _may_need_gradients_out_of_sight(script, node):
        return _wrapped_loop(script, forward)
    if not _has_torch(script, node):
        return _wrapped_loop(script, forward)
    # Right above `def`: other decorators (property, classmethod, a web route) take the function as it then is.
    start = script.source.offset(node.lineno, node.col_offset)
    margin = script.source.text[line_start(script.source, start) : start]
    return (Edit(start, start, f"@torch.no_grad(){newline_of(script.source)}{margin}"),)


def why_not_edited(script: Script, forward: Forward) -> str:
    """Why an evaluation pass is left to be changed by hand."""
    function = where_graph_ends(forward, script.trace).site.function
    has_torch = _has_torch(script, forward.node if function is None else function.node)
    return "the code around it may need gradients" if has_torch else "torch is not imported as `torch`"


def _has_torch(script: Script, node: ast.expr | ast.stmt) -> bool:
    """Whether `torch` is torch right ahead of a node: a decorator is run where its function is defined."""
    return "torch" in script.imports.names.get("torch", ()) and script.imports.binds_ahead("torch", node.lineno)


def _is_switched_on_again(script: Script, forward: Forward) -> bool:
    """`with torch.set_grad_enabled(True):` around a forward, under which no decorator of its function counts."""
    line = forward.node.lineno
    return any(block.lineno <= line <= (block.end_lineno or line) for block in script.blocks_with_gradients)


def _leaves_a_graph(script: Script, node: ast.AST) -> bool:
    """Whether another forward in it leaves its graph to what is out of sight, such as the value of what was done.

    It may leave it in a list of an object, too, from where others take it.
    """
    evaluated = {forward.origin for forward in script.evaluation_forwards}
    return any(
        (forward.escaped or (forward.stored and forward.origin not in evaluated))
        and forward.records_graph
        and _is_inside(forward, node)
        for forward in script.trace.forwards.values()
    )


def _reads_what_trains(script: Script, node: ast.AST) -> bool:
    """Whether it computes with what a network has given that is trained: what it makes of that may be a loss."""
    return not script.trace.backpropagated.isdisjoint(script.trace.read_in.get(node, ()))


def _may_make_a_loss(script: Script, forward: Forward, loop: Loop) -> bool:
    """Whether a loop computes with what trains, and a backward follows in the same round of the loops around it."""
    around = forward.site.loops[: forward.site.loops.index(loop)]
    return _reads_what_trains(script, loop) and any(
        event.site.loops == around and not _stands_ahead(event, forward, loop) for event in script.trace.backwards
    )


def _stands_ahead(event: Backward, forward: Forward, loop: Loop) -> bool:
    """Whether a backward stands ahead of a loop in the same function."""
    return event.site.function is forward.site.function and event.node.lineno < loop.lineno


def _is_inside(forward: Forward, node: ast.AST) -> bool:
    return node in forward.site.loops or any(function.node is node for function in forward.site.functions)


def _may_need_gradients_out_of_sight(script: Script, node: ast.AST) -> bool:
    """`finetune(model, loader)`, `adversary.perturb(x, y)`: calls out of sight that are named as if they need them.

    So is `self.update()` where the class leaves it to others to say what that does.
    """
    calls = [child for child in walk(node) if isinstance(child, ast.Call) and child not in script.trace.followed]
    if any(call.args and looks_like_differentiating(path_of(call.func) or "") for call in calls):
        return True
    return any(
        looks_like_training(last_of(path_of(call.func)))
        for call in calls
        if call in script.trace.left_open or not _switches_or_counts(script, call)
    )


def _switches_or_counts(script: Script, call: ast.Call) -> bool:
    """`model.train()`, `bar.update(1)`; but `self.learn()` is for a class of another file to say."""
    method = call.func
    if not isinstance(method, ast.Attribute):
        return False
    own = path_of(method.value) == "self" and method.attr != "train"
    return (not call.args and not own) or _counts(script, method, call.args)


def _counts(script: Script, method: ast.Attribute, given: list[ast.expr]) -> bool:
    """`losses.update(loss.item(), x.size(0))`, `bar.update(1)`: a meter, by its name or class, is given a number."""
    if not any(map(_is_a_number, given)):
        return False
    if method.attr != "update":
        return method.attr.startswith("update_") and looks_like_logging(method.attr)
    path = path_of(method.value)
    names = () if path is None else (path, *script.makers_of(path))
    return any(looks_like_logging(name) or "tqdm" in name for name in names)


def _is_a_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return last_of(path_of(node.func)) in ("item", "size", "len", "time")
    if isinstance(node, ast.BinOp):
        return _is_a_number(node.left) or _is_a_number(node.right)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.Constant)


def _wrapped_loop(script: Script, forward: Forward) -> tuple[Edit, ...]:
    """Wrap the outermost loop around the forward, in its own function, in which nothing trains."""
    here = forward.node.lineno
    for loop in forward.site.loops:
        encloses = loop.lineno <= here <= (loop.end_lineno or loop.lineno)
        if (
            loop in script.trace.framework_loops
            or not encloses
            or not _within(loop, forward.site.function)
            or script.trains_in(loop)
            or loop in script.nodes_trained_through
            or _leaves_a_graph(script, loop)
            or _may_make_a_loss(script, forward, loop)
        ):
            continue
        if _has_torch(script, loop) and not _may_need_gradients_out_of_sight(script, loop):
            return wrap(script.source, loop, "with torch.no_grad():")
    return ()


def _within(loop: Loop, function: Function | None) -> bool:
    if function is None:
        return True
    node = function.node
    return node.lineno <= loop.lineno <= (node.end_lineno or node.lineno)
