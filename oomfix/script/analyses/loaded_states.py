"""Which loaded checkpoints only go into `load_state_dict`, which copies them to where the parameters are."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from oomfix.script.syntax.names import path_of, with_holders
from oomfix.script.syntax.nodes import Nodes, walk


class LoadedStates:
    """Tells what becomes of the values of a file.

    Args:
        nodes: all nodes of the file.
        by_function: for each node, those of the function around it.
        tree: the module.
    """

    def __init__(self, nodes: Nodes, by_function: Mapping[ast.AST, Sequence[ast.AST]], tree: ast.Module) -> None:
        self._nodes, self._by_function, self._tree = nodes, by_function, tree
        loads = [call for call in nodes.of(ast.Call) if _loads_state(call)]
        arguments = (node for load in loads for node in walk(*load.args))
        paths = (path_of(node) for node in arguments if isinstance(node, ast.Name | ast.Attribute))
        self._inside = set(walk(*loads))
        self._paths = {path for path in paths if path is not None}
        # the name or attribute that each value, or an entry of it, is assigned to, where it is assigned to one
        self._targets = {
            value: path_of(node.targets[0])
            for node in nodes.of(ast.Assign)
            if len(node.targets) == 1
            for value in with_holders(node.value)
        }

    def take(self, value: ast.expr) -> bool:
        """Whether a value goes into `load_state_dict`; a local name that nothing reads will do, too."""
        target = self._targets.get(value)
        if value in self._inside or target in self._paths:
            return True
        return target is not None and self._is_unread_local(target, value)

    def _is_unread_local(self, name: str, value: ast.expr) -> bool:
        """Whether a value is bound to a name of a function that nothing of the file reads."""
        around = self._by_function[value]
        if not name.isidentifier() or around is self._by_function[self._tree]:
            return False
        read = (node.id for node in self._nodes.of(ast.Name) if isinstance(node.ctx, ast.Load))
        shared = (node.names for node in around if isinstance(node, ast.Global | ast.Nonlocal))
        return name not in read and not any(name in names for names in shared)


def _loads_state(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict"
