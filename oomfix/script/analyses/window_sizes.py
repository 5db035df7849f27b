"""What else an iteration asks the size of its accumulation window for: perhaps to divide the loss, out of sight."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator

from oomfix.script.analyses.training_loop import TrainingLoop
from oomfix.script.analyses.windows import is_window_name
from oomfix.script.facts.trace import Backward
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import Scope, children, walk
from oomfix.script.syntax.patterns import Pattern

_TOLD = Pattern(
    r"^(print|info|debug|warning|log|log_\w+|add_scalars?|set_postfix\w*|set_description\w*|write|format|range|trange)$"
)
"""Calls that are told the size, or count up to it."""
_RATE = Pattern(r"(^|_)(lr|learning_rate)(_|$)", re.IGNORECASE)


def reads_its_size(loop: TrainingLoop, nodes: Iterable[tuple[ast.AST, Scope]], backward: Backward | None) -> bool:
    """Whether an iteration, or a function of the file that it names, may divide by the size of the window.

    Asking whether the window is full, counting up to its size and logging it are no such reads, nor is averaging what
    was counted once it is full. `nodes` are all nodes of the file, each with the function it is in. With a backward,
    whether an iteration that comes to it does.
    """
    if loop.window is None or (loop.window.decision is None and loop.steps):
        return False  # a batch is cut into pieces with the help of their number
    nodes, decision = list(nodes), loop.window.decision
    names = _names_in(ast.parse(loop.window.size, mode="eval").body)
    while more := {name for node, _ in nodes for name in _aliases(node, names)} - names:
        names |= more
    if names and any(_divides_elsewhere(node, names) for node, _ in nodes):
        return True
    named = {_last(node) for node in walk(loop.node)} | {"forward", "__call__"}
    functions = {function for _, function in nodes if function is not None and function.name in named}
    elsewhere = [statement for function in functions if not _is_around(function, loop) for statement in function.body]
    ahead = [part for part in children(loop.node) if part is not decision]
    passed_over = set() if backward is None else {id(part) for part in _other_sides(backward, loop, names)}
    if decision is not None:
        passed_over.add(id(decision))
    return any(_reads(part, names, passed_over) for part in (*ahead, *elsewhere)) or any(
        _divides_gradients(statement, names) for statement in (decision.body if decision is not None else ())
    )


def _other_sides(backward: Backward, loop: TrainingLoop, names: set[str]) -> Iterator[ast.stmt]:
    """What an iteration that comes to a backward does not run: the other branches of flags.

    A flag may say whether anything is accumulated at all: by the size, by its name, or where the window asks for it.
    """
    asked = _names_in(loop.window.test) if loop.window is not None else set()
    for guard in backward.site.guards_within(loop.node):
        told = _names_in(guard.test)
        if isinstance(guard.statement, ast.If) and not told & (asked | names) and not any(map(is_window_name, told)):
            yield from guard.statement.orelse if guard.value else guard.statement.body


def _names_in(node: ast.AST) -> set[str]:
    """The last names in an expression: `steps` of `args.steps`, and of `config.get("steps", 1)`."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Name | ast.Attribute):
        return {_last(node)}
    below = [*node.args] if isinstance(node, ast.Call) else children(node)
    if isinstance(node, ast.Subscript):
        below = [node.slice]
    return {name for child in below for name in _names_in(child)}


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_named(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in names
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and _last(node) in names


def _aliases(node: ast.AST, names: set[str]) -> Iterator[str]:
    """The names given to the size: `k` of `k = args.steps`."""
    if isinstance(node, ast.Assign) and _is_named(node.value, names) and not isinstance(node.value, ast.Constant):
        yield from (name for target in node.targets if (name := _last(target)))


def _divides_elsewhere(node: ast.AST, names: set[str]) -> bool:
    """`scaled = partial(scale, by=1.0 / steps)`, `p.register_hook(lambda grad: grad / steps)`, `lr=0.1 / steps`."""
    match node:
        case ast.BinOp(ast.Constant(int() | float() as share), ast.Div(), divisor) if share <= 1:
            return _is_named(divisor, names)  # `1000 / steps` is a number of steps
        case ast.Call(args=given) if "hook" in last_name(node):
            return any(_reads(one, names) for one in given)
        case ast.BinOp(rate, ast.Div(), divisor):
            return _is_named(divisor, names) and any(_RATE.search(str(_written(part))) for part in walk(rate))
        case ast.AugAssign(target, ast.Div(), divisor):
            return _is_named(divisor, names) and any(_RATE.search(str(_written(part))) for part in walk(target))
    return False


def _written(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else _last(node)


def _reads(node: ast.AST, names: set[str], passed_over: Collection[int] = ()) -> bool:
    if id(node) in passed_over or isinstance(node, ast.Compare | ast.JoinedStr):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
        return False
    if isinstance(node, ast.Call) and _TOLD.match(last_name(node)):
        return False
    if isinstance(node, ast.AugAssign) and _adds_number(node):
        return False
    return _is_named(node, names) or any(_reads(child, names, passed_over) for child in children(node))


def _adds_number(statement: ast.AugAssign) -> bool:
    """`running += loss.item() / steps`: no gradient passes through what is added."""
    value, is_sum = statement.value, isinstance(statement.op, ast.Add | ast.Sub)
    parts = [value.left, value.right] if isinstance(value, ast.BinOp) else []
    return is_sum and any(isinstance(part, ast.Call) and last_name(part) == "item" for part in parts)


def _divides_gradients(statement: ast.stmt, names: set[str]) -> bool:
    """`p.grad = p.grad / steps` ahead of a step, `average(model, steps)`: what a full window may do with its size."""
    of_gradients = any(_last(node) == "grad" for node in walk(statement))
    calls = [node for node in walk(statement) if isinstance(node, ast.Call) and not _TOLD.match(last_name(node))]
    given = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return any(_is_named(one, names) for one in given) or (
        of_gradients and any(_is_named(node, names) for node in walk(statement))
    )


def _is_around(function: ast.AST, loop: TrainingLoop) -> bool:
    return any(node is loop.node for node in walk(function))
