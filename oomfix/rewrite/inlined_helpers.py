"""A helper that is given a loss and runs its backward, written out where it is called, so that the loss can be lifted.

`backward(loss, optimizer)` in place of what stands in `def backward(loss, optimizer):`. The helper goes with its calls.
"""

from __future__ import annotations

import ast
import re
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
)
from oomfix.rewrite.reading import Reading
from oomfix.script.edits import Edit, bounds
from oomfix.script.names import path_of
from oomfix.script.nodes import walk

_NOT_WRITTEN_OUT = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.NamedExpr, ast.Try),
)

# what they say depends on the function that they stand in
_OF_ITS_SCOPE = ("locals", "vars", "dir", "eval", "exec", "super", "__class__")


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
    helpers = list(_helpers(reading))
    for helper in helpers:
        calls = [_as_given(call, helper, reading) for call in _calls(helper, reading)]
        whole = [call for call in calls if call is not None and _means_the_same(call, helper, reading)]
        nested = any(reading.blocks.scope_of(call.statement) in helpers for call in whole)
        if calls and len(whole) == len(calls) and not nested:
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
        if any(isinstance(node, _NOT_WRITTEN_OUT) or getattr(node, "id", None) in _OF_ITS_SCOPE for node in nodes):
            continue
        body = function.body[1:] if is_remark(function.body[0]) else function.body
        lines = range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)
        if reading.layout.inside_strings.isdisjoint(lines) and _can_go(function, reading):
            yield function


def _can_go(function: ast.FunctionDef, reading: Reading) -> bool:
    """Whether nothing else has or may use the name of a function, and its block has other statements."""
    nodes, name = reading.script.imports.nodes, function.name
    block = next(reading.blocks.ancestors(function))
    if not isinstance(block, ast.Module | ast.ClassDef | FunctionNode) or len(block.body) < 2:
        return False
    others = [one.name for one in nodes.of(ast.FunctionDef)]
    others += [one.name for one in nodes.of(ast.AsyncFunctionDef)]
    others += [one.name for one in nodes.of(ast.ClassDef)]
    others += [one.arg for one in nodes.of(ast.arg)]
    others += [one.asname or one.name for one in nodes.of(ast.alias)]
    texts = [one.value for one in nodes.of(ast.Constant) if isinstance(one.value, str)]
    # `getattr(self, "_update")`, `exec("update(loss)")`
    others += [name for text in texts if text == name or f"{name}(" in text]
    if isinstance(block, ast.ClassDef):
        others += [one.id for one in nodes.of(ast.Name)]
        # `_Trainer__update`
        others += [name for one in nodes.of(ast.Attribute) if one.attr == f"_{block.name.lstrip('_')}{name}"]
    return others.count(name) == 1


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
        if not _is_of_class(named, helper, reading):
            return None
        given["self"] = named.value
    places = [name for name in parameters if name not in given]
    if len(call.args) > len(places):
        return None
    given.update(zip(places, call.args, strict=False))
    given.update({keyword.arg or "**": keyword.value for keyword in call.keywords})
    defaults = dict(zip(reversed(parameters), reversed(helper.args.defaults), strict=False))
    whole = {name: given[name] if name in given else defaults.get(name) for name in parameters}
    known = all(
        # a default is what its name was at the definition
        isinstance(one, ast.Constant) or (one is not None and name in given and path_of(one))
        for name, one in whole.items()
    )
    known = known and all(one is not None and one.lineno == one.end_lineno for one in whole.values())
    if not known or set(given) - set(parameters) or reading.layout.own_lines(statement) is None:
        return None
    return _Call(statement, {name: one for name, one in whole.items() if one is not None})


def _is_of_class(named: ast.expr, method: ast.FunctionDef, reading: Reading) -> bool:
    """Whether the `self` around a call is of the class of a method or of one that the file derives from it."""
    of_method = next(reading.blocks.ancestors(method))
    around = next((node for node in reading.blocks.ancestors(named) if isinstance(node, ast.ClassDef)), None)
    classes = {one.name: one for one in reading.script.imports.nodes.of(ast.ClassDef)}
    waiting, seen = [around], set[str]()
    while waiting:
        current = waiting.pop()
        if current is of_method:
            return True
        if current is not None and current.name not in seen:
            seen.add(current.name)
            waiting.extend(classes.get(path_of(base) or "") for base in current.bases)
    return False


def _means_the_same(call: _Call, helper: ast.FunctionDef, reading: Reading) -> bool:
    """Whether the lines of a helper mean the same where it is called."""
    scope = reading.blocks.scope_of(call.statement)
    if scope is None or scope is helper:
        return False
    bound = {name for statement in helper.body for name in names_bound(statement)}
    read = {name for statement in helper.body for name in names_read(statement)} - set(call.given) - bound
    around = [scope, *(one for one in reading.blocks.ancestors(scope) if isinstance(one, FunctionNode))]
    outside = [one for one in around if one is scope or one not in list(reading.blocks.ancestors(helper))]
    own = {
        name
        for one in outside
        if isinstance(one, FunctionNode)
        for name in names_of_parameters(one.args).union(*map(names_bound, one.body))
    }
    if own & read:
        return False
    there = own.union(*map(names_bound, scope.body), *map(names_read, scope.body))
    there = there.union(*(one.names for one in reading.script.imports.nodes.of(ast.Global)))
    body = [statement for statement in helper.body if not _never_runs(statement, call)]
    nodes = [node for statement in body for node in walk(statement)]
    return (
        bound.isdisjoint(there | set(call.given))
        and bool(body)
        and not any(_is_other_text(node, call, reading) for node in nodes)
        and not any(_may_change(node, call, reading) for node in nodes)
    )


def _is_other_text(node: ast.AST, call: _Call, reading: Reading) -> bool:
    """Whether a parameter cannot be replaced in a node: `f"{loss=}"`, `3.real`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        given = call.given.get(node.value.id)
        return isinstance(given, ast.Constant) and isinstance(given.value, int | float | complex)
    if not isinstance(node, ast.JoinedStr):
        return False
    names = [one for one in walk(node) if isinstance(one, ast.Name) and one.id in call.given]
    texts = [reading.source.segment(call.given[one.id]) for one in names]
    shown = re.search(r"=\s*(![rsa])?(:[^{}]*)?\}", reading.source.segment(node))
    return bool(names) and (
        shown is not None
        or any(set(text) & set("'\"\\{}") for text in texts)
        or any(reading.source.segment(one) != one.id for one in names)
    )


def _may_change(node: ast.AST, call: _Call, reading: Reading) -> bool:
    """Whether a node may change what the helper was given before it ran: `state.n += 1`, `tick()`."""
    taken = {path for one in call.given.values() if (path := path_of(one)) is not None}
    ends = {_end(path) for path in taken if _end(path) != path}
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return bool(_ends(node) & ends)
    if not isinstance(node, ast.Call):
        return False
    path = path_of(node.func) or ""
    root, *rest = path.split(".")
    receiver = ".".join([path_of(call.given[root]) or "" if root in call.given else root, *rest[:-1]])
    if rest and receiver != "self" and any(one.startswith((f"{receiver}.", f"{receiver}[")) for one in taken):
        return True
    nodes = reading.script.imports.nodes
    functions: list[FunctionNode] = [*nodes.of(ast.FunctionDef), *nodes.of(ast.AsyncFunctionDef)]
    called = [one for one in functions if one.name == path.split(".")[-1]]
    for inside in (inside for one in called for inside in walk(one)):
        if isinstance(inside, ast.Global | ast.Nonlocal) and taken & set(inside.names):
            return True
        if isinstance(inside, ast.Attribute | ast.Subscript) and not isinstance(inside.ctx, ast.Load):
            if _ends(inside) & ends:
                return True
    return False


def _ends(node: ast.Attribute | ast.Subscript) -> set[str]:
    path = path_of(node)
    return set() if path is None else {_end(path)}


def _end(path: str) -> str:
    """`n` of `state.n`, `'n']` of `state['n']`: what a change of it through another name ends with too."""
    return re.split(r"[.\[]", path)[-1]


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
    known = [
        Edit(span[0] - start, span[1] - start, str(isinstance(node.ops[0], ast.IsNot)))
        for statement in body
        for node in walk(statement)
        if isinstance(node, ast.Compare) and _is_none_of(node, call) is False
        for span in [bounds(source, node)]
    ]
    replaced = [one for one in replaced if not any(gone.start <= one.start < gone.end for gone in known)] + known
    kept = [one for one in replaced if not any(gone.start <= one.start < gone.end for gone in never)]
    text = apply_edits(source.text[start:end] + layout.newline, [*kept, *never]).removesuffix(layout.newline)
    lines = [margin + line.removeprefix(inner) if line.strip() else line for line in text.split(layout.newline)]
    own = layout.own_lines(call.statement)
    assert own is not None
    return Edit(*layout.span(own), layout.newline.join(lines))


def _never_runs(statement: ast.stmt, call: _Call) -> bool:
    """`if clip:` or `if clip is not None:` where the helper is given no `clip`."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    if isinstance(statement.test, ast.Compare):
        return isinstance(statement.test.ops[0], ast.IsNot) and _is_none_of(statement.test, call) is True
    given = call.given.get(statement.test.id) if isinstance(statement.test, ast.Name) else None
    return isinstance(given, ast.Constant) and not given.value


def _is_none_of(test: ast.Compare, call: _Call) -> bool | None:
    """Whether the parameter of `clip is None` or `clip is not None` is None; None where only the run knows."""
    given = call.given.get(test.left.id) if isinstance(test.left, ast.Name) else None
    against = test.comparators[0]
    whole = len(test.ops) == 1 and isinstance(test.ops[0], ast.Is | ast.IsNot)
    if not (whole and isinstance(given, ast.Constant) and isinstance(against, ast.Constant) and against.value is None):
        return None
    return given.value is None


def _without(helper: ast.FunctionDef, reading: Reading) -> Edit:
    """The edit that takes a helper out, with the blank lines behind it."""
    source, layout = reading.source, reading.layout
    last = layout.last_line(helper.body[-1])
    while last < len(source.lines) and not source.lines[last].strip():
        last += 1
    return Edit(layout.above_comments(helper), layout.whole(Lines(helper.lineno, last))[1], "")
