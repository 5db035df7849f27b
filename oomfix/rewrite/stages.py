"""Between two stages of a training: the optimizer of the first is freed before that of the second is made (OOM210)."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.effects import last_name
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.liveness import FunctionNode, Liveness, Scope, names_bound, names_read, nodes_of_scope
from oomfix.rewrite.prepare import is_optimizer_class
from oomfix.script import Script
from oomfix.script.edits import Edit
from oomfix.script.names import path_of
from oomfix.script.nodes import children, walk

_MOST_CALLS = 4
# methods of an optimizer, and what is given to them or made of it stays with it
_OWN_METHODS = frozenset({"step", "zero_grad", "state_dict", "load_state_dict"})


class Transition(NamedTuple):
    """An optimizer that nothing reads any more where the next one is made.

    Attributes:
        name: of the old optimizer.
        statement: that makes the new one.
    """

    name: str
    statement: ast.stmt


def stage_edits(script: Script, layout: Layout, blocks: Blocks, free: str) -> list[Edit]:
    """`runtime.free(optimizer)` ahead of the statement that makes the optimizer of the next stage.

    Args:
        free: how the script calls `oomfix.runtime.free`.
    """
    edits = []
    for transition in transitions(script, blocks):
        if layout.own_lines(transition.statement) is not None:
            start = layout.above_comments(transition.statement)
            text = f"{layout.margin(transition.statement)}{free}({transition.name}){layout.newline}"
            edits.append(Edit(start, start, text))
    return edits


def transitions(script: Script, blocks: Blocks) -> Iterator[Transition]:
    """The transitions of a script that are certain.

    Both optimizers are made in one block, under names of their own; in between the first is only handed to functions
    of the file that keep no hold of it; behind the second nothing reads it, or what was made of it.
    """
    made: dict[int, list[ast.Assign]] = {}
    for node in script.imports.nodes.of(ast.Assign):
        if isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            if len(node.targets) == 1 and is_optimizer_class(script, node.value.func):
                made.setdefault(id(blocks.block_of(node)), []).append(node)
    functions = _Functions(script)
    for statements in made.values():
        scope = blocks.scope_of(statements[0])
        if scope is None or len(statements) < 2:
            continue
        liveness = Liveness(scope, script.source.tree)
        for first, second in itertools.pairwise(statements):
            name = names_bound(first).pop()
            if name not in names_bound(second) and _is_done(first, second, name, blocks, liveness, scope, functions):
                yield Transition(name, second)


def _is_done(
    first: ast.Assign,
    second: ast.Assign,
    name: str,
    blocks: Blocks,
    liveness: Liveness,
    scope: Scope,
    functions: _Functions,
) -> bool:
    block = blocks.block_of(first)
    between = block[block.index(first) + 1 : block.index(second)]
    bindings = [node for node in _nodes(scope) if isinstance(node, ast.Name) and node.id == name]
    if sum(isinstance(node.ctx, ast.Store) for node in bindings) != 1 or blocks.loop_of(first) is not None:
        return False
    if not any(name in names_read(statement) for statement in between):
        return False
    held = {name}
    for statement in between:
        users = [node for node in nodes_of_scope(statement) if isinstance(node, ast.Name) and node.id in held]
        for user in users:
            parent = next(blocks.ancestors(user))
            if isinstance(user.ctx, ast.Store):
                return False
            if isinstance(parent, ast.Attribute) and parent.attr in (*_OWN_METHODS, "param_groups"):
                continue
            call = next((node for node in blocks.ancestors(user) if isinstance(node, ast.Call)), None)
            if call is None or not functions.lets_go(call, user):
                made = statement if isinstance(statement, ast.Assign) and statement.value is call else None
                if made is None or not _is_scheduler(call) or not isinstance(made.targets[0], ast.Name):
                    return False
                held |= names_bound(made)
    return not held & (liveness.after(second) | names_read(second))


def _nodes(scope: Scope) -> Iterator[ast.AST]:
    for statement in scope.body:
        yield from nodes_of_scope(statement)


def _is_scheduler(call: ast.Call | None) -> bool:
    return call is not None and ("sched" in last_name(call).lower() or last_name(call).endswith("LR"))


class _Functions:
    """The functions of a file, and whether they keep what they are given."""

    def __init__(self, script: Script) -> None:
        self._functions: dict[str, list[FunctionNode]] = {}
        for node in script.imports.nodes.functions:
            self._functions.setdefault(node.name, []).append(node)

    def lets_go(self, call: ast.Call, given: ast.Name, depth: int = _MOST_CALLS) -> bool:
        """Whether a call of a function of the file, returned, holds on to nothing of an argument."""
        found = self._functions.get(call.func.id, []) if isinstance(call.func, ast.Name) else []
        if len(found) != 1 or not depth or any(isinstance(node, ast.Yield | ast.Lambda) for node in walk(found[0])):
            return False
        function = found[0]
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        index = next((index for index, argument in enumerate(call.args) if argument is given), None)
        keyword = next((keyword.arg for keyword in call.keywords if keyword.value is given), None)
        if index is not None and (
            index >= len(names) or any(isinstance(one, ast.Starred) for one in call.args[:index])
        ):
            return False
        name = keyword if index is None else names[index]
        return name is not None and self._only_uses(function, name, depth)

    def _only_uses(self, function: FunctionNode, name: str, depth: int) -> bool:
        parents = {child: node for node in walk(function) for child in children(node)}
        for node in walk(function):
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            parent = parents[node]
            if isinstance(parent, ast.Attribute) and parent.attr in (*_OWN_METHODS, "param_groups"):
                continue
            own = isinstance(parent, ast.Call) and (path_of(parent.func) or "").split(".")[-1] in (
                "step",
                "unscale_",
                "zero_grad",
            )
            if not own and not (isinstance(parent, ast.Call) and self.lets_go(parent, node, depth - 1)):
                return False
        return True
