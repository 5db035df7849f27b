"""A helper that is given a loss and runs its backward, written out where it is called, so that the loss can be lifted.

`backward(loss, optimizer)` in place of what stands in `def backward(loss, optimizer):`. The helper goes with its calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, names_read
from oomfix.rewrite.facts.amp import without_scaler
from oomfix.rewrite.facts.reading import Reading
from oomfix.rewrite.preparations.written_out import Call, WrittenOut, lines_of, statements_of, without
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import path_of, root_of
from oomfix.script.syntax.nodes import arguments_of, walk
from oomfix.script.syntax.parameters import defaults_of, names_of_parameters

_NOT_WRITTEN_OUT = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.comprehension, ast.NamedExpr, ast.Try),
)

_LOOKING = ("print", "len", "isinstance", "float", "int", "str")

# what they say depends on the function that they stand in
_OF_ITS_SCOPE = ("locals", "vars", "dir", "eval", "exec", "super", "__class__")


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
            edits[helper.name] = [WrittenOut(call, helper, reading).edit() for call in whole]
            edits[helper.name].append(without(helper, reading.layout))
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
        nodes = list(walk(*function.body))
        if not (plain and own and loss in names_of_parameters(parameters)) or not forwards.isdisjoint(nodes):
            continue
        if any(isinstance(node, _NOT_WRITTEN_OUT) or getattr(node, "id", None) in _OF_ITS_SCOPE for node in nodes):
            continue
        if _has_own_lines(function, reading) and _can_go(function, reading):
            yield function


def _has_own_lines(function: ast.FunctionDef, reading: Reading) -> bool:
    """Whether what a function does stands in lines of its own that may be moved."""
    body = statements_of(function)
    if not body or (reading.layout.own_lines(body[0]) is None and body[0].lineno == function.lineno):
        return False
    lines = lines_of(function, reading.layout)
    return reading.layout.inside_strings.isdisjoint(range(lines.first, lines.last + 1))


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
    root = without_scaler(call.func.value) if isinstance(call.func, ast.Attribute) else None
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


def _as_given(named: ast.expr, helper: ast.FunctionDef, reading: Reading) -> Call | None:
    """What a helper is given where it is called; None where it is not called alone, or with something computed."""
    blocks = reading.blocks
    call = next(blocks.ancestors(named))
    statement = next(blocks.ancestors(call), None)
    if not isinstance(call, ast.Call) or call.func is not named or not isinstance(statement, ast.Expr):
        return None
    bound = reading.functions.bound(call, helper)
    if not bound.fits or bound.perhaps or reading.layout.own_lines(statement) is None:
        return None
    given = {parameter.arg: argument for parameter, argument in bound.given}
    if isinstance(named, ast.Attribute):
        of_self = bound.of_object is not None and bound.of_object.arg == path_of(named.value) == "self"
        if not of_self or not _is_of_class(named, helper, reading):
            return None
        given["self"] = named.value
    whole = {parameter.arg: default for parameter, default in defaults_of(helper.args).items()} | given
    # a default is what its name was at the definition
    known = all(isinstance(one, ast.Constant) or (name in given and path_of(one)) for name, one in whole.items())
    known = known and all(one.lineno == one.end_lineno for one in whole.values())
    if not known or any(_asks_a_function(one, reading) for one in given.values()):
        return None
    return Call(statement, whole)


def _asks_a_function(argument: ast.expr, reading: Reading) -> bool:
    """Whether an attribute is a property, which may be something else each time it is asked: `self.rate`."""
    asked = {node.attr for node in walk(argument) if isinstance(node, ast.Attribute)}
    return not asked.isdisjoint(one.name for one in reading.script.imports.nodes.functions)


def _is_of_class(named: ast.expr, method: ast.FunctionDef, reading: Reading) -> bool:
    """Whether the `self` around a call is of the class of a method or of one that the file derives from it."""
    of_method = next(reading.blocks.ancestors(method))
    around = _class_around(named, reading)
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


def _means_the_same(call: Call, helper: ast.FunctionDef, reading: Reading) -> bool:
    """Whether the lines of a helper mean the same where it is called."""
    scope = reading.blocks.scope_of(call.statement)
    if scope is None or scope is helper:
        return False
    bound = names_bound(*helper.body)
    read = names_read(*helper.body) - set(call.given) - bound
    around = [scope, *(one for one in reading.blocks.ancestors(scope) if isinstance(one, FunctionNode))]
    outside = [one for one in around if one is scope or one not in list(reading.blocks.ancestors(helper))]
    own = {
        name
        for one in outside
        if isinstance(one, FunctionNode)
        for name in names_of_parameters(one.args) | names_bound(*one.body)
    }
    if own & read:
        return False
    there = own | names_bound(*scope.body) | names_read(*scope.body)
    there = there.union(*(one.names for one in reading.script.imports.nodes.of(ast.Global)))
    nodes = WrittenOut(call, helper, reading).nodes
    if any(map(_is_private, nodes)) and _class_around(call.statement, reading) is not _class_around(helper, reading):
        return False
    return (
        bound.isdisjoint(there | set(call.given))
        and bool(nodes)
        and not any(_is_other_text(node, call, reading) for node in nodes)
        and not any(_may_change(node, call, reading) for node in nodes)
    )


def _class_around(node: ast.AST, reading: Reading) -> ast.ClassDef | None:
    return next((one for one in reading.blocks.ancestors(node) if isinstance(one, ast.ClassDef)), None)


def _is_private(node: ast.AST) -> bool:
    """Whether a class gives a name another one, for itself: `self.__scaler`."""
    name = getattr(node, "attr", None) or getattr(node, "id", "")
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _is_other_text(node: ast.AST, call: Call, reading: Reading) -> bool:
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


def _may_change(node: ast.AST, call: Call, reading: Reading) -> bool:
    """Whether a node may change what the helper was given before it ran: `state.n += 1`, `tick()`, `count(state)`."""
    taken = {path for one in call.given.values() if (path := path_of(one)) is not None}
    ends = {_end(path) for path in taken if _end(path) != path}
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return bool(_ends(node) & ends)
    if not isinstance(node, ast.Call):
        return False
    path = _meant(node.func, call) or ""
    receiver, _, name = path.rpartition(".")
    given = {_meant(one, call) or "" for one in arguments_of(node)}
    given |= {receiver} if receiver != "self" else set()
    if name not in _LOOKING and any(
        one.startswith((f"{owner}.", f"{owner}[")) for one in taken for owner in given if owner
    ):
        return True
    for inside in walk(*reading.calls_run.functions([node])):
        if isinstance(inside, ast.Global | ast.Nonlocal) and taken & set(inside.names):
            return True
        if isinstance(inside, ast.Attribute | ast.Subscript) and not isinstance(inside.ctx, ast.Load):
            if _ends(inside) & ends:
                return True
    return False


def _meant(node: ast.expr, call: Call) -> str | None:
    """The path of an expression of a helper, where it is called."""
    path = path_of(node)
    root = "" if path is None else root_of(path)
    return f"{path_of(call.given[root]) or ''}{(path or '')[len(root) :]}" if root in call.given else path


def _ends(node: ast.Attribute | ast.Subscript) -> set[str]:
    path = path_of(node)
    return set() if path is None else {_end(path)}


def _end(path: str) -> str:
    """`n` of `state.n`, `'n']` of `state['n']`: what a change of it through another name ends with too."""
    return re.split(r"[.\[]", path)[-1]
