"""What each name and attribute of a file refers to, by its imports: for rules about APIs, not about flow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from oomfix.script.syntax.names import imported
from oomfix.script.syntax.nodes import Nodes


class Imports:
    """The imports of a file, wherever they stand, and the uses of what they bind."""

    def __init__(self, tree: ast.Module, nodes: Nodes) -> None:
        self.tree = tree
        self.nodes = nodes
        self.names: dict[str, set[str]] = {}
        """Local name -> qualified names (more than one after `try`/`except ImportError`)."""
        statements: list[ast.Import | ast.ImportFrom] = [*nodes.of(ast.Import), *nodes.of(ast.ImportFrom)]
        for statement in statements:
            if statement.names[0].name != "*":
                for name, qualified in imported(statement):
                    self.names.setdefault(name, set()).add(qualified)
        for statement in statements:
            if statement.names[0].name == "*":
                for name, qualified in imported(statement):
                    self.names.setdefault(name, {qualified})
        self._follow_aliases()

    def _follow_aliases(self) -> None:
        """`T = torch`, `autocast = torch.cuda.amp.autocast`: an assignment at module level binds like an import."""
        for statement in self.tree.body:
            if (
                isinstance(statement, ast.Assign)
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
                and isinstance(statement.value, ast.Name | ast.Attribute)
            ):
                for qualified in self.qualified(statement.value):
                    self.names.setdefault(statement.targets[0].id, set()).add(qualified)

    def qualified(self, node: ast.expr) -> set[str]:
        """The qualified names an expression may refer to; empty for anything that is no imported name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{base}.{node.attr}" for base in self.qualified(node.value)}
        return set()

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Every call of one of these qualified names."""
        for call, qualified in self._calls_of_imported:
            if not qualified.isdisjoint(names):
                yield call

    @cached_property
    def _calls_of_imported(self) -> list[tuple[ast.Call, set[str]]]:
        """The calls of imported names, each with what it may call: every rule asks for some of them."""
        named = ((call, self.qualified(call.func)) for call in self.nodes.of(ast.Call))
        return [(call, qualified) for call, qualified in named if qualified]
