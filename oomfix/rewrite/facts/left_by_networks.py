"""What networks leave behind for the loop to read: where a batch is split, that of its last part is left there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomfix.rewrite.dataflow.calls import calls_in
from oomfix.rewrite.dataflow.liveness import nodes_of_scope, nodes_of_scope_body
from oomfix.rewrite.facts.lift import CannotLift, Lift
from oomfix.script.facts.named_like import looks_like_loss
from oomfix.script.syntax.names import last_name, path_of
from oomfix.script.syntax.nodes import Nodes, walk
from oomfix.script.syntax.parameters import placed_parameters

_NUMBERS = frozenset("item mean sum norm len float int bool std var cross_entropy kl_div".split())
"""Calls that give a number for a batch, which the runtime puts together again."""


class LeftByNetworks:
    """What classes of a file write when their objects run: `self.attention = weights`, and names declared `global`.

    Args:
        nodes: all nodes of the file.
    """

    def __init__(self, nodes: Nodes) -> None:
        running = [method for owner in nodes.of(ast.ClassDef) for method in _run_by_forward(owner)]
        self._written = {name for method in running for name in _written_rows(method)}
        self._globals = {name for method in running for name in _declared_global(method)}

    def check(self, lift: Lift) -> None:
        """Whether the iteration reads none of them, but for the slice.

        Raises:
            CannotLift: it reads one that holds more than a number, of an object that the slice runs.
        """
        roots = [*lift.lifted, lift.site.root]
        run = {path for call in calls_in(*roots) if (path := path_of(call.func))}
        for node in self._reads(lift):
            path = path_of(node) or ""
            owner = path.rpartition(".")[0]
            if path and (not owner or any(_is_part(owner, one) for one in run)):
                raise CannotLift(f"line {node.lineno} reads {path}, which holds what the network ran on last")

    def _reads(self, lift: Lift) -> Iterator[ast.Attribute | ast.Name]:
        """Where the iteration, but for the slice, reads any of these names."""
        loop = lift.site.iteration or lift.site.scope
        inside = {id(node) for node in walk(*lift.lifted)}
        for node in nodes_of_scope(*loop.body):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()) if name in self._written and id(node) not in inside:
                    yield node
                case ast.Name(name, ctx=ast.Load()) if name in self._globals and id(node) not in inside:
                    yield node


def _is_part(owner: str, called: str) -> bool:
    """Whether a call may run what an attribute is read of: `net(x)`, `net.loss(x)`, or `net(x)` for `net.encoder`."""
    return f"{owner}.".startswith(f"{called}.") or (called.startswith(f"{owner}.") and owner != "self")


def _run_by_forward(owner: ast.ClassDef) -> list[ast.FunctionDef]:
    """What runs when an object of a class is called: `forward`, and the methods of the class that this calls."""
    methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
    running = [methods[name] for name in ("forward", "__call__") if name in methods]
    for method in running:
        called = {path_of(node.func) or "" for node in walk(method) if isinstance(node, ast.Call)}
        running += [one for name, one in methods.items() if f"self.{name}" in called and one not in running]
    return running


def _declared_global(method: ast.FunctionDef) -> Iterator[str]:
    for node in nodes_of_scope_body(method):
        if isinstance(node, ast.Global):
            yield from node.names


def _written_rows(method: ast.FunctionDef) -> Iterator[str]:
    """The attributes of its object that a method writes, but for those that hold numbers."""
    own = next((one.arg for one in placed_parameters(method.args)), "")
    for node in nodes_of_scope_body(method):
        if isinstance(node, ast.Assign) and not _is_number(node.value):
            for target in node.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and path_of(one.value) == own and not looks_like_loss(one.attr):
                        yield one.attr


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return True
        case ast.Name(name):
            return looks_like_loss(name)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Call(func=ast.Attribute(value=inner, attr="detach")):
            return _is_number(inner)
        case ast.Call():
            return last_name(value) in _NUMBERS or looks_like_loss(last_name(value))
    return False
