"""Lifting: the slices of a file's backwards become functions, those of one loop together or not at all."""

from __future__ import annotations

import ast
from dataclasses import replace

from oomfix.rewrite.blocks import Blocks
from oomfix.rewrite.effects import Helpers, last_name
from oomfix.rewrite.layout import Layout
from oomfix.rewrite.lift import CannotLift, OutsideOfBlock, Site
from oomfix.rewrite.lifting import Lifting
from oomfix.rewrite.liveness import FunctionNode
from oomfix.rewrite.loops import Verdict
from oomfix.rewrite.module import Names
from oomfix.rewrite.slices import Slicer
from oomfix.rules.base import Edit
from oomfix.script import Script
from oomfix.script.names import path_of
from oomfix.script.trace import Forward

_LONGEST_LINE = 79


def lift_backwards(script: Script, order: list[tuple[Verdict, bool]], manager: str) -> list[Edit]:
    """The edits that turn backwards into functions, and the final form of each loop in its verdict.

    Args:
        script: a script whose backwards are the manager's.
        order: for each of them, in the order of the text: its loop, and whether to lift it.
        manager: the name of the manager.
    """
    calls = [
        node
        for node in ast.walk(script.source.tree)
        if isinstance(node, ast.Call) and path_of(node.func) == f"{manager}.backward" and node.args
    ]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    own = calls[-len(order) :] if len(calls) == len(order) else []
    wanted = [(verdict, call) for (verdict, lifted), call in zip(order, own, strict=False) if lifted]
    if not wanted:
        return []
    edits: list[Edit] = []
    lifter = _Lifter(script, manager)
    for verdict in dict.fromkeys(id(verdict) for verdict, _ in wanted):
        group = [(owner, call) for owner, call in wanted if id(owner) == verdict]
        owner = group[0][0]
        try:
            edits += [edit for _, call in group for edit in lifter.edits(call)]
        except CannotLift as reason:
            owner.reason = str(reason)
        else:
            owner.form, owner.reason = "micro-batched", None
    return edits


class _Lifter:
    """Lifts slices out of a text whose backwards are the manager's."""

    def __init__(self, script: Script, manager: str) -> None:
        source = script.source
        self._blocks = Blocks(source.tree)
        forwards = {id(forward.node) for forward in script.trace.forwards.values() if not self._only_resets(forward)}
        self._forwards = _RunsForward(source.tree, forwards)
        self._slicer = Slicer(source.tree, Helpers(source.tree), self._forwards)
        longest = max(map(len, source.lines), default=0)
        function = Names(source.tree).free("forward", "forward_batch")
        self._lifting = Lifting(Layout(source), manager, function, min(max(longest, _LONGEST_LINE), 120))

    def _only_resets(self, forward: Forward) -> bool:
        """`model.init_hidden()`: a method that is given nothing and whose result nobody takes."""
        alone = isinstance(next(self._blocks.ancestors(forward.node)), ast.Expr)
        return alone and not forward.node.args and not forward.node.keywords

    def edits(self, call: ast.Call) -> list[Edit]:
        """The edits that lift the slice of one backward.

        Raises:
            CannotLift: the slice has to stay where it is.
        """
        statement = self._blocks.statement_of(call)
        assert isinstance(statement, ast.Expr)
        scope = self._blocks.scope_of(statement)
        assert scope is not None
        site = Site(
            statement,
            self._blocks.block_of(statement),
            self._blocks.header_of(statement),
            scope,
            self._blocks.loop_of(statement),
            call.args[0],
            self._blocks.bound_before(statement),
        )
        try:
            lift = self._slicer.lift(site)
        except OutsideOfBlock:
            branch = next(self._blocks.ancestors(statement))
            if not isinstance(branch, ast.If) or statement not in branch.body:
                raise
            block, header = self._blocks.block_of(branch), self._blocks.header_of(branch)
            bound = self._blocks.bound_before(branch)
            lift = self._slicer.lift(replace(site, block=block, header=header, branch=branch, bound_before=bound))
        return self._lifting.edits(lift)


class _RunsForward:
    """Whether a node runs a network: a forward stands in it, or in a function of the file that it calls."""

    def __init__(self, tree: ast.Module, forwards: set[int]) -> None:
        self._forwards = forwards
        self._functions: dict[str, list[FunctionNode]] = {}
        for node in ast.walk(tree):
            if isinstance(node, FunctionNode):
                self._functions.setdefault(node.name, []).append(node)
        self._known: dict[int, bool] = {}

    def __call__(self, node: ast.AST) -> bool:
        return any(
            id(child) in self._forwards or any(self._in_function(f) for f in self._functions.get(last_name(child), ()))
            for child in ast.walk(node)
            if isinstance(child, ast.Call)
        )

    def _in_function(self, function: FunctionNode) -> bool:
        if id(function) not in self._known:
            self._known[id(function)] = False
            self._known[id(function)] = any(self(statement) for statement in function.body)
        return self._known[id(function)]
