"""What forward hooks of a file change around them: they run whenever their network does, for each part of a batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.changes import changed_paths
from oomfix.rewrite.dataflow.liveness import FunctionNode, names_bound, nodes_of_scope_body
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import Nodes, walk
from oomfix.script.syntax.parameters import names_of_parameters

_REGISTERING = frozenset({"register_forward_hook", "register_forward_pre_hook", "register_module_forward_hook"})

Hook = FunctionNode | ast.Lambda


class ForwardHooks:
    """The names around the forward hooks of a file that these change: `features["conv"] = output`.

    What they change in attributes of objects, the runtime sees.

    Args:
        nodes: all nodes of the file.
    """

    def __init__(self, nodes: Nodes) -> None:
        calls = [call for call in nodes.of(ast.Call) if last_name(call) in _REGISTERING and call.args]
        functions = nodes.functions if calls else []
        self._registered = [(call, hook) for call in calls for hook in _hooks_given(call.args[0], functions)]

    def check(self, lift: Lift) -> None:
        """Whether what hooks change is only read by the slice that runs their network.

        Raises:
            CannotLift: something else uses it, and would find that of a part of the batch, or of more than one run.
        """
        for call, hook in self._registered:
            if _follows(call, lift):
                continue
            for name in sorted(_changed_by(hook)):
                line = _used_outside(name, lift)
                if line is not None:
                    told = "a hook" if isinstance(hook, ast.Lambda) else f"the hook `{hook.name}`"
                    raise CannotLift(f"{told} changes {name} whenever the network runs, and line {line} uses it")


def _hooks_given(given: ast.expr, functions: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> Iterator[Hook]:
    """The functions that an argument means: `hook`, `self.hook`, `partial(hook, name)`, or what `hook(name)` makes."""
    match given:
        case ast.Lambda():
            yield given
        case ast.Name(name) | ast.Attribute(attr=name):
            yield from (function for function in functions if function.name == name)
        case ast.Call():
            makers = [function for function in functions if function.name == last_name(given)]
            yield from (one for maker in makers for one in walk(maker) if isinstance(one, Hook) and one is not maker)
            for argument in given.args:
                if isinstance(argument, ast.Name | ast.Attribute | ast.Lambda):
                    yield from _hooks_given(argument, functions)


def _changed_by(hook: Hook) -> set[str]:
    body = [ast.Expr(hook.body)] if isinstance(hook, ast.Lambda) else hook.body
    declared = {name for node in walk(*body) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    changed = {path.split(".")[0] for statement in body for path in changed_paths(statement)}
    # what is in attributes of an object, the runtime finds there
    own = {"self", "cls"} | names_of_parameters(hook.args)
    own |= names_bound(*body)
    return (changed - own) | declared


def _follows(registering: ast.Call, lift: Lift) -> bool:
    """Whether a hook is registered in the same scope, behind the last loop around the slice."""
    end = max((loop.end_lineno or 0 for loop in lift.site.loops), default=0)
    nodes = nodes_of_scope_body(lift.site.scope)
    return 0 < end < registering.lineno and any(node is registering for node in nodes)


def _used_outside(name: str, lift: Lift) -> int | None:
    """The first line of the iteration, but for the slice, that holds a name, or else of the scope that reads it."""
    inside = {id(node) for node in walk(*lift.lifted)}
    iteration = lift.site.iteration
    again = {id(node) for node in walk(iteration)} if iteration is not None else set()
    lines = [
        node.lineno
        for node in nodes_of_scope_body(lift.site.scope)
        if isinstance(node, ast.Name) and node.id == name and id(node) not in inside
        if id(node) in again or isinstance(node.ctx, ast.Load)
    ]
    return min(lines, default=None)
