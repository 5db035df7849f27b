"""What each name and attribute of a file refers to, by its imports: for rules about APIs, not about flow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from oomfix.script.syntax.names import imported, last_of, path_of
from oomfix.script.syntax.nodes import Nodes


class Imports:
    """The imports of a file, wherever they stand, and the uses of what they bind."""

    def __init__(self, tree: ast.Module, nodes: Nodes) -> None:
        self.tree = tree
        self.nodes = nodes
        self.names: dict[str, set[str]] = {}
        """Local name -> qualified names (more than one after `try`/`except ImportError`)."""
        for statement in self._statements(starred=False):
            for name, qualified in imported(statement):
                self.names.setdefault(name, set()).add(qualified)
        for statement in self._statements(starred=True):
            for name, qualified in imported(statement):
                self.names.setdefault(name, {qualified})
        self._follow_aliases()

    def _statements(self, starred: bool) -> list[ast.Import | ast.ImportFrom]:
        """The imports with a star, or those without."""
        statements: list[ast.Import | ast.ImportFrom] = [*self.nodes.of(ast.Import), *self.nodes.of(ast.ImportFrom)]
        return [statement for statement in statements if (statement.names[0].name == "*") == starred]

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

    def binds_ahead(self, name: str, line: int) -> bool:
        """Whether a name may be read at a line: an import above has bound it for the file, or a function around both.

        A star is trusted to bring it where the file reads the name, and imports it in no other way.
        """
        above = [one for one in self._statements(starred=False) if name in dict(imported(one))]
        if not above and any(read.id == name for read in self.nodes.of(ast.Name)):
            above = [one for one in self._statements(starred=True) if name in dict(imported(one))]
        return any(one.lineno < line and self._reaches(one, line) for one in above)

    def _reaches(self, statement: ast.stmt, line: int) -> bool:
        """Whether what an import binds is bound at a line below, too."""
        around = self._functions_around[statement]
        return around is not None and all(_is_around(function, line) for function in around)

    @cached_property
    def _functions_around(self) -> dict[ast.stmt, list[ast.FunctionDef | ast.AsyncFunctionDef] | None]:
        """The functions that each import stands in; None for one in a class, or for types alone."""
        for_types = [node for node in self.nodes.of(ast.If) if last_of(path_of(node.test)) == "TYPE_CHECKING"]
        skipped = {one for node in for_types for one in node.body}
        found: dict[ast.stmt, list[ast.FunctionDef | ast.AsyncFunctionDef] | None] = {}
        for statement in (*self._statements(starred=False), *self._statements(starred=True)):
            line = statement.lineno
            in_class = any(_is_around(node, line) for node in self.nodes.of(ast.ClassDef))
            around = [node for node in self.nodes.functions if _is_around(node, line)]
            found[statement] = None if in_class or statement in skipped else around
        return found

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


def _is_around(node: ast.stmt, line: int) -> bool:
    return node.lineno < line <= (node.end_lineno or node.lineno)
