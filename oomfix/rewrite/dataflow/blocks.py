"""Where every node stands: its statement, the block that holds it, the function and loop around it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from oomfix.rewrite.dataflow.liveness import FunctionNode, Scope, definitely_bound, names_bound_by_target
from oomfix.script.syntax.names import last_name
from oomfix.script.syntax.nodes import children
from oomfix.script.syntax.parameters import names_of_parameters

Loop = ast.For | ast.AsyncFor | ast.While
# `except*` is of Python 3.11
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
_WITH_BLOCKS = (ast.mod, ast.stmt, ast.excepthandler, ast.match_case)
_STOPS = ("KeyboardInterrupt", "StopIteration", "SystemExit")


class Blocks:
    """The parents of every node of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._parents: dict[ast.AST, ast.AST] = {}
        self._blocks: dict[ast.stmt, tuple[list[ast.stmt], int]] = {}
        found: list[ast.AST] = [tree]
        for node in found:
            if below := children(node):
                self._parents.update(dict.fromkeys(below, node))
                found += below
            if isinstance(node, _WITH_BLOCKS):
                self._note_blocks(node)

    def _note_blocks(self, node: ast.AST) -> None:
        header = getattr(node, "lineno", 0)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                for statement in block:
                    self._blocks[statement] = (block, header)
                header = max(header, block[-1].end_lineno or 0)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that a node is, or is part of."""
        if isinstance(node, ast.stmt):
            return node
        return next(parent for parent in self.ancestors(node) if isinstance(parent, ast.stmt))

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements beside a statement, itself included."""
        return self._blocks[statement][0]

    def header_of(self, statement: ast.stmt) -> int:
        """A line above the statement's block that belongs to something else, 0 at the top of a file."""
        return self._blocks[statement][1]

    def scope_of(self, node: ast.AST) -> Scope | None:
        """The function or module that a node runs in; None in a class body or a lambda."""
        for parent in self.ancestors(node):
            if isinstance(parent, FunctionNode | ast.Module):
                return parent
            if isinstance(parent, ast.ClassDef | ast.Lambda):
                return None
        return None

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop around a node in its own scope."""
        for parent in self.ancestors(node):
            if isinstance(parent, Loop):
                return parent
            if isinstance(parent, FunctionNode | ast.ClassDef | ast.Lambda):
                return None
        return None

    def bound_before(self, statement: ast.stmt) -> frozenset[str]:
        """The names that are bound for certain when a statement's block is entered, in its own scope.

        What runs further down in a loop around it does not count: the first iteration comes before it.
        """
        bound: set[str] = set()
        node: ast.AST = statement
        for parent in self.ancestors(statement):
            if node is not statement and isinstance(node, ast.stmt):
                block = self.block_of(node)
                bound |= definitely_bound(block[: block.index(node)])
            if isinstance(parent, ast.For | ast.AsyncFor) and node in parent.body:
                bound |= names_bound_by_target(parent.target)
            elif isinstance(parent, ast.With | ast.AsyncWith):
                for item in parent.items:
                    if item.optional_vars is not None:
                        bound |= names_bound_by_target(item.optional_vars)
            elif isinstance(parent, FunctionNode):
                bound |= names_of_parameters(parent.args)
                break
            elif isinstance(parent, ast.ClassDef | ast.Module):
                break
            node = parent
        return frozenset(bound)

    def may_be_skipped_by_exceptions(self, node: ast.AST, calls_of: Callable[[FunctionNode], list[ast.Call]]) -> bool:
        """Whether an exception ahead of a node may be caught, so that the script goes on without having run it.

        A function that is called in such a `try` is left by the exception as well.

        Args:
            node: a node of the file.
            calls_of: gives the calls of a function.
        """
        scope = self.scope_of(node)
        if not isinstance(scope, FunctionNode):
            return self._is_guarded(node)
        in_callers_loop = self.loop_of(node) is None
        return self._is_guarded(node, in_callers_loop) or any(map(self._is_guarded, calls_of(scope)))

    def _is_guarded(self, node: ast.AST, in_callers_loop: bool = False) -> bool:
        """Whether a node is in the body of a `try` in a loop of its scope that goes on after an exception."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, FunctionNode | ast.ClassDef | ast.Lambda):
                return False
            if isinstance(parent, _TRIES) and child in parent.body and any(map(_goes_on, parent.handlers)):
                # one around all of the training is left with the training
                return in_callers_loop or self.loop_of(parent) is not None
            child = parent
        return False

    def conditions_of(self, node: ast.AST) -> list[ast.If]:
        """The `if` statements around a node in its scope, innermost first."""
        return [parent for parent, _ in self._branches(node)]

    def exclude_each_other(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in different branches of one `if`."""
        branches = {id(parent): side for parent, side in self._branches(one)}
        return any(id(parent) in branches and branches[id(parent)] != side for parent, side in self._branches(other))

    def branch_of(self, statement: ast.stmt) -> ast.If | ast.With | None:
        """The `if`, with all that hangs on it, or the `with` that a statement stands in; None: something else."""
        branch = self._parents[statement]
        while isinstance(branch, ast.If) and self.is_elif(branch):
            branch = self._parents[branch]
        return branch if isinstance(branch, ast.If | ast.With) else None

    def is_elif(self, condition: ast.If) -> bool:
        """Whether an `if` is the `elif` of another one."""
        parent = self._parents[condition]
        return isinstance(parent, ast.If) and next_in_chain(parent) is condition

    def are_apart_in(self, condition: ast.If, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in different branches of this `if`."""
        sides = [side for node in (one, other) for parent, side in self._branches(node) if parent is condition]
        return len(set(sides)) == 2

    def _branches(self, node: ast.AST) -> Iterator[tuple[ast.If, str]]:
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, FunctionNode | ast.ClassDef):
                return
            if isinstance(parent, ast.If):
                yield parent, "else" if child in parent.orelse else "body"
            child = parent


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the script goes on after a handler, unless that is of the keys that stop a training."""
    last = handler.body[-1]
    leaves = isinstance(last, ast.Raise | ast.Break) or (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and last_name(last.value) in ("exit", "_exit")
    )
    return not leaves and not (isinstance(handler.type, ast.Name) and handler.type.id in _STOPS)


def next_in_chain(condition: ast.If) -> ast.If | None:
    """The `elif` that an `if` goes on with."""
    match condition.orelse:
        case [ast.If() as other] if other.col_offset == condition.col_offset:
            return other
    return None
