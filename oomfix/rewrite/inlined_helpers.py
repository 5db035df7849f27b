"""A helper that is given a loss and runs its backward, written out where it is called, so that the loss can be lifted.

`backward(loss, optimizer)` in place of what stands in `def backward(loss, optimizer):`. The helper goes with its calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from oomfix.rewrite.edits import apply_edits
from oomfix.rewrite.effects import is_remark
from oomfix.rewrite.layout import Lines
from oomfix.rewrite.liveness import (
    FunctionNode,
    names_bound,
    names_of_parameters,
    names_read,
    nodes_of_scope_body,
)
from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit, bounds
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

_NOT_WRITTEN_OUT = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.NamedExpr, ast.Try),
)


class _Call(NamedTuple):
    """A call of a helper that is a statement of its own.

    Attributes:
        statement: the call.
        given: the argument of each parameter: a name, a path or a constant.
    """

    statement: ast.Expr
    given: Mapping[str, ast.expr]


def inlined_helper_edits(reading: Reading) -> dict[str, list[Edit]]:
    """The edits that write helpers out where they are called, by name, of all that run the backward of a given loss.

    Only helpers that nobody else can call: functions of a script, and those whose names begin with an underscore. What
    they bind must not mean anything where they are called, and what they are given must be names, paths or constants.
    """
    edits: dict[str, list[Edit]] = {}
    for helper in _helpers(reading):
        calls = [_as_given(call, helper, reading) for call in _calls(helper, reading)]
        whole = [call for call in calls if call is not None and _means_the_same(call, helper, reading)]
        if calls and len(whole) == len(calls):
            edits[helper.name] = [*(_written_out(call, helper, reading) for call in whole), _without(helper, reading)]
    return edits


def _helpers(reading: Reading) -> Iterator[ast.FunctionDef]:
    """The functions that run the backward of a parameter, perhaps in one of two branches, and no network."""
    script = reading.script
    forwards = {forward.node for forward in script.trace.forwards.values()}
    for function in script.imports.nodes.of(ast.FunctionDef):
        backwards = script.distinct(script.backwards)
        inside = [event for event in backwards if reading.blocks.scope_of(event.node) is function]
        losses = {_differentiated(event.node) for event in inside}
        if len(losses) != 1 or any(event.framework for event in inside) or function.decorator_list:
            continue
        loss = losses.pop()
        parameters = function.args
        plain = not (parameters.posonlyargs or parameters.kwonlyargs or parameters.vararg or parameters.kwarg)
        own = function.name.startswith("_") or (_is_script(reading) and function in reading.source.tree.body)
        nodes = [node for statement in function.body for node in walk(statement)]
        if not (plain and own and loss in names_of_parameters(parameters)) or not forwards.isdisjoint(nodes):
            continue
        if not any(isinstance(node, _NOT_WRITTEN_OUT) for node in nodes):
            yield function


def _differentiated(call: ast.Call) -> str | None:
    """`loss` of `loss.backward()` and `scaler.scale(loss).backward()`."""
    root = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute) and root.func.attr == "scale" and root.args:
        root = root.args[0]
    return root.id if isinstance(root, ast.Name) else None


def _is_script(reading: Reading) -> bool:
    """Whether a file trains when it is run, so that no other one imports from it."""
    guarded = (node for node in reading.source.tree.body if isinstance(node, ast.If))
    return any("__name__" in names_read(node.test) for node in guarded) or any(
        reading.blocks.scope_of(loop.node) is reading.source.tree for loop in reading.loops
    )


def _calls(helper: ast.FunctionDef, reading: Reading) -> list[ast.expr]:
    """Every place that names a helper: a function by its name, a method as an attribute."""
    nodes = reading.script.imports.nodes
    if isinstance(next(reading.blocks.ancestors(helper)), ast.ClassDef):
        return [node for node in nodes.of(ast.Attribute) if node.attr == helper.name]
    return [node for node in nodes.of(ast.Name) if node.id == helper.name]


def _as_given(named: ast.expr, helper: ast.FunctionDef, reading: Reading) -> _Call | None:
    """What a helper is given where it is called; None where it is not called alone, or with something computed."""
    blocks = reading.blocks
    call = next(blocks.ancestors(named))
    statement = next(blocks.ancestors(call), None)
    if not isinstance(call, ast.Call) or call.func is not named or not isinstance(statement, ast.Expr):
        return None
    parameters = [parameter.arg for parameter in helper.args.args]
    given: dict[str, ast.expr] = {}
    if isinstance(named, ast.Attribute):
        if path_of(named.value) != "self" or not parameters or parameters[0] != "self":
            return None
        given["self"] = named.value
    places = [name for name in parameters if name not in given]
    if len(call.args) > len(places):
        return None
    given.update(zip(places, call.args, strict=False))
    given.update({keyword.arg or "**": keyword.value for keyword in call.keywords})
    defaults = dict(zip(reversed(parameters), reversed(helper.args.defaults), strict=False))
    whole = {name: given[name] if name in given else defaults.get(name) for name in parameters}
    known = all(isinstance(one, ast.Constant) or (one is not None and path_of(one)) for one in whole.values())
    if not known or set(given) - set(parameters) or reading.layout.own_lines(statement) is None:
        return None
    return _Call(statement, {name: one for name, one in whole.items() if one is not None})


def _means_the_same(call: _Call, helper: ast.FunctionDef, reading: Reading) -> bool:
    """Whether the lines of a helper mean the same where it is called."""
    scope = reading.blocks.scope_of(call.statement)
    if scope is None or scope is helper:
        return False
    bound = {name for statement in helper.body for name in names_bound(statement)}
    read = {name for statement in helper.body for name in names_read(statement)} - set(call.given) - bound
    there = {node.id for node in nodes_of_scope_body(scope) if isinstance(node, ast.Name)}
    own = {name for statement in scope.body for name in names_bound(statement)}
    if isinstance(scope, FunctionNode):
        there, own = there | names_of_parameters(scope.args), own | names_of_parameters(scope.args)
        if own & read:
            return False
    stored = {
        path_of(node)
        for statement in helper.body
        for node in walk(statement)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    taken = {path_of(one) for one in call.given.values()} - {None}
    return bound.isdisjoint(there | set(call.given)) and stored.isdisjoint(taken)


def _written_out(call: _Call, helper: ast.FunctionDef, reading: Reading) -> Edit:
    """The edit that puts the lines of a helper in the place of its call, with what it is given for its parameters."""
    source, layout = reading.source, reading.layout
    body = helper.body[1:] if is_remark(helper.body[0]) else helper.body
    first = layout.above_comments(body[0])
    margin, inner = layout.margin(call.statement), layout.margin(body[0])
    start, end = first, layout.span(Lines(body[-1].lineno, layout.last_line(body[-1])))[1]
    replaced = [
        Edit(span[0] - start, span[1] - start, source.segment(call.given[node.id]))
        for statement in body
        for node in walk(statement)
        if isinstance(node, ast.Name) and node.id in call.given
        for span in [bounds(source, node)]
    ]
    never = [
        Edit(span[0] - start, span[1] - start, "")
        for statement in body
        if _never_runs(statement, call)
        for span in [layout.whole(Lines(statement.lineno, layout.last_line(statement)))]
    ]
    kept = [one for one in replaced if not any(gone.start <= one.start < gone.end for gone in never)]
    text = apply_edits(source.text[start:end] + layout.newline, [*kept, *never]).removesuffix(layout.newline)
    lines = [margin + line.removeprefix(inner) if line.strip() else line for line in text.split(layout.newline)]
    own = layout.own_lines(call.statement)
    assert own is not None
    return Edit(*layout.span(own), layout.newline.join(lines))


def _never_runs(statement: ast.stmt, call: _Call) -> bool:
    """`if clip:` where the helper is given no `clip`."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.test, ast.Name):
        return False
    given = call.given.get(statement.test.id)
    return isinstance(given, ast.Constant) and not given.value


def _without(helper: ast.FunctionDef, reading: Reading) -> Edit:
    """The edit that takes a helper out, with the blank lines behind it."""
    source, layout = reading.source, reading.layout
    last = layout.last_line(helper.body[-1])
    while last < len(source.lines) and not source.lines[last].strip():
        last += 1
    return Edit(layout.above_comments(helper), layout.whole(Lines(helper.lineno, last))[1], "")
