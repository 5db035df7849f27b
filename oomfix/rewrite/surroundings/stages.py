"""Between two stages of a training: the optimizer of the first is freed before that of the second is made (OOM210)."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

from oomfix.rewrite.dataflow.functions_called import FunctionsCalled
from oomfix.rewrite.dataflow.liveness import (
    FunctionNode,
    Liveness,
    Scope,
    names_bound,
    names_read,
    nodes_of_scope,
    nodes_of_scope_body,
)
from oomfix.rewrite.facts.reading import Reading
from oomfix.script.syntax.edits import Edit
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import children, walk

_MOST_CALLS = 4
# methods of an optimizer, and what is given to them or made of it stays with it
_OWN_METHODS = frozenset({"step", "zero_grad", "state_dict", "load_state_dict"})


def stage_edits(reading: Reading, free: str) -> list[Edit]:
    """`runtime.free(optimizer)` ahead of the statement that makes the optimizer of the next stage.

    Args:
        reading: the script.
        free: how the script calls `oomfix.runtime.free`.
    """
    layout = reading.layout
    edits = []
    for old, new in _Stages(reading).transitions():
        if layout.own_lines(new) is not None:
            edits.append(layout.inserted(layout.above_comments(new), [f"{layout.margin(new)}{free}({old})"]))
    return edits


class _Stages:
    """Finds the optimizers of a script that nothing reads any more where the next one is made."""

    def __init__(self, reading: Reading) -> None:
        self._script, self._blocks = reading.script, reading.blocks
        self._functions = _Functions(reading.functions)

    def transitions(self) -> Iterator[tuple[str, ast.stmt]]:
        """The names of old optimizers that are certain to be done, with the statements that make the new ones.

        Both optimizers are made in one block, under names of their own; in between the first is only handed to
        functions of the file that keep no hold of it; behind the second nothing reads it, or what was made of it.
        """
        for statements in self._made_by_block():
            scope = self._blocks.scope_of(statements[0])
            if scope is None or len(statements) < 2:
                continue
            liveness = Liveness(scope, self._script.source.tree)
            for first, second in itertools.pairwise(statements):
                name = names_bound(first).pop()
                if name in names_bound(second) or not self._is_made_once(name, first, scope):
                    continue
                held = self._held_between(first, second)
                if held is not None and not held & (liveness.after(second) | names_read(second)):
                    yield name, second

    def _made_by_block(self) -> Iterable[list[ast.Assign]]:
        """The statements that make optimizers with names of their own, those of one block together."""
        made: dict[int, list[ast.Assign]] = {}
        for node in self._script.imports.nodes.of(ast.Assign):
            if isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
                if len(node.targets) == 1 and self._script.is_optimizer_class(node.value.func):
                    made.setdefault(id(self._blocks.block_of(node)), []).append(node)
        return made.values()

    def _is_made_once(self, name: str, made: ast.Assign, scope: Scope) -> bool:
        names = (node for node in nodes_of_scope_body(scope) if isinstance(node, ast.Name) and node.id == name)
        return sum(isinstance(node.ctx, ast.Store) for node in names) == 1 and self._blocks.loop_of(made) is None

    def _held_between(self, first: ast.Assign, second: ast.Assign) -> set[str] | None:
        """The names that hold an optimizer where the next one is made; None where others may, or it is not used."""
        block = self._blocks.block_of(first)
        between = block[block.index(first) + 1 : block.index(second)]
        held = names_bound(first)
        if not held & names_read(*between):
            return None
        for statement in between:
            users = [node for node in nodes_of_scope(statement) if isinstance(node, ast.Name) and node.id in held]
            for user in users:
                parent = next(self._blocks.ancestors(user))
                if isinstance(user.ctx, ast.Store):
                    return None
                if isinstance(parent, ast.Attribute) and parent.attr in (*_OWN_METHODS, "param_groups"):
                    continue
                call = next((node for node in self._blocks.ancestors(user) if isinstance(node, ast.Call)), None)
                if call is None or not self._functions.lets_go(call, user):
                    made = statement if isinstance(statement, ast.Assign) and statement.value is call else None
                    if made is None or not _is_scheduler(call) or not isinstance(made.targets[0], ast.Name):
                        return None
                    held |= names_bound(made)
        return held


def _is_scheduler(call: ast.Call | None) -> bool:
    return call is not None and ("sched" in last_name(call).lower() or last_name(call).endswith("LR"))


class _Functions:
    """The functions of a file, and whether they keep what they are given."""

    def __init__(self, functions: FunctionsCalled) -> None:
        self._functions = functions

    def lets_go(self, call: ast.Call, given: ast.Name, depth: int = _MOST_CALLS) -> bool:
        """Whether a call of a function of the file, returned, holds on to nothing of an argument."""
        function = self._functions.certain(call)
        if function is None or not depth or any(isinstance(node, ast.Yield | ast.Lambda) for node in walk(function)):
            return False
        bound = self._functions.bound(call, function)
        taker = next((parameter for parameter, argument in bound.given if argument is given), None)
        if taker is None or taker in (function.args.vararg, function.args.kwarg):
            return False
        return self._only_uses(function, taker.arg, depth)

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
